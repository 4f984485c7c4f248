"""Claims, fences, run.json, and who is waited for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco.errors import FencedError, RunMismatchError
from diloco.exchange import layout, membership
from diloco.exchange.layout import Member
from diloco.exchange.membership import Attendance
from diloco.exchange.records import Beat, Claim
from diloco.exchange.stores import MemoryStore
from tests.support.stores import LostAnswers
from tests.support.virtual import VirtualStore, World, member_context, run_record


@pytest.mark.parametrize("seed", range(20))
def test_many_claimants_of_one_rank_get_an_attempt_each(seed: int) -> None:
    world, store = World(seed), MemoryStore()
    claimed = world.complete(*(membership.claim(VirtualStore(world, store), 4) for _ in range(8)))
    assert sorted(claimed) == [Member(4, attempt) for attempt in range(1, 9)]


def test_a_claim_says_who_made_it() -> None:
    world, store = World(), MemoryStore()
    [member] = world.complete(membership.claim(store, 2, launcher="abc"))
    [data] = world.complete(store.read(layout.claim(member)))
    claim = Claim.from_json(data, "claim")
    assert (claim.rank, claim.attempt, claim.launcher) == (2, 1, "abc")
    assert claim.host
    assert claim.pid > 0


@pytest.mark.parametrize("written", [True, False])
def test_a_claim_whose_answer_was_lost_is_ones_own(written: bool) -> None:
    world, store = World(), MemoryStore()
    assert world.complete(membership.claim(LostAnswers(store, written=written), 0)) == [Member(0, 1)]
    assert world.complete(membership.highest_attempt(store, 0)) == [1]


def test_ranks_do_not_mix() -> None:
    world, store = World(), MemoryStore()
    assert world.complete(membership.claim(store, 1), membership.claim(store, 10)) == [Member(1, 1), Member(10, 1)]


def test_alien_files_claim_nothing() -> None:
    world, store = World(), MemoryStore()
    world.complete(*(store.write(layout.claims(1) + name, b"") for name in ("notes.txt", "7.json", "00009.json.bak")))
    assert world.complete(membership.claim(store, 1)) == [Member(1, 1)]


def test_a_newer_attempt_fences_the_older() -> None:
    world, store = World(), MemoryStore()
    [old] = world.complete(membership.claim(store, 1))
    world.complete(membership.check_fence(store, old))
    [new] = world.complete(membership.claim(store, 1))
    world.complete(membership.check_fence(store, new))
    with pytest.raises(FencedError, match=r"rank 1 \(attempt 1\) was replaced by attempt 2"):
        world.complete(membership.check_fence(store, old))


@pytest.mark.parametrize("seed", range(10))
def test_everybody_gets_the_same_run(seed: int) -> None:
    world, store = World(seed), MemoryStore()
    agreed = world.complete(
        *(membership.agree_on_run(VirtualStore(world, store), run_record(nonce=str(n))) for n in range(4))
    )
    assert len({record.nonce for record in agreed}) == 1


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"world_size": 4}, "world_size is 3 there and 4 here"),
        ({"rounds": 9, "outer_lr": 0.1}, "rounds is 4 there and 9 here"),
        ({"codec": "bf16"}, "codec is 'fp32' there and 'bf16' here"),
        ({"min_replicas": 1}, "min_replicas is 2 there and 1 here"),
        (
            {"parameters": {"0/weight": "float32[4, 7]"}},
            r"parameters 0/weight is float32\[4, 6\] there and float32\[4, 7\] here",
        ),
        ({"parameters": {}}, r"parameters 0/weight is float32\[4, 6\] there and absent here"),
        ({"constants": {"0/mask": "d"}}, "constants 0/mask is absent there and d here"),
    ],
)
def test_another_run_is_refused_by_its_first_difference(changes: dict[str, Any], difference: str) -> None:
    world, store = World(), MemoryStore()
    world.complete(membership.agree_on_run(store, run_record()))
    with pytest.raises(RunMismatchError, match=rf"run 'run' at .*: {difference}; use .* another --run-id"):
        world.complete(membership.agree_on_run(store, run_record(**changes)))
    [stored] = world.complete(store.read(layout.RUN))
    assert json.loads(stored)["world_size"] == 3


def test_every_field_of_the_run_is_compared() -> None:
    plain = run_record()
    for name, value in plain.model_dump().items():
        if name in ("format", "nonce"):
            continue
        other: Any = {"x": "y"} if isinstance(value, dict) else "bf16" if name == "codec" else None
        if name == "policy":
            other = "skip"
        elif name == "run_id":
            other = "other"
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, int | float):
            other = value + 1
        found = membership.first_difference(plain, plain.model_copy(update={name: other}))
        assert found is not None, name
        assert found.startswith(name)
    assert membership.first_difference(plain, run_record(nonce="another")) is None


class Watched:
    """One observer of a skip run, and the beats that it sees."""

    def __init__(self, **settings: Any) -> None:
        self.world, self.store = World(), MemoryStore()
        run = run_record(policy="skip", world_size=4)
        self.context = member_context(self.world, self.store, 0, run=run, poll_first=1, poll_most=1, **settings)
        self.attendance = Attendance(self.context)
        self.attendance.begin()
        self.poll = self.context.poll()

    def beat(self, rank: int, counter: int, attempt: int = 1) -> None:
        record = Beat(rank=rank, attempt=attempt, counter=counter, phase="training")
        self.claim(rank, attempt)
        self.world.complete(self.store.write(layout.beat(Member(rank, attempt)), record.to_json()))

    def claim(self, rank: int, attempt: int = 1) -> None:
        self.world.complete(self.store.write(layout.claim(Member(rank, attempt)), b"{}"))

    def look(self, *present: int, lately: set[int] | None = None) -> set[int]:
        lately = {0, 1, 2, 3} if lately is None else lately
        return self.world.complete(self.attendance.waited_for(lately, {0, *present}, self.poll))[0]

    def after(self, seconds: int) -> None:
        async def polls() -> None:
            for _ in range(seconds):
                await self.world.sleep(1)
                self.poll.succeeded()

        self.world.complete(polls())


def test_a_rank_that_beats_is_waited_for_and_a_silent_one_is_not() -> None:
    watched = Watched(dead_after=5, join_timeout=1)
    for counter in range(8):
        watched.beat(1, counter)
        watched.beat(2, 0)
        waited_for = watched.look()
        watched.after(1)
    assert 1 in waited_for
    assert 2 not in waited_for


def test_a_rank_that_never_beat_is_waited_for_inside_join_timeout_over_all_rounds() -> None:
    watched = Watched(join_timeout=10)
    watched.after(6)
    assert watched.look() == {0, 1, 2, 3}
    watched.attendance.begin()
    watched.poll = watched.context.poll()
    watched.after(6)
    watched.look()
    assert watched.look() == {0}


def test_a_living_rank_that_takes_no_part_is_not_waited_for() -> None:
    watched = Watched(dead_after=100, join_timeout=0)
    watched.beat(1, 1)
    watched.beat(2, 1)
    assert watched.look(lately={0, 1}) == {0, 1}


def test_who_is_there_needs_no_beat() -> None:
    watched = Watched(join_timeout=0)
    assert watched.look(3) == {0, 3}


def test_only_the_newest_attempts_beat_counts() -> None:
    watched = Watched(dead_after=3, join_timeout=0)
    for counter in range(6):
        watched.beat(1, counter, attempt=1)
        watched.beat(1, 0, attempt=2)
        waited_for = watched.look()
        watched.after(1)
    assert waited_for == {0}


def test_a_replaced_attempt_does_not_count_before_its_replacement_beats() -> None:
    watched = Watched(dead_after=100, join_timeout=0)
    watched.beat(1, 1, attempt=1)
    watched.claim(1, attempt=2)
    assert watched.look() == {0}


def test_an_observer_that_was_itself_paused_declares_nobody_dead() -> None:
    watched = Watched(dead_after=5, join_timeout=0)
    watched.beat(1, 0)
    watched.look()
    watched.after(4)
    watched.world.complete(watched.world.sleep(1000))
    watched.poll.succeeded()
    assert 1 in watched.look()
    watched.after(4)
    assert 1 in watched.look()
    watched.after(2)
    assert 1 not in watched.look()


def test_beats_are_not_read_at_every_poll() -> None:
    watched = Watched(beat_every=3)
    watched.beat(1, 0)
    for _ in range(9):
        watched.look()
        watched.after(1)
    assert watched.context.store.stats.requests == 3 * 2  # a listing and one beat every third second


def test_an_alien_beat_is_ignored() -> None:
    watched = Watched(join_timeout=0, dead_after=5)
    watched.beat(1, 0)
    watched.claim(2)
    watched.world.complete(watched.store.write(layout.beat(Member(2, 1)), b"no beat"))
    watched.world.complete(watched.store.write(f"{layout.MEMBERS}readme", b""))
    assert watched.look() == {0, 1}
