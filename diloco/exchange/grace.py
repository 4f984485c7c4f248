"""How long a round waits for stragglers under `skip`: a fixed time, or one that follows how late the ranks have been.

One constant is either a wait for everyone or a loss for the slow. The adaptive period is twice the lateness that nine
of ten recent arrivals stayed below, plus a second, between 1 and 30 seconds; it begins at the most, before anything
is known. Lateness counts from the moment at which `min_replicas` contributions were seen, on the observer's own
clock. Observers may differ: the commit record decides.
"""

from __future__ import annotations

from collections import deque

LEAST, MOST = 1.0, 30.0
RECENT = 32


class Grace:
    """The grace period of one observer. `fixed` overrides it."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._lateness: deque[float] = deque(maxlen=RECENT)

    def observe(self, lateness: float) -> None:
        """A rank was seen so many seconds after there were enough; one that was left out counts as late by the whole
        period.
        """
        self._lateness.append(lateness)

    @property
    def seconds(self) -> float:
        """The period now."""
        if self._fixed is not None:
            return self._fixed
        if not self._lateness:
            return MOST
        ranked = sorted(self._lateness)
        typical = ranked[min(len(ranked) * 9 // 10, len(ranked) - 1)]
        return min(max(2 * typical + 1.0, LEAST), MOST)
