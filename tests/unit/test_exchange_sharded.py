"""Sharded reduction in virtual time: the same bits as all-gather, whoever dies, under many schedules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from diloco.errors import CorruptRoundError, ObjectMissingError, RoundTimeoutError
from diloco.exchange import layout
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.checkpoint import read_commit
from diloco.exchange.codec import DATA_OFFSET
from diloco.exchange.flat import Flat
from diloco.exchange.layout import Member
from diloco.exchange.mean import audited_mean, committed_mean
from diloco.exchange.records import Beat, Commit
from diloco.exchange.shards import Division, owner
from diloco.exchange.store import Store
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import Settled, World, member_context, run_record, settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

NUMEL = 26
FRAGMENT = Fragment(0, NUMEL, "layout", "base")


def gradient(rank: int, round_: int = 0) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * round_ + rank))


def by_hand(ranks: list[int], round_: int = 0) -> bytes:
    total = sum(rank + 1 for rank in ranks)
    terms = [gradient(rank, round_).numpy() * np.float32((rank + 1) / total) for rank in ranks]
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return mean.tobytes()


def bits(outcome: Settled) -> bytes:
    assert outcome.mean is not None
    return outcome.mean.numpy().tobytes()


class Run:
    """Members of a run of three whose payloads have seven chunks, in three shards."""

    def __init__(self, policy: str = "skip", seed: int = 0, **run: Any) -> None:
        self.world, self.store = World(seed), MemoryStore()
        plain = {"policy": policy, "chunk_bytes": 16, "reduce": "shard", "shards": 3}
        self.run = run_record(**(plain | run))
        self.members: dict[int, ObjectStoreAllReduce] = {}

    def member(self, rank: int, attempt: int = 1, **settings: Any) -> ObjectStoreAllReduce:
        plain = {"grace": 5.0, "timeout": 300.0, "join_timeout": 1000.0, "dead_after": 20.0}
        context = member_context(self.world, self.store, rank, attempt=attempt, run=self.run, **(plain | settings))
        return ObjectStoreAllReduce(context)

    async def take_part(self, rank: int, round_: int = 0, **settings: Any) -> Settled:
        member = self.members.setdefault(rank, self.member(rank, **settings))
        await self.contribute(rank, round_)
        return await settle(member, round_, FRAGMENT)

    async def contribute(self, rank: int, round_: int = 0) -> None:
        """Contribute, and be seen no more unless :meth:`take_part` goes on."""
        member = self.members.setdefault(rank, self.member(rank))
        await member.contribute(round_, FRAGMENT, [gradient(rank, round_)], weight=rank + 1)

    def together(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        return self.world.complete(*coroutines)

    def commit(self, round_: int = 0) -> Commit:
        [found] = self.world.complete(self._record(round_))
        return found

    @property
    def keys(self) -> list[str]:
        return sorted(self.store._objects)

    def flip(self, key: str, place: int = -1) -> None:
        data = bytearray(self.store._objects[key])
        data[place] ^= 1
        self.store._objects[key] = bytes(data)

    async def beats(self, rank: int, seconds: float) -> None:
        """A member that lives, whatever else it does."""
        for counter in range(int(seconds)):
            beat = Beat(rank=rank, attempt=1, counter=counter, phase="waiting")
            await self.store.write(layout.beat(Member(rank, 1)), beat.to_json())
            await self.world.sleep(1.0)

    async def again(self, rank: int = 9, **settings: Any) -> bytes:
        """The committed mean, as one gets it who was not there."""
        out = torch.empty(NUMEL)
        await committed_mean(self.member(rank, **settings).context, await self._record(), "layout", Flat([out]))
        return out.numpy().tobytes()

    async def _record(self, round_: int = 0) -> Commit:
        found = await read_commit(self.store, round_)
        assert found is not None
        return found


@pytest.mark.parametrize("policy", ["strict", "skip"])
@pytest.mark.parametrize("seed", range(20))
def test_all_get_the_bits_of_an_all_gather_under_any_schedule(policy: str, seed: int) -> None:
    run = Run(policy, seed)
    for round_ in range(3):
        outcomes = run.together(*(run.take_part(rank, round_) for rank in (2, 0, 1)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2], round_)}
        assert run.commit(round_).algorithm == "shard"
        assert [key for key in run.keys if key.startswith(layout.means(round_))] == [
            layout.mean(round_, shard) for shard in range(3)
        ]


def test_each_reads_one_shard_of_the_others_and_the_means_of_the_others() -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    body, small = NUMEL * 4, 4000  # headers, records and lists
    for member in run.members.values():
        stats = member.context.store.stats
        frames = 3 * DATA_OFFSET
        assert stats.bytes_down <= 2 * (2 / 3) * body + 32 + frames + 3 * small
        assert stats.bytes_up <= body + body / 3 + 16 + frames + small


def test_a_straggler_that_is_left_out_owns_no_shard_and_reads_all() -> None:
    run = Run("skip")

    async def late() -> Settled:
        await run.world.sleep(30)
        return await run.take_part(2)

    outcomes = run.together(run.take_part(0), run.take_part(1), late())
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1])}


@pytest.mark.parametrize("seed", range(10))
def test_the_shard_of_a_dead_owner_is_averaged_by_whoever_notices(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("strict", seed)
    with caplog.at_level(logging.WARNING):
        outcomes = run.together(run.take_part(0), run.take_part(1), run.contribute(2))
    assert {bits(outcome) for outcome in outcomes[:2]} == {by_hand([0, 1, 2])}
    assert "round 0: nobody averages shard 2: it is done here" in caplog.text


def test_a_slow_owner_that_lives_is_waited_for_and_named() -> None:
    run = Run("strict")
    tasks = [run.take_part(0, timeout=100.0), run.contribute(2), run.beats(2, 300), run.take_part(1, timeout=100.0)]
    with pytest.raises(RoundTimeoutError, match=r"the mean of round 0 was not completed within 100 s, .* for rank 2"):
        run.together(*tasks)
    assert layout.mean(0, 2) not in run.store._objects


def test_a_restarted_owner_averages_its_shard_at_once() -> None:
    run = Run("strict")

    async def restarted() -> bytes:
        while layout.mean(0, 0) not in run.store._objects or layout.mean(0, 1) not in run.store._objects:
            await run.world.sleep(0.1)
        return await run.again(2, attempt=2)

    began = run.world.monotonic()
    outcomes = run.together(run.take_part(0), run.take_part(1), run.contribute(2), restarted())
    assert outcomes[3] == bits(outcomes[0]) == by_hand([0, 1, 2])
    assert run.world.monotonic() - began < 10  # nobody had to be found dead


async def eagerly(
    self: Store,
    calls: Sequence[Callable[[], Awaitable[None]]],
    *,
    at_once: int = 2,
    then: Callable[[], Awaitable[None]] | None = None,
    beside: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """`Store.each` with what may go on beside at every place where it may."""
    for left, call in zip(range(len(calls) - 1, -1, -1), calls, strict=True):
        await call()
        if beside is not None and left:
            await beside()
    if then is not None:
        await then()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_beside_uploads_has_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "each", eagerly)
    run = Run("strict", seed, shards=7)
    for round_ in range(3):
        outcomes = run.together(*(run.take_part(rank, round_) for rank in (2, 0, 1)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1, 2], round_)}


def test_a_restarted_owner_publishes_its_shards_and_reads_none_of_them_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "each", eagerly)
    run = Run(shards=7)
    run.together(*(run.take_part(rank) for rank in range(3)))
    assert run.together(run.again(rank=0, attempt=2)) == [by_hand([0, 1, 2])]


@pytest.mark.parametrize("place", [5, DATA_OFFSET + 3])
def test_a_corrupt_mean_is_averaged_again_where_its_digest_can_be_read(place: int) -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    run.flip(layout.mean(0, 1), place)
    if place > DATA_OFFSET:
        assert run.together(run.again()) == [by_hand([0, 1, 2])]
    else:
        with pytest.raises(CorruptRoundError, match=r"00001.safetensors: this mean is corrupt"):
            run.together(run.again())


def test_a_mean_and_its_payloads_that_are_corrupt_are_never_used() -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    run.flip(layout.mean(0, 1))
    run.flip(layout.payload(0, Member(0, 1), 1))
    with pytest.raises(CorruptRoundError, match=r"rank 0 \(attempt 1\)'s payload is corrupt now \(chunk 3"):
        run.together(run.again())


def test_a_mean_of_another_length_or_shard_is_no_mean() -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    whole = run.store._objects[layout.mean(0, 1)]
    for wrong in (whole[:-4], b"", run.store._objects[layout.mean(0, 2)]):
        run.store._objects[layout.mean(0, 1)] = wrong
        with pytest.raises(CorruptRoundError, match="this mean is corrupt"):
            run.together(run.again())


def test_whoever_comes_second_takes_the_stored_bits_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("strict")
    other = Run("strict")
    other.run = run.run
    other.together(*(other.take_part(rank) for rank in range(3)))

    async def spoilt() -> None:
        """An owner whose processor is wrong: what it published is framed as it should be, and the digest is right."""
        from diloco.exchange import codec
        from diloco.exchange.formats import CODECS

        wrong = codec.encode_mean([torch.arange(8.0)], CODECS["fp32"], round_=0, shard=1)
        await run.store.create(layout.mean(0, 1), wrong.data)

    division = Division.of(run.run, NUMEL)
    assert (division.shards[1].start, division.shards[1].stop) == (8, 16)
    run.together(spoilt())
    with caplog.at_level(logging.WARNING):
        outcomes = run.together(*(run.take_part(rank) for rank in range(3)))
    right = np.frombuffer(by_hand([0, 1, 2]), np.float32).copy()
    right[8:16] = np.arange(8)
    assert {bits(outcome) for outcome in outcomes} == {right.tobytes()}
    assert "another replica has published other bits: those are taken" in caplog.text
    differences = run.together(audited_mean(run.member(9).context, run.commit(), "layout", Flat([torch.empty(NUMEL)])))
    assert differences == [[f"{layout.mean(0, 1)} is not the mean of the round's payloads"]]


def test_an_observer_writes_nothing() -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    del run.store._objects[layout.mean(0, 1)]
    before, out = run.keys, torch.empty(NUMEL)
    [differences] = run.together(audited_mean(run.member(0).context, run.commit(), "layout", Flat([out])))
    assert (differences, out.numpy().tobytes(), run.keys) == ([], by_hand([0, 1, 2]), before)


def test_a_round_that_was_pruned_is_noticed_at_once() -> None:
    run = Run("strict")
    run.together(*(run.take_part(rank) for rank in range(3)))
    for key in run.keys:
        if key.startswith("rounds/"):
            del run.store._objects[key]
    began = run.world.monotonic()
    with pytest.raises(ObjectMissingError):
        run.together(run.again())
    assert run.world.monotonic() - began < 5


@pytest.mark.parametrize(("change", "said"), [("gone", "is not there"), ("short", "has 15 bytes, not 40")])
def test_a_payload_that_is_not_whole_is_left_out(change: str, said: str) -> None:
    run = Run("skip")
    part = layout.payload(0, Member(2, 1), 2)

    async def spoil() -> None:
        await run.contribute(2)
        if change == "gone":
            await run.store.delete([part])
        else:
            await run.store.write(part, run.store._objects[part][:15])

    run.together(spoil())
    outcomes = run.together(run.take_part(0), run.take_part(1))
    assert {bits(outcome) for outcome in outcomes} == {by_hand([0, 1])}
    assert {out.rank: out.reason for out in run.commit().left_out} == {2: f"its payload {said}"}


@pytest.mark.parametrize("mean_codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_rounded_means_are_the_same_bits_for_all(mean_codec: str, codec: str) -> None:
    run = Run("strict", codec=codec, mean_codec=mean_codec, chunk_bytes=512)
    outcomes = run.together(*(run.take_part(rank) for rank in range(3)), run.beats(0, 1))
    [mean] = {bits(outcome) for outcome in outcomes[:3]}
    exact = np.frombuffer(by_hand([0, 1, 2]), np.float32)
    assert 0 < np.abs(np.frombuffer(mean, np.float32) - exact).max() < 0.5
    assert run.together(run.again()) == [mean]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("numel", "wanted"), [(0, 3), (1, 3), (1015, 4), (50_000, 4), (200_000, 16), (50_000, 1)])
def test_shards_cover_a_payload_in_whole_chunks(codec: str, numel: int, wanted: int) -> None:
    from diloco.exchange.formats import CODECS

    wire, chunk = CODECS[codec], 4096
    shards = Division(numel, codec, chunk, wanted).shards
    body = wire.body_bytes(numel)
    assert [(shard.index, shard.start, shard.body_start) for shard in shards] == [
        (index, before.stop if before else 0, before.body_stop if before else 0)
        for index, before in enumerate([None, *shards[:-1]])
    ]
    assert (shards[-1].stop, shards[-1].body_stop) == (numel, body)
    assert len(shards) == min(wanted, max(-(-body // chunk), 1))
    for shard in shards:
        assert shard.body_start % chunk == 0
        assert wire.body_bytes(shard.stop - shard.start) == shard.body_stop - shard.body_start


def test_a_large_payload_has_more_shards_than_owners_so_that_a_mean_fits_into_memory() -> None:
    shards = Division(2**30, "fp32", 2**23, 4).shards
    assert len(shards) == 64
    assert {shard.stop - shard.start for shard in shards} == {2**24}


@pytest.mark.parametrize("owners", [1, 2, 3, 5, 8])
def test_shards_rotate_and_each_owner_is_served_by_all_in_turn(owners: int) -> None:
    division = Division(1000, "fp32", 64, 8)
    for round_ in range(3):
        owned = [division.owned(round_, place, owners) for place in range(owners)]
        assert sorted(shard.index for mine in owned for shard in mine) == list(range(8))
        orders = [division.upload_order(round_, place, owners) for place in range(owners)]
        for place, order in enumerate(orders):
            assert sorted(shard.index for shard in order) == list(range(8))
            assert owner(round_, order[0].index, owners) == (place + 1) % owners
        # At each step the replicas upload for different owners.
        if 8 % owners == 0:
            for step in zip(*orders, strict=True):
                assert len({owner(round_, shard.index, owners) for shard in step}) == owners
    assert division.owned(0, 0, owners) != division.owned(1, 0, owners) or owners == 1
