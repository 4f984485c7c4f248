"""Time as a parameter: the protocol never looks at a wall clock, and tests give it a virtual one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random


class Clock(Protocol):
    """A monotonic clock and a way to wait on it. Seconds."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""


class SystemClock:
    """The machine's monotonic clock under asyncio."""

    def monotonic(self) -> float:
        """Seconds of :func:`time.monotonic`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """:func:`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class Poll:
    """The pace of one wait: back-off between polls, and time that counts only while polls succeed one after another.

    A gap longer than two intervals (a paused process, a store outage) sets :attr:`stalls` up by one, which resets every
    :class:`Timer` of the wait: nobody is declared late by a process that was itself asleep.
    """

    def __init__(self, clock: Clock, first: float, most: float, jitter: random.Random) -> None:
        self._clock = clock
        self._interval = first
        self._most = most
        self._jitter = jitter
        self._last = clock.monotonic()
        self._slowest = most
        self.elapsed = 0.0
        """Counted seconds since the wait began, or since the last stall."""
        self.total = 0.0
        """Counted seconds of the whole wait; a stall adds nothing, and takes nothing away."""
        self.stalls = 0

    def succeeded(self) -> None:
        """A poll of the store has answered: count the time since the last one, or discard all that was counted."""
        now = self._clock.monotonic()
        passed, self._last = now - self._last, now
        # A store that is merely slow answers late every time: only a sudden gap is a stall.
        if passed > 2 * max(self._interval, self._slowest):
            self.elapsed = 0.0
            self.stalls += 1
        else:
            self.elapsed += passed
            self.total += passed
        self._slowest = max(self._most, passed)

    async def pause(self) -> None:
        """Sleep until the next poll; the interval grows by half each time, up to the most."""
        await self._clock.sleep(self._interval * (0.75 + 0.5 * self._jitter.random()))
        self._interval = min(self._interval * 1.5, self._most)


class Timer:
    """Seconds of a :class:`Poll` since this timer was started, starting again after a stall."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._from = self._poll.elapsed
        self._stalls = self._poll.stalls

    @property
    def seconds(self) -> float:
        """Counted seconds."""
        if self._stalls != self._poll.stalls:
            self._from, self._stalls = 0.0, self._poll.stalls
        return self._poll.elapsed - self._from
