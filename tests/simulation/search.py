"""Many schedules at once, on all cores."""

from __future__ import annotations

import gc
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tests.simulation.enumeration import Kill, explore
from tests.simulation.scenario import SPECIAL, Scenario
from tests.simulation.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

CHUNK = 250


@dataclass
class Found:
    """What a search found."""

    schedules: int = 0
    violations: list[str] = field(default_factory=list)
    """Each with the command that replays it."""
    seen: Counter[str] = field(default_factory=Counter)
    """In how many schedules something happened."""

    def add(self, other: Found) -> None:
        """Add what another search found."""
        self.schedules += other.schedules
        self.violations += other.violations
        self.seen += other.seen

    def __str__(self) -> str:
        return "\n\n".join([f"{len(self.violations)} of {self.schedules} schedules", *self.violations[:5]])


def seeds(name: str, first: int, last: int) -> Found:
    """Simulate a range of seeds."""
    found = Found()
    for seed in range(first, last):
        outcome = simulate(SPECIAL[name](seed))
        found.schedules += 1
        found.seen.update(outcome.seen)
        if outcome.violation is not None:
            command = f"python -m tests.simulation {seed}" + (f" --scenario {name}" if name != "mix" else "")
            found.violations.append(f"{command}\n{outcome.scenario}\n{outcome.violation}")
    return found


def search(pool: Executor, name: str, first: int, last: int) -> Found:
    """The same, on all cores."""
    starts = range(first, last, CHUNK)
    found = Found()
    names, ends = [name] * len(starts), [min(start + CHUNK, last) for start in starts]
    for part in pool.map(seeds, names, starts, ends):
        found.add(part)
    return found


def enumerate_all(pool: Executor, run: Scenario, kills: Sequence[Kill | None], most: int) -> Found:
    """Every schedule of a run with at most `most` deviations and one of these kills, on all cores."""
    found = Found()
    for count, violations in pool.map(explore, [run] * len(kills), kills, [most] * len(kills)):
        found.add(Found(count, violations))
    return found


def all_cores() -> ProcessPoolExecutor:
    """Processes that search. To be shared: each loads torch first."""
    # Not forked: torch's threads don't survive that.
    return ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=get_context("spawn"),
        initializer=_collect_rarely,
    )


def _collect_rarely() -> None:
    """A tenth of the time went into looking for garbage among what is never garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
