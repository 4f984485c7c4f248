"""Several tensors seen as one flat vector, so that a mean is added straight into the gradients that it is for."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
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
        self._starts = list(accumulate((part.numel() for part in self._parts), initial=0))
        self.numel = self._starts.pop()

    def views(self, start: int, stop: int) -> list[torch.Tensor]:
        """The values `[start, stop)`, as views of the tensors that hold them."""
        views = []
        for part, position in zip(self._parts, self._starts, strict=True):
            low, high = max(start, position), min(stop, position + part.numel())
            if low < high:
                views.append(part[low - position : high - position])
        return views

    def pieces(self, start: int, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal length that cover `[start, start + len(values))`: a piece of this vector, and the values for
        it.
        """
        end = start + values.numel()
        if end > self.numel:
            raise ValueError(f"values up to {end} for a vector of {self.numel}")
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._parts)):
            part, position = self._parts[index], self._starts[index]
            if position >= end:
                return
            low, high = max(start, position), min(end, position + part.numel())
            if low < high:
                yield part[low - position : high - position], values[low - start : high - start]
