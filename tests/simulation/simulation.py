"""N replicas of one run in virtual time: the real protocol, one step at a time, in an order that a seed decides.

A step takes a task from one store operation, sleep or wait to the next. The store's effects are atomic, and the
:class:`~tests.simulation.oracle.Oracle` looks at each as it happens. Everything that differs between two runs comes
from the scenario, so a seed replays exactly (nonces and host names apart, which decide nothing).
"""

from __future__ import annotations

import logging
import math
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from diloco.errors import (
    CorruptObjectError,
    DilocoError,
    DivergedError,
    ExitCode,
    FencedError,
    OutcomeUnknownError,
    RoundError,
    RoundTimeoutError,
    StoreUnreachableError,
)
from diloco.exchange import codec, layout
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.sharded import ShardedMean
from diloco.exchange.stores import MemoryStore
from diloco.supervisor import Backoff, Supervisor
from tests.simulation.oracle import Oracle, Violation, require
from tests.simulation.process import Process
from tests.simulation.scenario import IN_ROUND, Fault, Scenario, kind_of
from tests.simulation.store import FaultyStore
from tests.support.virtual import Task, World

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from diloco.exchange.shards import Shard
    from diloco.exchange.state import FragmentState

MOST_STEPS = 40_000
MOST_SECONDS = 600.0
"""Of virtual time: no fault lasts for longer than a minute, and no time-out for longer than two."""
MOST_BROKEN_STEPS = 500
"""So long a run goes on of which a committed payload is corrupt: it may have no end."""


