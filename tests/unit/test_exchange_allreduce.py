"""Whole rounds in virtual time, under many schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from diloco.errors import CorruptObjectError, DivergedError, FencedError, RoundError, RoundTimeoutError
from diloco.exchange import codec, layout, membership
from diloco.exchange.allreduce import MOST_EMPTY_ROUNDS, Fragment, ObjectStoreAllReduce, Outcome
from diloco.exchange.checkpoint import read_commit
from diloco.exchange.codec import DATA_OFFSET
from diloco.exchange.formats import CODECS
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Commit, Header, Participant
from diloco.exchange.rounds import ABSENT, CAUGHT_UP, NOT_FINITE
from diloco.exchange.stores import MemoryStore
from tests.support.stores import WrappedStore
from tests.support.virtual import Settled, World, member_context, run_record, settle

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from diloco.exchange.store import Store
    from tests.support.virtual import Task

NUMEL = 24
FRAGMENT = Fragment(0, NUMEL, "layout", "base")


def gradient(rank: int, round_: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * round_ + rank))


def by_hand(ranks: list[int], round_: int = 0) -> bytes:
    """The mean of these ranks' gradients with weight rank + 1, in numpy."""
    total = sum(rank + 1 for rank in ranks)
    terms = [gradient(rank, round_).numpy().reshape(-1) * np.float32((rank + 1) / total) for rank in ranks]
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return mean.tobytes()


def bits(outcome: Settled) -> bytes:
    assert outcome.mean is not None
    return outcome.mean.numpy().tobytes()


class Run:
    """Members of a run of three, `min_replicas` 2, one after another in virtual time."""

    def __init__(self, policy: str, seed: int = 0, **run: Any) -> None:
        self.world, self.store = World(seed), MemoryStore()
        self.run = run_record(**({"policy": policy} | run))

    def member(self, rank: int, attempt: int = 1, **settings: Any) -> ObjectStoreAllReduce:
        settings = {"grace": 5.0, "timeout": 60.0, "join_timeout": 1000.0} | settings
        return ObjectStoreAllReduce(
            member_context(self.world, self.store, rank, attempt=attempt, run=self.run, **settings)
        )

    async def take_part(
        self,
        rank: int,
        *,
        values: torch.Tensor | None = None,
        after: float = 0.0,
        fragment: Fragment = FRAGMENT,
        member: ObjectStoreAllReduce | None = None,
        round_: int = 0,
    ) -> Settled:
        member = member or self.member(rank)
        await self.world.sleep(after)
        values = gradient(rank, round_) if values is None else values
        await member.contribute(round_, fragment, [values], weight=rank + 1)
        return await settle(member, round_, fragment)

    def together(self, *members: Coroutine[Any, Any, Settled]) -> list[Task[Settled]]:
        tasks = [self.world.start(member, f"member {number}") for number, member in enumerate(members)]
        self.world.run()
        return tasks

    def put(self, key: str, data: bytes | bytearray) -> None:
        self.world.complete(self.store.write(key, data))

    def commit(self, round_: int = 0) -> Commit:
        [found] = self.world.complete(read_commit(self.store, round_))
        assert found is not None
        return found

    def named(self, round_: int = 0) -> dict[int, str]:
        return {out.rank: out.reason for out in self.commit(round_).left_out}


def commit_of(*participants: Participant) -> Commit:
    return Commit(
        round=0,
        fragment=0,
        base_digest="base",
        algorithm="gather",
        participants=list(participants),
        left_out=[],
        committed_by=1,
        committed_by_attempt=1,
        reason="all are there",
    )


@pytest.mark.parametrize("policy", ["strict", "skip"])
@pytest.mark.parametrize("seed", range(20))
def test_all_get_the_same_bits_under_any_schedule(policy: str, seed: int) -> None:
    run = Run(policy, seed)
    outcomes = run.world.complete(*(run.take_part(rank) for rank in (2, 0, 1)))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2])}
    assert {outcome.commit.nonce for outcome in outcomes} == {run.commit().nonce}
    assert [p.member for p in run.commit().participants] == [Member(0, 1), Member(1, 1), Member(2, 1)]
    assert run.commit().left_out == []


