"""The global state of a fragment: parameters and outer momentum, the outer step, and the digest by which replicas
compare them.

Every step from payload to parameters is a sequence of single, correctly rounded fp32 operations in a fixed order, so
that the bits are the same on any hardware. That rules out `add(alpha=…)`, `addcmul`, and foreach or fused optimizers:
their multiply-adds round once on one machine and twice on another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class OuterStep:
    """Outer SGD with (Nesterov) momentum, as DiLoCo uses it (https://arxiv.org/abs/2311.08105: lr 0.7, momentum 0.9,
    Nesterov).
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    @torch.no_grad()
    def __call__(self, parameter: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update `parameter` and `momentum` in place with a mean pseudo-gradient; all fp32, of one shape and device."""
        momentum.mul_(self.momentum)
        momentum.add_(gradient)
        if self.nesterov:
            step = momentum.mul(self.momentum)
            step.add_(gradient)
            step.mul_(self.lr)
        else:
            step = momentum.mul(self.lr)
        parameter.sub_(step)


@dataclass
class FragmentState:
    """Global parameters and momentum of one fragment, fp32, by name. May refer to live tensors; never to those the
    inner optimizer moves.
    """

    index: int
    parameters: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    last_round: int = -1
    """The last round that was applied; -1 for none."""
    layout: str = field(init=False)
    """Digest of the fragment's (name, shape, dtype)."""

    def __post_init__(self) -> None:
        if self.parameters.keys() != self.momentum.keys():
            raise ValueError("parameters and momentum of a fragment have different names")
        self.layout = blake3(repr([(n, tuple(t.shape), str(t.dtype)) for n, t in self.named()]).encode()).hexdigest()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters by name, sorted: the order of a payload."""
        for name in sorted(self.parameters):
            yield name, self.parameters[name]

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel() for tensor in self.parameters.values())

    @property
    def names(self) -> list[str]:
        """Names in payload order."""
        return sorted(self.parameters)

    def apply(self, mean: torch.Tensor, step: OuterStep, round_: int) -> None:
        """Apply a round's mean (fp32, shape [numel], in payload order): what torchft's outer step does, for a
        replay.
        """
        start = 0
        for name, parameter in self.named():
            part = mean[start : start + parameter.numel()].view(parameter.shape)
            # The momentum lives with the model, on a GPU perhaps; the bits of the step are the same on either side.
            momentum = self.momentum[name].to(parameter.device)
            step(parameter, momentum, part.to(parameter.device))
            self.momentum[name].copy_(momentum)
            start += parameter.numel()
        self.last_round = round_

    def copy(self) -> FragmentState:
        """A copy in CPU memory that nothing else refers to."""

        def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

        return FragmentState(self.index, copied(self.parameters), copied(self.momentum), self.last_round)

    def digest(self) -> str:
        """BLAKE3 over the index, the last round, (name, shape, dtype), and the chunk hashes of all parameters and
        momenta, hex.
        """
        total = blake3(f"fragment {self.index} after {self.last_round} {self.layout}".encode())
        for name, parameter in self.named():
            for tensor in (parameter, self.momentum[name]):
                data = memoryview(tensor.detach().cpu().contiguous().view(-1).numpy().data).cast("B")
                for offset in range(0, len(data), CHUNK_BYTES):
                    total.update(blake3(data[offset : offset + CHUNK_BYTES]).digest())
        return total.hexdigest()


def whole_digest(digests: list[str]) -> str:
    """One digest of all fragments' digests, in order: what a vote on the result carries."""
    return blake3("\n".join(digests).encode()).hexdigest()
