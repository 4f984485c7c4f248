"""Trying again: what passes, what does not, and when it is given up. In virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.errors import (
    AccessDeniedError,
    BucketMissingError,
    CorruptObjectError,
    DilocoError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreUnreachableError,
)
from diloco.exchange.records import Claim
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.store import Data, create_once
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import World

if TYPE_CHECKING:
    from collections.abc import Callable


class Flaky(MemoryStore):
    """Fails with the given errors, one an operation, before (or, for a create, after) it does its work."""

    def __init__(self, *problems: DilocoError | None, after: bool = False) -> None:
        super().__init__()
        self.problems = list(problems)
        self.after = after
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        problem = self.problems.pop(0) if self.problems else None
        if problem is not None:
            raise problem

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        self._fail()
        return await super()._read(key, start, end)

    async def _create(self, key: str, data: Data) -> bool:
        if not self.after:
            self._fail()
        created = await super()._create(key, data)
        if self.after:
            self._fail()
        return created

    async def _write(self, key: str, data: Data) -> None:
        self._fail()
        await super()._write(key, data)


def retrying(store: MemoryStore, budget: float = 60.0) -> tuple[World, RetryingStore]:
    world = World(0)
    return world, RetryingStore(store, world, budget=budget)


def test_an_overloaded_store_gets_time() -> None:
    flaky = Flaky(*[StoreUnreachableError("503 SlowDown")] * 5)
    world, store = retrying(flaky)
    world.complete(store.write("key", b"value"))
    assert flaky.calls == 6
    assert 0.5 < world.monotonic() < 10
    assert world.complete(store.read("key")) == [b"value"]
    assert store.stats.bytes_up == len(b"value")


def test_it_is_given_up_after_the_budget_naming_the_tries() -> None:
    flaky = Flaky(*[StoreUnreachableError("reset by peer")] * 1000)
    world, store = retrying(flaky, budget=20)
    with pytest.raises(StoreUnreachableError, match=r"reset by peer \(given up after \d+ tries in 2\d s\)"):
        world.complete(store.read("key"))
    assert world.monotonic() < 30


@pytest.mark.parametrize(
    "problem",
    [AccessDeniedError("no"), BucketMissingError("no"), ObjectMissingError("no"), CorruptObjectError("no")],
    ids=lambda problem: type(problem).__name__,
)
def test_what_can_not_get_better_is_raised_at_once(problem: DilocoError) -> None:
    flaky = Flaky(problem)
    world, store = retrying(flaky)
    with pytest.raises(type(problem)):
        world.complete(store.read("key"))
    assert flaky.calls == 1
    assert world.monotonic() == 0


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written, answer lost"])
def test_a_create_whose_answer_was_lost_is_recognised(after: bool) -> None:
    world, store = retrying(Flaky(OutcomeUnknownError("no answer"), after=after))
    record = Claim(rank=0, attempt=1, host="h", pid=1)
    assert world.complete(create_once(store, "claim", record)) == [(True, record.to_json())]


def test_the_first_of_two_creates_wins_although_its_answer_was_lost() -> None:
    inner = Flaky(OutcomeUnknownError("no answer"), after=True)
    world, store = retrying(inner)
    first, second = (Claim(rank=0, attempt=1, host=host, pid=1) for host in "ab")
    assert world.complete(create_once(store, "claim", first))[0][0]
    assert world.complete(create_once(store, "claim", second)) == [(False, first.to_json())]


def test_two_waiters_do_not_try_again_together() -> None:
    """Jitter: replicas that were refused together do not come back together."""

    def tried_at(seed: int) -> list[float]:
        import random

        times: list[float] = []
        world = World(0)
        flaky = Flaky(*[StoreUnreachableError("busy")] * 4)
        noted: Callable[[], None] = flaky._fail

        def fail() -> None:
            times.append(world.monotonic())
            noted()

        flaky._fail = fail  # type: ignore[method-assign]
        store = RetryingStore(flaky, world, budget=60, jitter=random.Random(seed))
        world.complete(store.write("key", b""))
        return times

    assert tried_at(1)[1:] != tried_at(2)[1:]
