"""Members of a run in virtual time, one step at a time: thousands of schedules a minute, each repeatable by its seed.

The exchange awaits only store operations and its clock's sleep. So a :class:`World` needs no event loop: it is the
clock, it chooses by its seed who goes on at each store operation and after each sleep, and its time moves only when
all members sleep.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from diloco.exchange.context import Context
from diloco.exchange.layout import Member
from diloco.exchange.records import RunRecord
from diloco.exchange.settings import ExchangeSettings
from tests.support.stores import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
    from diloco.exchange.records import Commit
    from diloco.exchange.store import Store

T = TypeVar("T")

MOST_STEPS = 200_000


class _Until:
    """Hands control to the world until a moment of its time."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def __await__(self) -> Generator[float, None, None]:
        yield self._moment


class _Ended:
    """Hands control to the world until a task has ended."""

    def __init__(self, task: Task[Any]) -> None:
        self._task = task

    def __await__(self) -> Generator[Task[Any], None, None]:
        yield self._task


class Task(Generic[T]):
    """A coroutine that a world runs. `problem` is what it raised."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, T]) -> None:
        self.name = name
        self.wakes = 0.0
        self.done = False
        self.problem: Exception | None = None
        self._coroutine = coroutine
        self._value: list[T] = []
        self._waiters: list[Task[Any]] = []

    async def ended(self) -> T:
        """Wait, in another task, for its end, and return its :attr:`result`."""
        if not self.done:
            await _Ended(self)
        return self.result

    def kill(self) -> None:
        """End it where it stands, as if its process had died."""
        self._coroutine.close()
        self.done = True

    @property
    def result(self) -> T:
        """What it returned; raises what it raised."""
        if self.problem is not None:
            raise self.problem
        return self._value[0]

    def advance(self) -> None:
        """Run it to its next store operation, sleep, or wait for another task."""
        try:
            moment = self._coroutine.send(None)
        except StopIteration as end:
            self._value.append(end.value)
            self.done = True
        except Exception as problem:  # noqa: BLE001 - any end of a member is an outcome to look at
            self.problem = problem
            self.done = True
        else:
            if isinstance(moment, Task):
                moment._waiters.append(self)
                self.wakes = math.inf
            elif isinstance(moment, float):
                self.wakes = moment
            else:
                raise TypeError(f"{self.name} awaits {moment!r}: neither its store, its clock nor a task")
        if self.done:
            for waiter in self._waiters:
                waiter.wakes = 0.0


class World:
    """A clock (see :class:`diloco.exchange.clock.Clock`) and the tasks that live by it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task[Any]] = []
        self.steps = 0
        self._now = 0.0

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait so long, while others go on."""
        await _Until(self._now + seconds)

    async def switch(self) -> None:
        """A point at which any other task may go on first."""
        await _Until(self._now)

    def start(self, coroutine: Coroutine[Any, Any, T], name: str = "task") -> Task[T]:
        """Add a task; it begins when the world runs."""
        task = Task(name, coroutine)
        task.wakes = self._now
        self.tasks.append(task)
        return task

    def run(self, *, until: float | None = None) -> None:
        """Go on until all tasks are done, or all sleep beyond `until`. AssertionError if that never happens."""
        while alive := [task for task in self.tasks if not task.done]:
            ready = [task for task in alive if task.wakes <= self._now]
            if ready:
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise AssertionError(f"{MOST_STEPS} steps, and these go on: {', '.join(t.name for t in alive)}")
                self.random.choice(ready).advance()
                continue
            earliest = min(task.wakes for task in alive)
            if until is not None and earliest > until:
                self._now = until
                return
            self._now = earliest

    def complete(self, *coroutines: Coroutine[Any, Any, T]) -> list[T]:
        """Run these together to their ends and return what they return; raises the first one's error."""
        tasks = [self.start(coroutine, f"task {number}") for number, coroutine in enumerate(coroutines)]
        self.run()
        return [task.result for task in tasks]


class VirtualStore(WrappedStore):
    """A store on which any other task may go on before each operation takes effect, and before its answer is seen."""

    def __init__(self, world: World, inner: Store) -> None:
        super().__init__(inner)
        self._world = world

    async def before(self, operation: str, key: str) -> None:  # noqa: ARG002 - every operation alike
        await self._world.switch()

    async def after(self, operation: str, key: str) -> None:  # noqa: ARG002 - every operation alike
        await self._world.switch()


def run_record(**changes: Any) -> RunRecord:
    """run.json of a small run: three ranks, one fragment, `min_replicas` 2."""
    plain: dict[str, Any] = {
        "run_id": "run",
        "world_size": 3,
        "rounds": 4,
        "fragments": 1,
        "sync_every": 5,
        "codec": "fp32",
        "policy": "strict",
        "min_replicas": 2,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "nesterov": True,
        "chunk_bytes": 64,
        "parameters": {"0/weight": "float32[4, 6]"},
        "constants": {},
    }
    return RunRecord.model_validate(plain | changes)


def member_context(
    world: World,
    store: Store,
    rank: int,
    *,
    attempt: int = 1,
    run: RunRecord | None = None,
    **settings: Any,
) -> Context:
    """One member of a run that lives in `world`, with its own view of the store."""
    run = run or run_record()
    return Context(
        store=VirtualStore(world, store),
        clock=world,
        member=Member(rank, attempt),
        settings=ExchangeSettings.model_validate(
            {"policy": run.policy, "codec": run.codec, "reduce": run.reduce, "mean_codec": run.mean_codec} | settings
        ),
        run=run,
        jitter=random.Random(world.random.random()),
    )


@dataclass(frozen=True)
class Settled:
    """A settled round with its mean (fp32, shape [numel]), None if nobody took part."""

    commit: Commit
    mean: torch.Tensor | None


async def settle(allreduce: ObjectStoreAllReduce, round_: int, fragment: Fragment) -> Settled:
    """Settle a round into a tensor of its own."""
    mean = torch.empty(fragment.numel)
    outcome = await allreduce.settle(round_, fragment, [mean])
    return Settled(outcome.commit, mean if outcome.averaged else None)
