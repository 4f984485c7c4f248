"""What becomes of a rank whose process has ended: relaunched later, done, given up, or the end of the run.

Pure: time, exit codes and randomness come from the caller, and nothing is started here. :mod:`diloco.run` is the loop
around it.

| exit code | meaning | what follows |
|---|---|---|
| 0 | the rank is done | nothing |
| 78, 2 | the configuration can't work | the run fails at once |
| 76 | fenced: a newer attempt of the rank lives | never relaunched, still takes part |
| any other, a signal, none | it died | relaunched after a back-off, up to `max_restarts` times; then given up |

Under `strict` a rank that is given up fails the run, under `skip` only if fewer than `min_replicas` ranks are left.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from diloco.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

Action = Literal["relaunch", "done", "fenced", "out", "fail"]
State = Literal["running", "waiting", "done", "fenced", "out"]

_HOPELESS = (ExitCode.BAD_CONFIGURATION, ExitCode.USAGE)


@dataclass(frozen=True)
class Backoff:
    """Seconds before a restart: `first`, doubled each time, at most `most`, up to a quarter less by chance. One that
    lived for `well` seconds was interrupted, and does not crash in a loop: it is restarted at once, and the next time
    counts as the first.
    """

    first: float = 1.0
    most: float = 30.0
    well: float = 30.0

    def seconds(self, restart: int, chance: random.Random) -> float:
        """How long to wait before that restart in a row; they count from 1."""
        doubled = math.ldexp(self.first, min(restart - 1, 60))
        return min(self.most, doubled) * (1.0 - 0.25 * chance.random())


@dataclass(frozen=True)
class Decision:
    """What follows from the end of a rank's process. `text` says it in words; for `fail`, why the run ends."""

    action: Action
    text: str
    at: float | None = None
    """When to relaunch, on the caller's clock."""


@dataclass
class _Rank:
    state: State = "running"
    restarts: int = 0
    in_a_row: int = 0
    """Restarts after which its process did not live well, since the last that did."""
    started: float = math.inf
    """When its process was started; after `now` for ever if that is not known."""
    at: float = 0.0
    ended: str = ""
    """How its last process ended, for people."""


@dataclass
class Supervisor:
    """The state of every rank of one launch.

    `max_restarts` is for each rank; 0 relaunches none. Call :meth:`decide` whenever a process has ended, and
    :meth:`relaunched` for each rank that :meth:`due` names once it is started again.
    """

    ranks: Iterable[int]
    policy: Literal["strict", "skip"]
    min_replicas: int
    max_restarts: int
    backoff: Backoff = field(default_factory=Backoff)
    chance: random.Random = field(default_factory=random.Random)
    hopeless: str | None = field(default=None, init=False)
    _ranks: dict[int, _Rank] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = {rank: _Rank() for rank in self.ranks}

    def launched(self, now: float) -> None:
        """All ranks' first processes have been started."""
        for it in self._ranks.values():
            it.started = now

    def decide(self, rank: int, exit_code: int | None, error: str | None, now: float) -> Decision:
        """Take note of how a rank's process ended, and say what follows. `exit_code` is None where there is none."""
        it = self._ranks[rank]
        it.ended = f"rank {rank} ended{_how(exit_code, ' with exit code ')}: {error}"
        if exit_code == ExitCode.OK:
            it.state = "done"
            return Decision("done", "finished")
        if exit_code == ExitCode.FENCED:
            it.state, it.ended = "fenced", f"rank {rank} was fenced: {error}"
            return Decision("fenced", f"fenced: {error}")
        why = f"{_how(exit_code, 'exit code ') or 'it ended'}: {error}"
        if exit_code in _HOPELESS:
            it.state = "out"
            self.hopeless = self.hopeless or it.ended
        elif it.restarts < self.max_restarts:
            wait = self.backoff.seconds(it.in_a_row + 1, self.chance)
            if now - it.started >= self.backoff.well:
                it.in_a_row, wait = -1, 0.0
            it.state, it.at = "waiting", now + wait
            return Decision(
                "relaunch", f"restart {it.restarts + 1} of {self.max_restarts} in {wait:.0f} s: {why}", it.at
            )
        else:
            it.state = "out"
        failure = self.failure()
        return (
            Decision("out", f"given up{_after(it.restarts)}: {why}") if failure is None else Decision("fail", failure)
        )

    def due(self, now: float) -> list[int]:
        """Ranks whose time to be relaunched has come."""
        return [rank for rank, it in self._ranks.items() if it.state == "waiting" and it.at <= now]

    def relaunched(self, rank: int, now: float) -> None:
        """The rank's next process is being started: that is one restart, whether or not it comes up."""
        it = self._ranks[rank]
        it.state, it.started = "running", now
        it.restarts, it.in_a_row = it.restarts + 1, it.in_a_row + 1

    def restarts(self, rank: int) -> int:
        """How often a rank was relaunched."""
        return self._ranks[rank].restarts

    def state(self, rank: int) -> State:
        """Where a rank stands."""
        return self._ranks[rank].state

    @property
    def idle(self) -> bool:
        """Whether no process runs and none will be started."""
        return all(it.state in ("done", "fenced", "out") for it in self._ranks.values())

    def failure(self) -> str | None:
        """Why the run can't reach its result, or None while it can."""
        if self.hopeless is not None:
            return self.hopeless
        out = [it for it in self._ranks.values() if it.state == "out"]
        left = len(self._ranks) - len(out)
        if not out or (self.policy == "skip" and left >= self.min_replicas):
            return None
        why = "; ".join(it.ended + _times(it.restarts) for it in out)
        return why if self.policy == "strict" else f"{why} (left: {left}, --min-replicas {self.min_replicas})"

    def explain(self) -> str | None:
        """How all ranks ended that did not end well, or None."""
        return (
            self.failure()
            or "; ".join(it.ended + _times(it.restarts) for it in self._ranks.values() if it.state in ("fenced", "out"))
            or None
        )


def _how(exit_code: int | None, words: str) -> str:
    return "" if exit_code is None else f"{words}{exit_code}"


def _after(restarts: int) -> str:
    return f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""


def _times(restarts: int) -> str:
    return f" (restarted {restarts} time{'s' * (restarts > 1)})" if restarts else ""