@pytest.mark.parametrize("seed", range(20))
def test_a_straggler_is_left_out_and_applies_the_mean_all_the_same(seed: int) -> None:
    run = Run("skip", seed)
    outcomes = run.world.complete(run.take_part(0), run.take_part(1), run.take_part(2, after=30))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1])}
    assert run.named() == {2: "late"}


class Outrun(WrappedStore):
    """Somebody else creates an object just before this member does."""

    def __init__(self, inner: Store, key: str, rival: bytes) -> None:
        super().__init__(inner)
        self._key, self._rival = key, rival

    async def before(self, operation: str, key: str) -> None:
        if (operation, key) == ("create", self._key):
            assert await self.inner.create(key, self._rival)


def test_who_loses_the_commit_averages_what_the_winner_named() -> None:
    run = Run("skip")
    for rank in range(3):
        run.world.complete(run.member(rank).contribute(0, FRAGMENT, [gradient(rank)], weight=rank + 1))
    named = []
    for rank in (0, 2):
        header = Header.from_json(run.store._objects[layout.header(0, Member(rank, 1))], "header")
        assert header.payload is not None
        named.append(Participant(rank=rank, attempt=1, weight=header.weight, payload=header.payload))
    rival = commit_of(*named)
    member = run.member(0)
    member.context.store = Outrun(run.store, layout.commit(0), rival.to_json())
    [outcome] = run.world.complete(settle(member, 0, FRAGMENT))
    assert outcome.commit == rival
    assert bits(outcome) == by_hand([0, 2])


def test_who_is_late_within_the_grace_is_in() -> None:
    run = Run("skip")
    outcomes = run.world.complete(run.take_part(0), run.take_part(1), run.take_part(2, after=4))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2])}


def test_the_grace_counts_from_when_min_replicas_are_there() -> None:
    run = Run("skip")
    run.world.complete(run.take_part(0), run.take_part(1, after=20), run.take_part(2, after=24))
    assert run.named() == {}


def test_one_fast_starter_does_not_run_alone() -> None:
    run = Run("skip")
    [task] = run.together(run.take_part(0))
    assert isinstance(task.problem, RoundTimeoutError)
    assert "rank 0 (attempt 1): round 0 was not completed within 60 s" in str(task.problem)
    assert "min_replicas (1 of 2), rank 1, rank 2" in str(task.problem)
    assert not [key for key in run.store._objects if key.startswith(layout.COMMITS)]


def test_strict_names_whom_it_waited_for_on_every_replica() -> None:
    run = Run("strict")
    for task in run.together(run.take_part(0), run.take_part(2)):
        assert isinstance(task.problem, RoundTimeoutError)
        assert "still waiting for rank 1" in str(task.problem)


def test_a_time_out_ends_the_local_process_only() -> None:
    run = Run("strict")
    run.together(run.take_part(0))
    outcomes = run.world.complete(settle(run.member(0, attempt=2), 0, FRAGMENT), run.take_part(1), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2])}


def test_a_permanent_straggler_is_soon_waited_for_by_nobody() -> None:
    run = Run("skip", rounds=8)
    run.world.complete(membership.claim(run.store, 2))
    members = [run.member(rank, grace=50.0) for rank in range(2)]
    record = Beat(rank=2, attempt=1, counter=0, phase="training")
    finished: list[float] = []

    async def beats() -> None:
        counter = 0
        while len(finished) < 8:
            counter += 1
            await run.store.write(layout.beat(Member(2, 1)), record.model_copy(update={"counter": counter}).to_json())
            await run.world.sleep(1)

    async def rounds(rank: int) -> None:
        for round_ in range(4):
            await run.take_part(rank, member=members[rank], round_=round_)
            finished.append(run.world.monotonic())

    run.world.complete(beats(), rounds(0), rounds(1))
    assert run.named(0) == {2: "late"}
    assert run.named(1) == {2: "late"}
    assert run.named(2) == run.named(3) == {2: ABSENT}
    # Two rounds waited for it, a grace each; the others at once.
    assert finished[-1] - finished[3] < 5 < 95 < finished[3]


