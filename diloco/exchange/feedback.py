"""Error feedback (https://arxiv.org/abs/1901.09847): what a replica's coarse payloads fell short of, which it adds
to its next pseudo-gradient of the same fragment.

A residual is a debt to the run's global parameters. It is owed only while the payload that left it behind was
averaged and this replica goes on from there. So it is forgotten with a contribution that was left out, since what was
in it is lost with it, or that was NaN and never sent, since the residual would be NaN for ever; and after a catch-up,
since the others have moved on and an old correction would only be noise. That loses at most half a quantisation step
a value, once.

It is private: the others see its effect in the payload alone, so it needs no agreement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "feedback/"


class Feedback:
    """The residuals of one replica, one a fragment that has been sent: fp32 vectors in payload order."""

    def __init__(self) -> None:
        self._residuals: dict[int, torch.Tensor] = {}

    def residual(self, fragment: int, numel: int) -> torch.Tensor:
        """What is owed to a fragment, shape [numel]: to be changed in place."""
        if fragment not in self._residuals or self._residuals[fragment].numel() != numel:
            self._residuals[fragment] = torch.zeros(numel)
        return self._residuals[fragment]

    def forget(self, fragment: int) -> None:
        """Owe nothing to a fragment."""
        self._residuals.pop(fragment, None)

    def forget_all(self) -> None:
        """Owe nothing to any."""
        self._residuals.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy, by names that no inner optimizer's state has."""
        return {f"{_PREFIX}{fragment}": residual.clone() for fragment, residual in self._residuals.items()}

    def load(self, state: Mapping[str, torch.Tensor], *, unchanged: set[int]) -> None:
        """Take over a copy, but only for the fragments in `unchanged`: those whose turn has not come since it was made.
        A contribution that was sent later has paid the debt already.
        """
        for name, residual in state.items():
            fragment = name.removeprefix(_PREFIX)
            if is_feedback(name) and int(fragment) in unchanged:
                self._residuals[int(fragment)] = residual.clone()


def is_feedback(name: str) -> bool:
    """Whether a tensor of a replica's own state is a residual."""
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal()
