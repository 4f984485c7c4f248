"""One process of a run: what :mod:`diloco.manager`, :mod:`diloco.presence` and :mod:`diloco.replica_entrypoint` do
between the calls of :class:`diloco.exchange.replica.Replica`, in the same order, as tasks of the simulation.

The training thread is the task `main`, the background thread's coroutines are tasks beside it. A fenced process ends
every wait of its training thread, while coroutines that are under way go on until the last words are written.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from diloco.errors import CorruptObjectError, DilocoError, ExitCode, FencedError, StoreError
from diloco.exchange import ending, inner, layout, membership
from diloco.exchange.records import Beat, ErrorReport, RunRecord
from diloco.exchange.replica import Replica, Turn
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.state import FragmentState, OuterStep, whole_digest
from tests.simulation.oracle import LR, MOMENTUM, require
from tests.simulation.scenario import CHUNK_BYTES, SHAPES
from tests.simulation.store import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Generator, Sequence

    from diloco.exchange.checkpoint import Snapshot
    from diloco.exchange.layout import Member
    from diloco.supervisor import Supervisor
    from tests.simulation.simulation import Simulation, Step

    T = TypeVar("T")


class Clock:
    """A process's own clock: it shares nothing with the others' but its pace."""

    def __init__(self, simulation: Simulation, offset: float) -> None:
        self._simulation = simulation
        self._offset = offset

    def monotonic(self) -> float:
        return self._simulation.monotonic() + self._offset

    async def sleep(self, seconds: float) -> None:
        await self._simulation.sleep(seconds)


class LateDigest:
    """A digest that a thread computes: some time after it was asked for."""

    def __init__(self, process: Process, state: FragmentState) -> None:
        async def compute() -> str:
            await process.simulation.switch()
            return state.digest()

        self._task = process.spawn(compute(), "digest")

    def __await__(self) -> Generator[Any, None, str]:
        return self._task.ended().__await__()


class ReadyDigest:
    """The same, computed at once."""

    def __init__(self, state: FragmentState) -> None:
        self._digest = state.digest()

    def __await__(self) -> Generator[Any, None, str]:
        yield from ()
        return self._digest


class Process:
    """One attempt of a rank. `supervisor` decides what follows from its end."""

    def __init__(self, simulation: Simulation, rank: int, number: int, supervisor: Supervisor) -> None:
        scenario = simulation.scenario
        self.simulation, self.rank, self.supervisor = simulation, rank, supervisor
        self.random = random.Random(f"{scenario.seed}/{rank}/{number}")
        self.clock = Clock(simulation, self.random.uniform(0, 1e6))
        self.settings = ExchangeSettings(
            policy=scenario.policy,
            reduce=scenario.reduce,
            min_replicas=scenario.min_replicas,
            timeout=scenario.timeout,
            grace=scenario.grace,
            checkpoint_every=scenario.checkpoint_every,
            retry_for=20.0,
            join_timeout=10.0,
            dead_after=6.0,
            beat_every=2.0,
            poll_first=0.05,
        )
        bare = FaultyStore(simulation.memory, self)
        self.store = RetryingStore(bare, self.clock, budget=self.settings.retry_for, jitter=self.random)
        self.number = number
        self.member: Member | None = None
        self.replica: Replica | None = None
        self.tasks: list[Step] = []
        self.paused_until = 0.0
        self.doomed = self.ended = self.finishing = False
        self.problem: BaseException | None = None
        self.exit_code: int | None = None
        self.effects = 0
        self.wrong_means: set[str] = set()
        """Keys of the means of which it had a bit wrong."""
        self.turn_began = 0
        self.tainted = self.was_tainted = False
        """A fault has changed its state: it may differ from the truth until it has loaded it again. A checkpoint of
        the time may be written later.
        """
        self._fatal: FencedError | None = None
        self._over: Turn | None = None
        self._writing: Step | None = None
        self._beats = 0
        self.spawn(self._live(), "main")

    def __str__(self) -> str:
        return f"rank {self.rank} process {self.number}" + (f" ({self.member.attempt})" if self.member else "")

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Step:
        """Run a coroutine in this process."""
        return self.simulation.spawn(self, coroutine, f"{self} {name}")

    def end(self, problem: BaseException | None, exit_code: int | None) -> None:
        """End all of its tasks but the one that runs."""
        if not self.ended:
            self.ended, self.problem, self.exit_code = True, problem, exit_code
            for task in self.tasks:
                if task is not self.simulation.current and not task.done:
                    task.kill()
            self.simulation.process_ended(self)

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What `Presence.call` does: wait, unless this process is fenced."""
        if self._fatal is not None:
            coroutine.close()
            raise self._fatal
        found = await coroutine
        if self._fatal is not None:
            raise self._fatal
        return found

    # ---- the entrypoint

    async def _live(self) -> None:
        problem: DilocoError | None = None
        try:
            await self._train()
        except DilocoError as error:
            problem = error
        if self._fatal is None:
            await self._close(problem)

    async def _close(self, problem: DilocoError | None) -> None:
        member = self.member
        code: int = ExitCode.OK if problem is None else problem.exit_code
        if member is not None:
            try:
                if problem is not None:
                    report = ErrorReport(rank=member.rank, attempt=member.attempt, exit_code=code, error=str(problem))
                    await self.store.write(layout.error(member), report.to_json())
                else:
                    await self.store.write(layout.result(member), b"{}")
                await self._beat()
            except StoreError as lost:
                if problem is None:
                    problem, code = lost, lost.exit_code
        self.end(problem, code)

    # ---- presence

    async def _beat_for_ever(self) -> None:
        member = self._in_member()
        while True:
            try:
                await self._beat()
                await membership.check_fence(self.store, member)
            except FencedError as problem:
                self._fatal = problem
                self.spawn(self._close(problem), "last words")
                return
            except StoreError:
                pass
            await self.clock.sleep(self.settings.beat_every)

    async def _beat(self) -> None:
        member = self._in_member()
        self._beats += 1
        beat = Beat(rank=member.rank, attempt=member.attempt, counter=self._beats, phase="training")
        await self.store.write(layout.beat(member), beat.to_json())

    # ---- the trainer and the manager

    async def _train(self) -> None:
        simulation, scenario = self.simulation, self.simulation.scenario
        self.member = await self._call(membership.claim(self.store, self.rank))
        self._check_claim()
        if scenario.beats:
            self.spawn(self._beat_for_ever(), "beats")
        committed = len(simulation.oracle.commits)
        replica = await self._call(self._enter())
        require(replica.round >= committed, f"{self} joins in round {replica.round}, {committed} were committed before")
        simulation.oracle.holds(self, replica.states, replica.round, "joins")
        while True:
            self._after_apply()
            if replica.round >= scenario.rounds:
                break
            asks = self.random.random() < 0.5
            inner_steps = self._inner_steps(replica.round) / 2
            await simulation.sleep(inner_steps)
            others = await self._call(replica.round_state()) if asks else "open"
            if others == "committed":
                await self._call(replica.catch_up())
                simulation.oracle.holds(self, replica.states, replica.round, "has caught up")
                continue
            head = self.spawn(replica.is_committed(replica.round), "head") if asks else None
            if others == "open":
                await simulation.sleep(inner_steps)
            self.turn_began, before = simulation.steps, replica.round
            turn = await self._call(replica.quorum(await head.ended() if head is not None else None))
            if turn is None or turn.abstain is not None or replica.round != before:
                simulation.oracle.holds(self, replica.states, replica.round, "has caught up")
            if turn is not None:
                await self._one_round(replica, turn)
        await self._finish(replica)

    def _check_claim(self) -> None:
        member = self._in_member()
        owner = self.simulation.oracle.claimed.get(member.rank, {}).get(member.attempt)
        require(owner is self, f"{self} takes itself for {member}, which is {owner}")

    def _inner_steps(self, round_: int) -> float:
        slow = self.simulation.strikes("slow", self.rank, round_)
        return self.simulation.scenario.training * self.random.random() + (slow.seconds if slow is not None else 0.0)

    async def _enter(self) -> Replica:
        """`ObjectStoreManager.attach`. Every process begins with other initial values."""
        scenario = self.simulation.scenario
        values = torch.Generator().manual_seed(self.random.getrandbits(32))
        states = [
            FragmentState(
                index,
                {name: torch.randn(shape, generator=values) for name, shape in SHAPES.items()},
                {name: torch.zeros(shape) for name, shape in SHAPES.items()},
            )
            for index in range(scenario.fragments)
        ]
        run = RunRecord(
            run_id="simulation",
            world_size=scenario.world_size,
            rounds=scenario.rounds,
            fragments=scenario.fragments,
            sync_every=scenario.fragments,
            codec="fp32",
            policy=scenario.policy,
            min_replicas=scenario.min_replicas,
            outer_lr=LR,
            outer_momentum=MOMENTUM,
            nesterov=True,
            chunk_bytes=CHUNK_BYTES,
            parameters={},
            constants={},
        )
        member, step = self._in_member(), OuterStep(LR, MOMENTUM)
        self.replica = await Replica.enter(
            self.store, self.clock, member, self.settings, run, states, step, self._start_digest, jitter=self.random
        )
        await inner.load(self.replica.context, self.replica.round)
        return self.replica

    def _start_digest(self, state: FragmentState) -> Awaitable[str]:
        late = self.simulation.scenario.late_digests
        return LateDigest(self, state) if late else ReadyDigest(state)

    async def _one_round(self, replica: Replica, turn: Turn) -> None:
        state, strikes = replica.states[turn.fragment], self.simulation.strikes
        base = await replica.digest(turn.fragment)
        # As torchft does on a CPU: the mean lands in the tensors that held the pseudo-gradient.
        tensors = self._pseudo_gradient(state, turn.round)
        turn.weight = 1 + (3 * self.rank + turn.round) % 4
        await self._call(replica.exchange(turn, tensors, tensors))
        if turn.outcome is not None and strikes("again", self.rank, turn.round):
            await self._call(replica.exchange(turn, tensors, tensors))
        if turn.outcome is not None:
            self.simulation.oracle.averaged(self, turn.outcome.commit, base)
        if turn.averaged:
            step = OuterStep(LR, MOMENTUM)
            for name, mean in zip(reversed(state.names), reversed(tensors), strict=True):
                step(state.parameters[name], state.momentum[name], mean)
        if turn.outcome is not None and strikes("diverge", self.rank, turn.round):
            self._flip(state)
        self._over = turn

    def _pseudo_gradient(self, state: FragmentState, round_: int) -> list[torch.Tensor]:
        scale = 0.1 * (1 + self.rank) ** 2 + 0.01 * round_
        tensors = [parameter * scale + (0.3 - 0.7 * self.rank) for _, parameter in state.named()]
        if self.simulation.strikes("nan", self.rank, round_):
            tensors[0][0] = float("nan")
        return tensors

    def _flip(self, state: FragmentState) -> None:
        self.tainted = self.was_tainted = True
        state.parameters["a"].view(torch.int32)[1] ^= 1

    def _after_apply(self) -> None:
        turn, self._over = self._over, None
        replica, scenario = self.replica, self.simulation.scenario
        if turn is None or replica is None:
            return
        snapshot = replica.applied(turn)
        if turn.outcome is None:
            return
        self.simulation.oracle.holds(self, replica.states, replica.round, "applied")
        if self.simulation.strikes("flip", self.rank, turn.round):
            self.simulation.flip_when_digested(self, replica.states[turn.fragment])
        own = replica.round % scenario.checkpoint_every == 0 and replica.round < scenario.rounds
        if own or snapshot is not None:
            self._save(replica, snapshot, own=own)

    def _save(self, replica: Replica, snapshot: Snapshot | None, *, own: bool) -> None:
        if self._writing is None or self._writing.done:
            keep = self.simulation.scenario.inner and own
            self._writing = self.spawn(self._write(replica, snapshot, replica.round if keep else None), "writing")

    async def _write(self, replica: Replica, snapshot: Snapshot | None, save_inner: int | None) -> None:
        try:
            if save_inner is not None:
                await inner.save(replica.context, save_inner, {"m": torch.zeros(1)})
            if snapshot is not None:
                await replica.write(snapshot)
        except CorruptObjectError as problem:
            require(self.was_tainted, f"{self} can't write a checkpoint: {problem}")
        except StoreError:
            pass

    async def _finish(self, replica: Replica) -> None:
        self.finishing = True
        digest = await self._call(replica.final_digest())
        found = await self._call(replica.vote(digest))
        if isinstance(found, list):
            found = await self._call(ending.write_result(replica.context, digest, found, None, None))
        result = self.simulation.oracle.result
        require(result is not None and result.digest == digest, f"{self} ends well without a result of its bits")

    def whole_digest(self) -> str:
        """Digest of what it holds, computed anew."""
        states: Sequence[FragmentState] = self.replica.states if self.replica is not None else []
        return whole_digest([state.digest() for state in states])

    def _in_member(self) -> Member:
        if self.member is None:
            raise RuntimeError("no claim yet")
        return self.member