@pytest.mark.parametrize("seed", range(10))
def test_a_second_contribution_of_a_round_uploads_nothing(seed: int) -> None:
    run = Run("strict", seed)
    member = run.member(0)
    store = member.context.store
    assert run.world.complete(member.contribute(0, FRAGMENT, [gradient(0)], weight=1)) == [None]
    before, sent = dict(run.store._objects), store.stats.bytes_up
    run.world.complete(member.contribute(0, FRAGMENT, [gradient(7)], weight=5))
    assert run.store._objects == before
    assert store.stats.bytes_up == sent
    outcomes = run.world.complete(settle(member, 0, FRAGMENT), run.take_part(1), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2])}


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_nan_is_left_out_and_named_under_skip(wire: str) -> None:
    run = Run("skip", codec=wire)
    bad = gradient(1)
    bad[2, 3] = torch.nan
    outcomes = run.world.complete(run.take_part(0), run.take_part(1, values=bad), run.take_part(2))
    assert len({bits(outcome) for outcome in outcomes}) == 1
    assert run.named() == {1: f"abstained: {NOT_FINITE}"}
    assert layout.payload(0, Member(1, 1)) not in run.store._objects


def test_a_value_that_bf16_can_not_hold_is_not_sent() -> None:
    run = Run("skip", codec="bf16")
    run.world.complete(run.take_part(0), run.take_part(1, values=torch.full((4, 6), 3.4e38)), run.take_part(2))
    assert run.named() == {1: f"abstained: {NOT_FINITE}"}


def test_nan_ends_a_strict_run_on_every_replica() -> None:
    run = Run("strict")
    bad = torch.full((4, 6), torch.inf)
    for task in run.together(run.take_part(0), run.take_part(1, values=bad), run.take_part(2)):
        assert isinstance(task.problem, RoundError)
        assert str(task.problem) == f"round 0 can't be completed: rank 1 (attempt 1) abstains: {NOT_FINITE}"


OTHER_SHAPE = Fragment(0, 6, "another layout", "base")


@pytest.mark.parametrize("seed", range(20))
def test_another_shape_is_left_out_and_named_under_skip(seed: int) -> None:
    run = Run("skip", seed)
    tasks = run.together(
        run.take_part(0), run.take_part(1, values=torch.ones(6), fragment=OTHER_SHAPE), run.take_part(2)
    )
    assert bits(tasks[0].result) == bits(tasks[2].result) == by_hand([0, 2])
    assert "other names, shapes or dtypes" in run.named()[1]


def test_another_shape_ends_a_strict_run() -> None:
    run = Run("strict")
    tasks = run.together(
        run.take_part(0), run.take_part(1, values=torch.ones(6), fragment=OTHER_SHAPE), run.take_part(2)
    )
    for task in (tasks[0], tasks[2]):
        assert isinstance(task.problem, RoundError)
        assert "rank 1 (attempt 1): its payload has other names" in str(task.problem)


def test_a_committed_payload_that_does_not_fit_is_never_averaged() -> None:
    run = Run("skip")
    encoded = codec.encode([torch.ones(6)], CODECS["fp32"], chunk_bytes=64, layout="another layout", metadata={})
    run.put(layout.payload(0, Member(1, 1)), encoded.data)
    record = commit_of(Participant(rank=1, attempt=1, weight=1, payload=encoded.info))
    run.put(layout.commit(0), record.to_json())
    [task] = run.together(run.take_part(0))
    assert isinstance(task.problem, CorruptObjectError)
    assert "rank 1 (attempt 1)" in str(task.problem)


def header_of(run: Run, rank: int, **payload: Any) -> Header:
    """A header of a good contribution; its payload says otherwise where told."""
    encoded = codec.encode([gradient(rank)], CODECS["fp32"], chunk_bytes=64, layout="layout", metadata={})
    run.put(layout.payload(0, Member(rank, 1)), encoded.data)
    return Header(
        kind="contribution",
        round=0,
        fragment=0,
        rank=rank,
        attempt=1,
        weight=rank + 1,
        base_digest="base",
        payload=encoded.info.model_copy(update=payload),
    )


