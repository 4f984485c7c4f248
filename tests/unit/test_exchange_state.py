"""The outer step by numbers, and a digest that nothing escapes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.exchange.state import CHUNK_BYTES, FragmentState, OuterStep, whole_digest


def state(seed: int = 0, index: int = 0) -> FragmentState:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b": (3,), "a": (2, 5), "scale": ()}
    return FragmentState(
        index,
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.1, 0.5)])
def test_the_outer_step_is_torchs_sgd(lr: float, momentum: float, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(40, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    buffer = torch.zeros(40)
    step = OuterStep(lr, momentum, nesterov)
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=nesterov)
    for _ in range(5):
        gradient = torch.randn(40, generator=generator)
        step(ours, buffer, gradient)
        theirs.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)
    assert float((ours - theirs.detach()).abs().max()) < 1e-6 < float(ours.abs().max())


def test_the_outer_step_by_hand() -> None:
    parameter, momentum = torch.tensor([1.0]), torch.tensor([2.0])
    OuterStep(lr=0.5, momentum=0.25)(parameter, momentum, torch.tensor([4.0]))
    assert momentum.tolist() == [4.5]  # 0.25 · 2 + 4
    assert parameter.tolist() == [1 - 0.5 * (4 + 0.25 * 4.5)]


def test_the_gradient_is_left_alone() -> None:
    gradient = torch.ones(3)
    OuterStep()(torch.zeros(3), torch.zeros(3), gradient)
    assert gradient.tolist() == [1.0] * 3


def test_a_mean_is_applied_in_payload_order() -> None:
    target = state()
    expected = copy.deepcopy(target)
    mean = torch.arange(14.0)
    target.apply(mean, OuterStep(), 7)
    for name, part in (("a", mean[:10].view(2, 5)), ("b", mean[10:13]), ("scale", mean[13])):
        OuterStep()(expected.parameters[name], expected.momentum[name], part)
        assert torch.equal(target.parameters[name], expected.parameters[name])
        assert torch.equal(target.momentum[name], expected.momentum[name])
    assert target.names == ["a", "b", "scale"]
    assert (target.last_round, target.numel) == (7, 14)


@given(
    name=st.sampled_from(["a", "b", "scale"]),
    of_momentum=st.booleans(),
    value=st.integers(0, 9),
    bit=st.integers(0, 31),
)
def test_any_bit_changes_the_digest(name: str, of_momentum: bool, value: int, bit: int) -> None:
    flipped = state()
    tensor = (flipped.momentum if of_momentum else flipped.parameters)[name]
    bits = tensor.view(-1).view(torch.int32)
    at = value % bits.numel()
    bits[at] ^= -(2**31) if bit == 31 else 1 << bit
    assert flipped.digest() != state().digest()
    bits[at] ^= -(2**31) if bit == 31 else 1 << bit
    assert flipped.digest() == state().digest()


def test_what_else_changes_the_digest() -> None:
    plain = state()
    same = state()
    assert same.digest() == plain.digest()
    later = state()
    later.last_round = 0
    swapped = FragmentState(0, plain.momentum, plain.parameters)
    renamed = FragmentState(
        0,
        {("c" if name == "b" else name): tensor for name, tensor in plain.parameters.items()},
        {("c" if name == "b" else name): tensor for name, tensor in plain.momentum.items()},
    )
    reshaped = FragmentState(
        0,
        {name: tensor.view(5, 2) if name == "a" else tensor for name, tensor in plain.parameters.items()},
        plain.momentum,
    )
    digests = [s.digest() for s in (plain, later, swapped, renamed, reshaped, state(index=1), state(seed=1))]
    assert len(set(digests)) == len(digests)


def test_the_order_of_a_dict_does_not_change_the_digest() -> None:
    plain = state()
    turned = FragmentState(
        0, dict(reversed(list(plain.parameters.items()))), dict(reversed(list(plain.momentum.items())))
    )
    assert turned.digest() == plain.digest()


def test_views_and_whole_chunks_are_digested_by_value() -> None:
    long = torch.arange(CHUNK_BYTES // 4 + 3, dtype=torch.float32)
    whole = FragmentState(0, {"w": long}, {"w": torch.zeros_like(long)})
    strided = torch.stack([long, long], dim=1)[:, 0]
    assert not strided.is_contiguous()
    view = FragmentState(0, {"w": strided}, {"w": torch.zeros_like(long)})
    assert view.digest() == whole.digest()
    before = whole.digest()
    long[-1] += 1
    assert whole.digest() != before


def test_an_empty_parameter_has_a_digest() -> None:
    empty = FragmentState(0, {"w": torch.ones(2), "none": torch.empty(0)}, {"w": torch.ones(2), "none": torch.empty(0)})
    assert empty.digest() == empty.digest()


def test_names_must_match() -> None:
    with pytest.raises(ValueError, match="different names"):
        FragmentState(0, {"a": torch.zeros(1)}, {"b": torch.zeros(1)})


def test_the_whole_digest_depends_on_order() -> None:
    assert whole_digest(["a", "b"]) != whole_digest(["b", "a"]) != whole_digest(["ab"])
