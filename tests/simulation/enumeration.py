"""Every schedule of a small run with a bounded number of deviations, one by one: nothing here is drawn by chance.

The plain schedule lets a task go on until it waits, then the next that is ready. A *deviation* stops the running task
before an operation and lets another one go first: one that is ready, or the next one that sleeps, as if the
operation took that long. With two deviations this covers what a context-bounded search (CHESS) does with two
preemptions.

Two reductions lose nothing. A task is stopped only before an operation that others can tell from a later one or that
can tell what others did: a create that others look for, a listing, a read of what is not there yet. All others
commute with whatever runs in between: the objects that they read never change, and what they write nobody reads
before a later create names it. And a process is killed once after each operation that changed the store (and
before the first): killed elsewhere it leaves the same objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.simulation.scenario import Scenario, kind_of
from tests.simulation.simulation import Simulation, simulate

if TYPE_CHECKING:
    from diloco.exchange.round_cost import Algorithm
    from tests.simulation.process import Process
    from tests.simulation.simulation import Step

PRIVATE = {"payload", "part", "claim", "report", "error"}
"""Nobody reads these before a record names them, or nobody else decides anything by them: without a zombie, a rank's
claims are looked at by its own processes only, one after another.
"""

Plan = tuple[tuple[int, int], ...]
"""Deviations: at which decision point, and which of its alternatives (from 1)."""


@dataclass(frozen=True)
class Kill:
    """Kill the first process of a rank after so many changes of the store."""

    rank: int
    effects: int


class Planned(Simulation):
    """A run whose schedule is a plan."""

    def __init__(
        self, scenario: Scenario, *, traced: bool = False, plan: Plan = (), kill: Kill | None = None, first: int = 0
    ) -> None:
        super().__init__(scenario, traced=traced)
        self._plan = dict(plan)
        self._kill = kill
        self.alternatives: list[int] = []
        """Of each decision point, how many deviations there are."""
        if first:
            self._live.reverse()
        if kill is not None and kill.effects == 0:
            self.processes[kill.rank].doomed = True

    def pick(self, ready: list[Step], earliest: float) -> Step | None:
        current = self.current
        if current is None or current not in ready:
            self.current = current = ready[0]
        others = [task for task in ready if task is not current]
        if current.next is None or not self._visible(*current.next):
            return current
        point = len(self.alternatives)
        self.alternatives.append(len(others) + (earliest < math.inf))
        choice = self._plan.get(point, 0)
        if choice == 0:
            return current
        if choice <= len(others):
            return others[choice - 1]
        # The operation takes until the next one wakes, which then comes first.
        current.wakes = earliest
        self._live.remove(current)
        self._live.append(current)
        self.current = None
        return None

    def _visible(self, operation: str, key: str) -> bool:
        kind = kind_of(key)
        if operation == "list":
            return kind in ("headers", "means", "checkpoints")
        if operation == "read":
            return key not in self.memory._objects
        return kind not in PRIVATE

    async def took_effect(self, process: Process, key: str) -> None:
        await super().took_effect(process, key)
        kill = self._kill
        if kill is not None and process is self.processes[kill.rank] and process.effects == kill.effects:
            process.doomed = True
            await self.sleep(math.inf)


def small(policy: Literal["strict", "skip"], reduce: Algorithm = "gather") -> Scenario:
    """Two replicas, two rounds, a checkpoint between them. Under `skip` either may go on alone."""
    return Scenario(
        seed=0,
        policy=policy,
        reduce=reduce,
        world_size=2,
        min_replicas=2 if policy == "strict" else 1,
        rounds=2,
        training=0.0,
        late_digests=False,
        beats=False,
    )


def kills(scenario: Scenario) -> list[Kill]:
    """Every point at which a process may be killed, by the plain schedule."""
    plain = Planned(scenario)
    run(plain)
    return [Kill(process.rank, done) for process in plain.processes for done in range(process.effects + 1)]


def run(simulation: Planned) -> str | None:
    """Run it; returns the violation, if there is one."""
    return simulate(simulation.scenario, simulation=simulation).violation


def explore(scenario: Scenario, kill: Kill | None, most: int) -> tuple[int, list[str]]:
    """Run every schedule with at most `most` deviations, whoever starts; returns how many, and what was violated."""
    count, violations = 0, []
    for first in (0, 1):
        plans: list[Plan] = [()]
        while plans:
            plan = plans.pop()
            simulation = Planned(scenario, plan=plan, kill=kill, first=first)
            violation = run(simulation)
            count += 1
            if violation is not None:
                violations.append(f"first {first}, {kill}, deviations {plan}: {violation}")
            if len(plan) < most:
                start = plan[-1][0] + 1 if plan else 0
                for point in range(start, len(simulation.alternatives)):
                    plans += [(*plan, (point, choice + 1)) for choice in range(simulation.alternatives[point])]
    return count, violations