@pytest.mark.parametrize(
    "lie",
    [
        {"size": 10},
        {"size": 0},
        {"size": -1},
        {"size": DATA_OFFSET + 2**40},
        {"data_offset": 0},
        {"data_offset": -8},
        {"chunks": ["0" * 64, "0" * 64]},
        {"chunks": []},
        {"codec": "bf16"},
        {"numel": 10**12},
    ],
    ids=str,
)
def test_a_header_that_lies_about_its_payload_is_left_out_and_named(lie: dict[str, Any]) -> None:
    run = Run("skip")
    header = header_of(run, 1, **lie)
    run.put(layout.header(0, header.member), header.to_json())
    outcomes = run.world.complete(run.take_part(0), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 2])}
    assert run.named()[1] != "late"


def test_a_header_without_its_payload_is_left_out_and_named() -> None:
    run = Run("skip")
    header = header_of(run, 1)
    run.put(layout.header(0, header.member), header.to_json())
    run.world.complete(run.store.delete([layout.payload(0, header.member)]))
    outcomes = run.world.complete(run.take_part(0), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 2])}
    assert 1 in run.named()
    assert run.named()[1] != "late"


def test_a_file_that_is_no_header_is_named_with_its_reason() -> None:
    run = Run("skip")
    run.put(layout.header(0, Member(1, 1)), b"not a header")
    outcomes = run.world.complete(run.take_part(0), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 2])}
    assert "is not a valid Header" in run.named()[1]


def test_a_strict_run_that_can_not_go_on_for_an_alien_file_names_it() -> None:
    run = Run("strict")
    run.put(layout.header(0, Member(1, 1)), b"not a header")
    for task in run.together(run.take_part(0), run.take_part(2)):
        assert isinstance(task.problem, RoundError)
        assert "00001-00001.json is not a valid Header" in str(task.problem)


def test_files_under_other_names_disturb_nobody() -> None:
    run = Run("strict")
    run.put(f"{layout.headers(0)}notes.txt", b"hello")
    run.put("rounds/00000000/p/notes.txt", b"hello")
    run.put(f"{layout.COMMITS}notes.txt", b"hello")
    outcomes = run.world.complete(*(run.take_part(rank) for rank in range(3)))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2])}


def corrupt(run: Run, rank: int, at: int = -1) -> None:
    key = layout.payload(0, Member(rank, 1))
    data = bytearray(run.store._objects[key])
    data[at] ^= 1
    run.put(key, data)


@pytest.mark.parametrize("at", [-1, DATA_OFFSET, 5], ids=["last value", "first value", "frame"])
def test_a_payload_corrupted_before_the_commit_is_left_out_and_named(at: int) -> None:
    run = Run("skip")
    [_] = run.world.complete(run.member(1).contribute(0, FRAGMENT, [gradient(1)], weight=2))
    corrupt(run, 1, at)
    outcomes = run.world.complete(run.take_part(0), run.take_part(2))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 2])}
    assert "payload" in run.named()[1] or "safetensors" in run.named()[1]


def test_a_payload_corrupted_before_the_commit_ends_a_strict_run() -> None:
    run = Run("strict")
    run.world.complete(run.member(1).contribute(0, FRAGMENT, [gradient(1)], weight=2))
    corrupt(run, 1)
    for task in run.together(run.take_part(0), run.take_part(2)):
        assert isinstance(task.problem, RoundError)
        assert "rank 1 (attempt 1): chunk 1 of its payload" in str(task.problem)


def test_a_payload_corrupted_after_the_commit_is_never_averaged() -> None:
    run = Run("skip")
    run.world.complete(run.take_part(0), run.take_part(1))
    corrupt(run, 1)
    [task] = run.together(run.take_part(2))
    assert isinstance(task.problem, CorruptObjectError)
    assert "round 0 was committed, but rank 1 (attempt 1)'s payload is corrupt now" in str(task.problem)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("odd", [0, 2])
