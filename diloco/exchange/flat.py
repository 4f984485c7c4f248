"""Several tensors seen as one flat vector, so that a mean is added straight into the gradients that it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class Flat:
    """Tensors (fp32, CPU, contiguous), one after another, as a vector of `numel` values. Writing to a piece writes to
    its tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("the tensors of a flat vector must be contiguous")
        self._parts = [tensor.detach().view(-1) for tensor in tensors]
        self.numel = sum(part.numel() for part in self._parts)

    def pieces(self, start: int, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal length that cover `[start, start + len(values))`: a piece of this vector, and the values for
        it.
        """
        end, position = start + values.numel(), 0
        if end > self.numel:
            raise ValueError(f"values up to {end} for a vector of {self.numel}")
        for part in self._parts:
            low, high = max(start, position), min(end, position + part.numel())
            if low < high:
                yield part[low - position : high - position], values[low - start : high - start]
            position += part.numel()
            if position >= end:
                return
