"""Taking a model apart: what is trained, what must be equal everywhere, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from diloco.errors import ConfigurationError
from diloco.fragments import fragment_model

if TYPE_CHECKING:
    from diloco.fragments import FragmentedModel


def model(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), nn.Linear(3, 2)]


def take_apart(*modules: nn.Module, parameters: list[nn.Parameter] | None = None) -> FragmentedModel:
    parameters = [p for module in modules for p in module.parameters()] if parameters is None else parameters
    return fragment_model(modules, torch.optim.SGD(parameters, lr=0.1))


def test_every_trained_parameter_by_fragment_and_name() -> None:
    modules = model()
    taken = take_apart(*modules)
    assert taken.shapes == {
        "0/0.weight": "float32[3, 4]",
        "0/0.bias": "float32[3]",
        "0/1.weight": "float32[3]",
        "0/1.bias": "float32[3]",
        "1/weight": "float32[2, 3]",
        "1/bias": "float32[2]",
    }
    assert taken.constants == {}
    for module, fragment in zip(modules, taken.fragments, strict=True):
        assert [id(p) for _, p in fragment.named_parameters()] == [id(p) for p in module.parameters()]
        assert [id(p) for p in fragment.parameters()] == [id(p) for p in module.parameters()]
    assert [name for name, _ in taken.fragments[1].named_parameters(prefix="x")] == ["x.weight", "x.bias"]


def test_bf16_parameters_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"parameter 0\.weight of fragment 0 is bfloat16: .* keep the parameters in float32"
    ):
        take_apart(*(module.bfloat16() for module in model()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    first, second = model()[0], nn.Linear(3, 2)
    second.bias = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ConfigurationError, match=f"parameter bias of fragment 1 is {str(dtype)[6:]}"):
        take_apart(first, second, parameters=list(first.parameters()))


def test_a_parameter_tied_across_fragments_is_refused_by_both_names() -> None:
    embedding, linear = nn.Embedding(7, 3), nn.Linear(3, 7)
    shared = linear.weight = nn.Parameter(torch.ones(7, 3))
    embedding.weight = shared
    head = nn.Sequential(linear)
    with pytest.raises(
        ConfigurationError, match=r"parameter 0\.weight of fragment 1 is tied to weight of fragment 0 .* one fragment"
    ):
        take_apart(embedding, head, parameters=[shared])


def test_a_parameter_tied_inside_a_fragment_is_trained_once() -> None:
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    shared = head.weight = nn.Parameter(torch.ones(7, 3))
    embedding.weight = shared
    assert take_apart(nn.Sequential(embedding, head), parameters=[shared]).shapes == {"0/0.weight": "float32[7, 3]"}


def test_frozen_parameters_are_left_out_and_compared() -> None:
    def frozen(value: float) -> FragmentedModel:
        first, second = model()[0], nn.Linear(3, 2)
        torch.nn.init.ones_(second.bias)
        second.weight = nn.Parameter(torch.full((2, 3), value), requires_grad=False)
        return take_apart(first, second)

    assert "1/weight" not in frozen(1.0).shapes
    assert list(frozen(1.0).constants) == ["1/weight"]
    assert frozen(1.0).constants == frozen(1.0).constants != frozen(2.0).constants


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    first, second = model()[0], nn.Linear(3, 2)
    second.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16), requires_grad=False)
    assert list(take_apart(first, second).constants) == ["1/weight"]


def test_a_fragment_without_a_trained_parameter_is_refused() -> None:
    first, second = model()
    with pytest.raises(ConfigurationError, match="fragment 1 has no parameter that requires a gradient"):
        take_apart(first, second.requires_grad_(False))


def test_a_parameter_of_the_optimizer_that_is_in_no_fragment_is_refused() -> None:
    first, second = model()
    with pytest.raises(
        ConfigurationError, match=r"the inner optimizer trains a parameter of shape \[2, 3\] that is in no fragment"
    ):
        take_apart(first, parameters=[*first.parameters(), *second.parameters()])


class Masked(nn.Module):
    """Has a constant buffer, a scalar one, an empty one, and one that is not kept."""

    scale: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def test_constant_buffers_are_accepted_and_compared() -> None:
    module = Masked()
    taken = take_apart(module)
    assert set(taken.constants) == {"0/mask", "0/scale", "0/nothing"}
    module.cache.add_(1)
    with torch.no_grad():
        module.linear.weight.add_(1)
    taken.check_buffers()
    other = Masked()
    other.scale.fill_(3)
    assert take_apart(other).constants["0/scale"] != taken.constants["0/scale"]
    assert take_apart(other).constants["0/mask"] == taken.constants["0/mask"]


def test_a_buffer_that_changes_is_refused_by_name() -> None:
    norm = nn.BatchNorm1d(3)
    taken = take_apart(nn.Linear(2, 2), nn.Sequential(nn.Linear(4, 3), norm))
    taken.check_buffers()
    norm(torch.randn(5, 3))
    with pytest.raises(
        ConfigurationError, match=r"buffer 1/1\.(running_mean|num_batches_tracked) changes .* LayerNorm"
    ):
        taken.check_buffers()


def test_batch_norm_that_does_not_learn_is_accepted() -> None:
    norm = nn.BatchNorm1d(3).eval()
    taken = take_apart(norm)
    norm(torch.randn(5, 3))
    taken.check_buffers()


def test_a_buffer_that_is_replaced_by_another_is_refused_by_name() -> None:
    module = Masked()
    taken = take_apart(module)
    module.scale = module.scale * 0.9
    with pytest.raises(ConfigurationError, match="buffer 0/scale changes during training"):
        taken.check_buffers()