def test_a_diverged_replica_is_left_out_and_told(seed: int, odd: int) -> None:
    run = Run("skip", seed)
    other = Fragment(0, NUMEL, "layout", "other bits")
    tasks = run.together(*(run.take_part(rank, fragment=other if rank == odd else FRAGMENT) for rank in range(3)))
    good = [rank for rank in range(3) if rank != odd]
    assert {bits(tasks[rank].result) for rank in good} == {by_hand(good)}
    assert run.named()[odd].startswith("diverged")
    assert isinstance(tasks[odd].problem, DivergedError)


def test_strict_ends_on_different_bits() -> None:
    run = Run("strict")
    other = Fragment(0, NUMEL, "layout", "other bits")
    for task in run.together(run.take_part(0), run.take_part(1, fragment=other), run.take_part(2)):
        assert isinstance(task.problem, RoundError)
        assert "replicas hold different parameters" in str(task.problem)


def test_rounds_that_nobody_contributes_to_end_the_run_at_the_third() -> None:
    run = Run("skip", rounds=8)

    async def abstain(rank: int, settled: list[int]) -> None:
        member = run.member(rank)
        for round_ in range(8):
            await member.abstain(round_, FRAGMENT, CAUGHT_UP)
            outcome = await settle(member, round_, FRAGMENT)
            assert outcome.mean is None
            settled.append(round_)

    settled: list[list[int]] = [[], [], []]
    tasks = [run.world.start(abstain(rank, settled[rank]), f"rank {rank}") for rank in range(3)]
    run.world.run()
    assert settled == [list(range(MOST_EMPTY_ROUNDS - 1))] * 3
    for task in tasks:
        assert isinstance(task.problem, RoundError)
        assert "nobody contributed to the last 3 rounds, up to round 2" in str(task.problem)


def test_a_replaced_attempt_contributes_nothing() -> None:
    run = Run("strict")
    for _ in range(2):
        run.world.complete(membership.claim(run.store, 1))
    before = set(run.store._objects)
    [task] = run.together(run.take_part(1))
    assert isinstance(task.problem, FencedError)
    assert set(run.store._objects) == before


@pytest.mark.parametrize("seed", range(30))
def test_a_replica_killed_anywhere_holds_up_nobody(seed: int) -> None:
    run = Run("skip", seed)
    victim = run.world.start(run.take_part(2), "victim")
    others = [run.world.start(run.take_part(rank), f"rank {rank}") for rank in range(2)]

    async def killer() -> None:
        for _ in range(run.world.random.randrange(60)):
            await run.world.switch()
        victim.kill()

    run.world.start(killer(), "killer")
    run.world.run()
    taken = [p.rank for p in run.commit().participants]
    assert taken in ([0, 1], [0, 1, 2])
    assert {bits(other.result) for other in others} == {by_hand(taken)}


@pytest.mark.parametrize("seed", range(10))
def test_a_zombie_and_its_replacement_give_one_contribution(seed: int) -> None:
    run = Run("skip", seed)
    tasks = run.together(
        run.take_part(0), run.take_part(1), run.take_part(1, member=run.member(1, attempt=2)), run.take_part(2)
    )
    ranks = [p.rank for p in run.commit().participants]
    assert ranks == [0, 1, 2]
    assert len({bits(task.result) for task in tasks}) == 1


def test_the_mean_lands_in_the_gradients_themselves() -> None:
    run = Run("skip", world_size=1, min_replicas=1)
    member, gradients = run.member(0), [part.clone() for part in (gradient(0)[:1], gradient(0)[1:])]

    async def alone() -> Outcome:
        await member.contribute(0, FRAGMENT, gradients, weight=1)
        for tensor in gradients:
            tensor.zero_()
        return await member.settle(0, FRAGMENT, gradients)

    [outcome] = run.world.complete(alone())
    assert outcome.averaged
    assert torch.equal(torch.cat(gradients), gradient(0))