class Step(Task[Any]):
    """A task of a process."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, Any], process: Process | None = None) -> None:
        super().__init__(name, coroutine)
        self.process = process
        self.next: tuple[str, str] | None = None
        """The store operation it is about to make."""
        self.listed_while_ending: bool | None = None
        """Whether the run's end had begun, and its result was missing, when it looked for checkpoints to prune by.
        None before that.
        """


@dataclass
class Outcome:
    """How a run went."""

    scenario: Scenario
    violation: str | None = None
    steps: int = 0
    trace: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """What happened in it, faults included: a search that never meets something proves nothing of it."""


class Simulation(World):
    """One run. Subclasses may choose otherwise who goes on."""

    def __init__(self, scenario: Scenario, *, traced: bool = False) -> None:
        super().__init__(scenario.seed)
        self.scenario = scenario
        self.memory = MemoryStore("memory:")
        self.oracle = Oracle(scenario, self.memory._objects)
        self.current: Step | None = None
        self._live: list[Step] = []
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self._traced = traced
        self._at_operation = [fault for fault in scenario.faults if fault.kind not in IN_ROUND]
        self._in_round = [fault for fault in scenario.faults if fault.kind in IN_ROUND]
        self._counts: dict[tuple[int, str, str], int] = {}
        self._rot: list[tuple[int, int]] = []
        self.supervisor = self._new_supervisor(scenario.ranks)
        for rank in range(scenario.world_size):
            self.launch(rank, self.supervisor)
        if scenario.joins is not None:
            self.start(self._later(scenario.joins, scenario.world_size, self.supervisor), "joiner")

    # ---- tasks

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str = "task") -> Task[Any]:
        """Add a task that belongs to no process."""
        return self.spawn(None, coroutine, name)

    def spawn(self, process: Process | None, coroutine: Coroutine[Any, Any, Any], name: str) -> Step:
        """Add a task."""
        task = Step(name, coroutine, process)
        task.wakes = self.monotonic()
        self._live.append(task)
        if process is not None:
            process.tasks.append(task)
        return task

    def pick(self, ready: list[Step], earliest: float) -> Step | None:  # noqa: ARG002 - a subclass may wait until then
        """Who goes on; None: nobody for now, look again. The next sleeper wakes at `earliest`."""
        if len(ready) == 1:
            return ready[0]
        current = self.current
        if current is not None and current in ready and self.random.random() < self.scenario.sticky:
            return current
        return self.random.choice(ready)

    def run(self, *, until: float | None = None) -> None:
        """Go on until all processes have ended. Raises Violation."""
        limit = MOST_SECONDS if until is None else until
        while self._live:
            now, earliest, ready = self._now, math.inf, []
            for live in self._live:
                process = live.process
                moment = live.wakes if process is None else max(live.wakes, process.paused_until)
                if moment <= now:
                    ready.append(live)
                elif moment < earliest:
                    earliest = moment
            if ready:
                self.steps += 1
                self.oracle.step = self.steps
                if self.oracle.broken_since and self.steps > self.oracle.broken_since + MOST_BROKEN_STEPS:
                    return
                require(self.steps < MOST_STEPS, lambda: f"{MOST_STEPS} steps, and these go on: {self._names()}")
                task = self.pick(ready, earliest)
                if task is not None:
                    self._advance(task)
            elif earliest < limit:
                self._now = earliest
            else:
                raise Violation(f"nothing comes of it: these still wait: {self._names()}")

    def _names(self) -> str:
        return ", ".join(task.name for task in self._live)

    def _advance(self, task: Step) -> None:
        self.current = task
        task.next = None
        task.advance()
        if task.problem is not None and not isinstance(task.problem, DilocoError):
            raise Violation(f"{task.name} crashes: {''.join(traceback.format_exception(task.problem))}")
        process = task.process
        if process is not None and process.doomed and not process.ended:
            self.current = None
            self.note(process, "killed", "")
            process.end(None, -9)
        elif task.done:
            self._live.remove(task)

    def stop(self) -> None:
        """End what still runs."""
        for task in self._live:
            task.kill()

    def note(self, process: Process, what: str, key: str) -> None:
        """Write a line of the trace."""
        if self._traced:
            self.trace.append(f"{self.steps:6} {self._now:8.2f} s  {process}: {what} {key}")

    # ---- processes and who restarts them

    def _new_supervisor(self, ranks: list[int]) -> Supervisor:
        scenario, backoff = self.scenario, Backoff(first=1.0, most=4.0)
        restarts = 3 if scenario.may_end else 12
        return Supervisor(ranks, scenario.policy, scenario.min_replicas, restarts, backoff, self.random)

    def launch(self, rank: int, supervisor: Supervisor) -> None:
        """Start a process."""
        process = Process(self, rank, len(self.processes), supervisor)
        self.note(process, "started", "")
        self.processes.append(process)

    async def _later(self, moment: float, rank: int, supervisor: Supervisor, *, again: bool = False) -> None:
        await self.sleep(moment - self._now)
        if supervisor.failure() is None:
            if again:
                supervisor.relaunched(rank, self._now)
            self.launch(rank, supervisor)

    def process_ended(self, process: Process) -> None:
        """Do what its supervisor decides."""
        self._live = [task for task in self._live if not task.done]
        self.note(process, f"ended ({process.exit_code})", str(process.problem or ""))
        self._check_end(process)
        decision = process.supervisor.decide(process.rank, process.exit_code, str(process.problem), self._now)
        if decision.action == "relaunch" and decision.at is not None:
            again = self._later(decision.at, process.rank, process.supervisor, again=True)
            self.start(again, f"restart of rank {process.rank}")

    def _check_end(self, process: Process) -> None:
        """Whether a process may end so, given what went wrong."""
        problem, scenario = process.problem, self.scenario
        self.oracle.seen.add(f"ends: {type(problem).__name__}")
        if problem is None or self.oracle.broken_since:
            return
        if isinstance(problem, FencedError):
            newest = max(self.oracle.claimed[process.rank])
            require(
                process is not self.oracle.claimed[process.rank][newest], f"{process} was fenced by nobody: {problem}"
            )
            fenced = sum(isinstance(p.problem, FencedError) for p in self.processes)
            most = sum(fault.kind in ("zombie", "twin") for fault in scenario.faults)
            require(fenced <= most, f"{process} was fenced though only {most} processes were started twice: {problem}")
            return
        expected = (
            (isinstance(problem, RoundTimeoutError) and scenario.may_time_out)
            or (isinstance(problem, DivergedError) and scenario.has("diverge", "flip") and self.oracle.ended)
            or (isinstance(problem, CorruptObjectError) and scenario.has("corrupt", "rot"))
            or (type(problem) is RoundError and scenario.may_end)
            or (isinstance(problem, (StoreUnreachableError, OutcomeUnknownError)) and scenario.has("unreachable"))
        )
        require(expected, f"{process} ends with {type(problem).__name__}: {problem}")

    def check_end(self) -> None:
        """After the last step: whether the run has reached its result and everyone has ended."""
        if self.oracle.broken_since:
            return
        running = [process for process in self.processes if not process.ended]
        require(not running, f"{', '.join(map(str, running))} never end")
        if self.scenario.may_end:
            return
        require(self.oracle.result is not None, "there is no result")
        for rank in self.scenario.ranks:
            codes = [process.exit_code for process in self.processes if process.rank == rank]
            require(ExitCode.OK in codes, f"no process of rank {rank} ends well: {codes}")

    # ---- faults

    def due(self, process: Process, operation: str, kind: str) -> Fault | None:
        """The fault that strikes at this operation, if any."""
        if not self._at_operation:
            return None
        found = None
        for where in (("any", "any"), (operation, kind)):
            place = (process.rank, *where)
            count = self._counts[place] = self._counts.get(place, -1) + 1
            for fault in self._at_operation:
                if (fault.rank, fault.operation, fault.object) == place and fault.nth <= count and found is None:
                    found = fault
        if found is not None:
            self._at_operation.remove(found)
            self.oracle.seen.add(found.kind)
        return found

    async def inject(self, process: Process, fault: Fault) -> None:
        """Let a fault strike a process that is about to make a store operation."""
        self.note(process, f"— {fault.kind}", "")
        if fault.kind in ("kill", "kill-late"):
            process.doomed = True
            await self.sleep(math.inf)
        elif fault.kind == "kill-all":
            for other in self.processes:
                if other is not process and not other.ended:
                    self.note(other, "killed", "")
                    other.end(None, -9)
            process.doomed = True
            await self.sleep(math.inf)
        elif fault.kind in ("zombie", "twin"):
            self.launch(process.rank, self._new_supervisor([process.rank]))
        elif fault.kind == "pause":
            process.paused_until = self._now + fault.seconds
        elif fault.kind == "delay":
            await self.sleep(fault.seconds)

    def strikes(self, kind: str, rank: int, round_: int) -> Fault | None:
        """Whether a planned fault strikes that rank in that round, now: it does so once."""
        for fault in self._in_round:
            if (fault.kind, fault.rank, fault.round) == (kind, rank, round_):
                self._in_round.remove(fault)
                self.oracle.seen.add(kind)
                if self._traced:
                    self.trace.append(f"{self.steps:6} {self._now:8.2f} s  rank {rank}: — {kind} in round {round_}")
                return fault
        return None

    def flip_when_digested(self, process: Process, state: FragmentState) -> None:
        """Flip a bit once the digest of what was applied is known, unless the next round or the vote was faster."""
        round_ = state.last_round

        async def flip() -> None:
            if process.replica is not None:
                await process.replica.digest(state.index)
                if state.last_round == round_ and not process.finishing:
                    process._flip(state)

        process.spawn(flip(), "flip")

    async def took_effect(self, process: Process, key: str) -> None:
        """After a change of the store: spoil payloads as planned."""
        process.effects += 1
        kind = kind_of(key)
        if kind == "payload" and key in self.memory._objects:
            round_ = int(key.split("/")[1])
            if self.strikes("corrupt", process.rank, round_):
                self._spoil(key)
        if kind == "mean" and self.strikes("rot-mean", process.rank, int(key.split("/")[1])):
            self._flip_bit(key)
            if key in process.wrong_means:  # nor can anybody average it again to these bits
                self.oracle.broken_since = self.oracle.step
        if kind == "commit":
            commit = self.oracle.commits[-1]
            for participant in commit.participants:
                if self.strikes("rot", participant.rank, commit.round):
                    self._spoil(self.random.choice(self.oracle.payload_keys(commit.round, participant.member)))

    def _spoil(self, key: str) -> None:
        if key in self.memory._objects:
            self._flip_bit(key)
            self.oracle.spoil(key)

    def _flip_bit(self, key: str) -> None:
        data = bytearray(self.memory._objects[key])
        part = layout.parse_part(key)
        framed = part is None or part[1] == 0
        place = self.random.randrange(codec.DATA_OFFSET if framed else 0, len(data))
        data[place] ^= 1 << self.random.randrange(8)
        self.memory._objects[key] = bytes(data)


_averaged = ShardedMean._averaged


async def _averaged_or_wrong(self: ShardedMean, shard: Shard) -> codec.Encoded:
    """What a replica averages, on a machine that may have a bit wrong."""
    encoded = await _averaged(self, shard)
    store = self._context.store
    process = (
        store._inner._process if isinstance(store, RetryingStore) and isinstance(store._inner, FaultyStore) else None
    )
    if process is not None and process.simulation.strikes("wrong-mean", process.rank, self._commit.round):
        process.wrong_means.add(layout.mean(self._commit.round, shard.index))
        values = self._out.views(shard.start, shard.stop)
        values[0][0] += 1.0
        return codec.encode_mean(values, self._codec, round_=self._commit.round, shard=shard.index)
    return encoded


@contextmanager
def repeatable() -> Iterator[None]:
    """One thread, and nothing is logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with mock.patch.object(ShardedMean, "_averaged", _averaged_or_wrong):
            yield
    finally:
        logging.disable(before)


def simulate(scenario: Scenario, *, traced: bool = False, simulation: Simulation | None = None) -> Outcome:
    """Run a scenario to its end, or to the first violation."""
    simulation = simulation or Simulation(scenario, traced=traced)
    outcome = Outcome(scenario)
    try:
        with repeatable():
            simulation.run()
            simulation.check_end()
    except Violation as violation:
        outcome.violation = str(violation)
    finally:
        simulation.stop()
    outcome.steps, outcome.trace, outcome.seen = simulation.steps, simulation.trace, simulation.oracle.seen
    return outcome
