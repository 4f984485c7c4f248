"""Waiting: only time between successful polls counts, and a gap starts every count again."""

from __future__ import annotations

import random

import pytest

from diloco.errors import RoundTimeoutError
from diloco.exchange.clock import Poll, Timer
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import World, member_context


def poll_of(world: World) -> Poll:
    return Poll(world, 0.1, 1.0, random.Random(0))


async def spend(world: World, poll: Poll, *gaps: float) -> None:
    for gap in gaps:
        await world.sleep(gap)
        poll.succeeded()


def test_time_between_polls_is_counted() -> None:
    world = World()
    poll = poll_of(world)
    world.complete(spend(world, poll, 0.5, 1.0, 0.25))
    assert (poll.elapsed, poll.stalls) == (1.75, 0)


def test_a_gap_discards_what_was_counted() -> None:
    world = World()
    poll = poll_of(world)
    world.complete(spend(world, poll, 1.0, 1.0, 2.5))
    assert (poll.elapsed, poll.stalls) == (0.0, 1)


def test_every_timer_starts_again_after_a_gap() -> None:
    world = World()
    poll = poll_of(world)
    early = Timer(poll)
    world.complete(spend(world, poll, 1.0))
    late = Timer(poll)
    world.complete(spend(world, poll, 1.0))
    assert (early.seconds, late.seconds) == (2.0, 1.0)
    world.complete(spend(world, poll, 1000.0))
    assert (early.seconds, late.seconds) == (0.0, 0.0)
    world.complete(spend(world, poll, 1.0, 1.0))
    assert (early.seconds, late.seconds) == (2.0, 2.0)
    late.restart()
    assert (early.seconds, late.seconds) == (2.0, 0.0)


def test_a_timer_nobody_read_during_the_gap_starts_again_all_the_same() -> None:
    world = World()
    poll = poll_of(world)
    world.complete(spend(world, poll, 1.0))
    timer = Timer(poll)
    world.complete(spend(world, poll, 1000.0, 1.0, 1.0))
    assert timer.seconds == 2.0


def test_a_store_that_is_always_slow_still_lets_time_pass() -> None:
    world = World()
    poll = poll_of(world)
    world.complete(spend(world, poll, 5.0, 5.0, 5.0))
    assert (poll.elapsed, poll.stalls) == (10.0, 1)


def test_polls_back_off_with_jitter() -> None:
    world = World()
    poll = poll_of(world)
    pauses: list[float] = []

    async def pause() -> None:
        for _ in range(20):
            before = world.monotonic()
            await poll.pause()
            pauses.append(world.monotonic() - before)

    world.complete(pause())
    assert 0.075 <= pauses[0] <= 0.125
    assert all(0.75 <= p <= 1.25 for p in pauses[-10:])
    assert len(set(pauses)) == 20


def test_a_bounded_wait_ends_by_naming_what_it_waited_for() -> None:
    world = World()
    context = member_context(world, MemoryStore(), 1, timeout=10.0)

    async def never(poll: Poll) -> None:
        context.waiting_for = ["rank 0", "rank 2"]

    with pytest.raises(
        RoundTimeoutError, match=r"rank 1 \(attempt 1\): round 3 was not .* within 10 s, .* rank 0, rank 2; "
    ):
        world.complete(context.wait_until(never, doing="round 3"))
    assert 10 < world.monotonic() < 13
    assert context.waiting_for == []


def test_a_paused_process_does_not_time_out() -> None:
    world = World()
    context = member_context(world, MemoryStore(), 1, timeout=10.0)
    polls: list[float] = []

    async def third_time(poll: Poll) -> str | None:
        polls.append(world.monotonic())
        if len(polls) == 2:
            await world.sleep(1000)
        return "found" if len(polls) == 5 else None

    assert world.complete(context.wait_until(third_time, doing="round 3")) == ["found"]


def test_the_world_is_repeatable_and_its_time_moves_only_in_sleep() -> None:
    def schedule(seed: int) -> list[str]:
        world, seen = World(seed), []

        async def member(name: str) -> None:
            for _ in range(5):
                await world.switch()
                assert world.monotonic() == 0
                seen.append(name)

        world.complete(*(member(name) for name in "abc"))
        return seen

    assert schedule(1) == schedule(1)
    assert len({tuple(schedule(seed)) for seed in range(20)}) > 10


def test_the_world_stops_at_a_moment_and_goes_on() -> None:
    world = World()

    async def sleeper() -> float:
        await world.sleep(5)
        return world.monotonic()

    task = world.start(sleeper())
    world.run(until=3)
    assert (world.monotonic(), task.done) == (3, False)
    world.run()
    assert task.result == 5
