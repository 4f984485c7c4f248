"""A model as DiLoCo exchanges it: which parameters each fragment trains, and what must simply be equal everywhere.

torchft syncs `named_parameters` and nothing else. So buffers and frozen parameters are compared by digest when a run
is joined, a buffer that changes during training is refused, and a parameter tied across fragments (torchft would step
it twice) is refused too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import nn
from torch.distributed.tensor import DTensor

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class TrainedFragment(nn.Module):
    """The trained parameters of one fragment, under the names that the exchange uses; all that torchft asks a
    fragment for.
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter, in a fixed order."""
        del recurse, remove_duplicate
        for name, parameter in self._named.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter


@dataclass(frozen=True)
class FragmentedModel:
    """A checked model. `constants` are digests of frozen parameters and persistent buffers by name."""

    fragments: list[TrainedFragment]
    constants: dict[str, str]
    buffers: dict[str, tuple[nn.Module, str]]
    """Module and name, since a module may replace a buffer instead of writing to it."""

    def check_buffers(self) -> None:
        """Raise ConfigurationError if a persistent buffer has changed since the model was fragmented."""
        for name, (module, inner) in self.buffers.items():
            if _digest(module.get_buffer(inner)) != self.constants[name]:
                raise ConfigurationError(
                    f"buffer {name} changes during training (running statistics?): DiLoCo averages parameters only, so "
                    "replicas would keep different ones; use LayerNorm or GroupNorm, put the module in eval(), or "
                    "register the buffer with persistent=False"
                )

    @property
    def shapes(self) -> dict[str, str]:
        """`<fragment>/<name>` → `float32[384, 128]` of every trained parameter."""
        return {
            f"{index}/{name}": f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
            for index, fragment in enumerate(self.fragments)
            for name, parameter in fragment.named_parameters()
        }


def fragment_model(modules: Sequence[nn.Module], inner_optimizer: torch.optim.Optimizer) -> FragmentedModel:
    """Check a model that is given as a list of fragments, and take it apart.

    Raises ConfigurationError, naming the parameter or buffer and what to do, for: no trained parameter in a fragment;
    a trained parameter that is not fp32 or is sharded (DTensor); one that is in two fragments; one that the inner
    optimizer trains and no fragment has.
    """
    owners: dict[int, tuple[int, str]] = {}
    fragments: list[TrainedFragment] = []
    constants: dict[str, str] = {}
    buffers: dict[str, tuple[nn.Module, str]] = {}
    for index, module in enumerate(modules):
        trained: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if id(parameter) in owners and owners[id(parameter)][0] != index:
                other, theirs = owners[id(parameter)]
                raise ConfigurationError(
                    f"parameter {name} of fragment {index} is tied to {theirs} of fragment {other} and would be "
                    "stepped twice: put tied modules into one fragment, or use one fragment"
                )
            owners[id(parameter)] = (index, name)
            if parameter.requires_grad:
                _check_parameter(index, name, parameter)
                trained[name] = parameter
            else:
                constants[f"{index}/{name}"] = _digest(parameter)
        if not trained:
            raise ConfigurationError(f"fragment {index} has no parameter that requires a gradient: use fewer fragments")
        fragments.append(TrainedFragment(trained))
        for name in _persistent_buffers(module):
            buffers[f"{index}/{name}"] = (module, name)
            constants[f"{index}/{name}"] = _digest(module.get_buffer(name))
    for group in inner_optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in owners:
                raise ConfigurationError(
                    f"the inner optimizer trains a parameter of shape {list(parameter.shape)} that is in no fragment: "
                    "it would differ from replica to replica; add its module to model_fragments"
                )
    return FragmentedModel(fragments, constants, buffers)


def _check_parameter(index: int, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ConfigurationError(
            f"parameter {name} of fragment {index} is sharded (DTensor): a replica holds its model whole"
        )
    if parameter.ndim == 0:
        raise ConfigurationError(
            f"parameter {name} of fragment {index} has no dimension, which torchft 0.2.0 can't copy: use shape [1]"
        )
    if parameter.dtype != torch.float32:
        raise ConfigurationError(
            f"parameter {name} of fragment {index} is {str(parameter.dtype).removeprefix('torch.')}: small outer steps "
            "would be lost in it; keep the parameters in float32 and compute in bf16 with torch.autocast"
        )


def _persistent_buffers(module: nn.Module) -> list[str]:
    stateful = module.state_dict(keep_vars=True)
    return [name for name, buffer in module.named_buffers() if name in stateful and buffer is not None]


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    described = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return blake3(described + flat.view(torch.uint8).numpy().tobytes() if flat.numel() else described).hexdigest()
