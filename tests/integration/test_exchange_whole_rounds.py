"""Whole rounds by three members on each real store, in real time. No test waits for a time to pass but for what
another member has written.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
import torch

from diloco.errors import CorruptObjectError, RoundError
from diloco.exchange import checkpoint, ending, layout, membership
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.clock import SystemClock
from diloco.exchange.context import Context
from diloco.exchange.flat import Flat
from diloco.exchange.layout import Member
from diloco.exchange.mean import committed_mean
from diloco.exchange.records import RunResult
from diloco.exchange.rounds import NOT_FINITE
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.state import FragmentState, OuterStep, whole_digest
from diloco.exchange.store import open_store
from tests.support.virtual import Settled, run_record, settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from diloco.exchange.records import Commit

NUMEL = 50_000
FRAGMENT = Fragment(0, NUMEL, "layout", "base")


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def by_hand(*ranks: int) -> bytes:
    """The mean of these ranks' gradients with weight rank + 1, in numpy."""
    total = sum(rank + 1 for rank in ranks)
    terms = [gradient(rank).numpy() * np.float32((rank + 1) / total) for rank in ranks]
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return mean.tobytes()


def bits(outcome: object) -> bytes:
    assert isinstance(outcome, Settled), outcome
    assert outcome.mean is not None
    return outcome.mean.numpy().tobytes()


class Members:
    """Three members in one event loop, a store each."""

    def __init__(self, uri: str, policy: str, codec: str = "fp32", *, shards: int = 1, **settings: Any) -> None:
        self.uri = uri
        reduce = "shard" if shards > 1 else "gather"
        self.run = run_record(policy=policy, codec=codec, chunk_bytes=65536, reduce=reduce, shards=shards)
        # Long, so that only what a test is about can end a wait; a grace is given where it must run out.
        plain = {"policy": policy, "grace": 60.0, "timeout": 60.0, "poll_first": 0.005, "poll_most": 0.02}
        self.settings = ExchangeSettings.model_validate(plain | settings)

    async def __aenter__(self) -> Self:
        self._open = AsyncExitStack()
        self.all = [self.member(rank) for rank in range(3)]
        self.store = self.all[0].context.store
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def member(self, rank: int) -> ObjectStoreAllReduce:
        store = open_store(self.uri)
        self._open.push_async_callback(store.close)
        return ObjectStoreAllReduce(Context(store, SystemClock(), Member(rank, 1), self.settings, self.run))

    async def take_part(
        self, rank: int, *, values: torch.Tensor | None = None, fragment: Fragment = FRAGMENT
    ) -> Settled:
        await self.contribute(rank, values, fragment)
        return await settle(self.all[rank], 0, fragment)

    async def contribute(
        self, rank: int, values: torch.Tensor | None = None, fragment: Fragment = FRAGMENT
    ) -> str | None:
        values = gradient(rank) if values is None else values
        return await self.all[rank].contribute(0, fragment, [values], weight=rank + 1)

    async def committed(self) -> Commit:
        look = self.all[0].context
        return await look.wait_until(lambda _: checkpoint.read_commit(self.store, 0), doing="a commit")

    async def corrupt(self, rank: int) -> None:
        key = layout.payload(0, Member(rank, 1))
        data = bytearray(await self.store.read(key))
        data[-1] ^= 1
        await self.store.write(key, data)


def run(members: Members, scenario: Callable[[Members], Awaitable[object]]) -> None:
    async def inside() -> None:
        async with members:
            await scenario(members)

    asyncio.run(inside())


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_all_get_the_same_bits(store_uri: str, policy: str) -> None:
    async def scenario(members: Members) -> None:
        outcomes = await asyncio.gather(*(members.take_part(rank) for rank in range(3)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 1, 2)}
        assert (await members.committed()).left_out == []

    run(Members(store_uri, policy), scenario)


@pytest.mark.parametrize(("codec", "nearly"), [("int8", 0.02), ("int4", 0.4)])
def test_all_get_the_same_bits_in_few_bits(store_uri: str, codec: str, nearly: float) -> None:
    """Whoever averages in time and whoever is left out; with the true mean as near as half a step."""

    async def scenario(members: Members) -> None:
        async def late() -> Settled:
            await members.committed()
            return await members.take_part(2)

        outcomes = await asyncio.gather(members.take_part(0), members.take_part(1), late())
        [mean] = {bits(outcome) for outcome in outcomes}
        exact = np.frombuffer(by_hand(0, 1), np.float32)
        assert 0 < np.abs(np.frombuffer(mean, np.float32) - exact).max() < nearly
        await members.corrupt(1)
        with pytest.raises(CorruptObjectError, match="chunk 0 of its payload"):
            await committed_mean(
                members.all[2].context, await members.committed(), "layout", Flat([torch.empty(NUMEL)])
            )

    run(Members(store_uri, "skip", codec, grace=0.1), scenario)


def test_a_sharded_reduction_has_the_same_bits_and_fewer_bytes(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        outcomes = await asyncio.gather(*(members.take_part(rank) for rank in range(3)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 1, 2)}
        names = [layout.mean(0, shard) for shard in range(3)]
        assert [entry.key for entry in await members.store.list(layout.means(0))] == names
        most = 2 * (2 / 3) * NUMEL * 4 + 3 * 65536  # shards are whole chunks
        assert all(member.context.store.stats.bytes_down < most for member in members.all)

    run(Members(store_uri, "strict", shards=3), scenario)


def test_a_straggler_is_left_out_and_applies_the_mean_all_the_same(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        async def late() -> Settled:
            await members.committed()
            return await members.take_part(2)

        outcomes = await asyncio.gather(members.take_part(0), members.take_part(1), late())
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 1)}
        assert {out.rank: out.reason for out in (await members.committed()).left_out} == {2: "late"}

    run(Members(store_uri, "skip", grace=0.1), scenario)


def test_a_second_contribution_of_a_round_uploads_nothing(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        await members.contribute(0)
        store = members.all[0].context.store
        sent = store.stats.bytes_up
        key = layout.payload(0, Member(0, 1))
        before = await store.read(key)
        await members.contribute(0, gradient(7))
        assert await store.read(key) == before
        outcomes = await asyncio.gather(settle(members.all[0], 0, FRAGMENT), *(members.take_part(r) for r in (1, 2)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 1, 2)}
        assert store.stats.bytes_up - sent < NUMEL

    run(Members(store_uri, "strict"), scenario)


def poisoned() -> torch.Tensor:
    values = gradient(1)
    values[NUMEL // 2] = torch.nan
    return values


def test_nan_is_left_out_and_named(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        outcomes = await asyncio.gather(
            members.take_part(0), members.take_part(1, values=poisoned()), members.take_part(2)
        )
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 2)}
        named = {out.rank: out.reason for out in (await members.committed()).left_out}
        assert named == {1: f"abstained: {NOT_FINITE}"}

    run(Members(store_uri, "skip"), scenario)


OTHER = Fragment(0, 6, "another layout", "base")


def test_another_shape_is_left_out_and_named(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        await members.contribute(1, torch.ones(6), OTHER)
        outcomes = await asyncio.gather(members.take_part(0), members.take_part(2))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 2)}
        [out] = (await members.committed()).left_out
        assert out.rank == 1
        assert "other names, shapes or dtypes" in out.reason

    run(Members(store_uri, "skip"), scenario)


@pytest.mark.parametrize("what", ["nan", "shape", "corrupt"])
def test_what_can_not_be_averaged_ends_a_strict_run_by_name(store_uri: str, what: str) -> None:
    async def scenario(members: Members) -> None:
        if what == "nan":
            await members.contribute(1, poisoned())
        elif what == "shape":
            await members.contribute(1, torch.ones(6), OTHER)
        else:
            await members.contribute(1)
            await members.corrupt(1)
        ends = await asyncio.gather(members.take_part(0), members.take_part(2), return_exceptions=True)
        for end in ends:
            assert isinstance(end, RoundError)
            assert "rank 1 (attempt 1)" in str(end)
        assert await checkpoint.read_commit(members.store, 0) is None

    run(Members(store_uri, "strict"), scenario)


def test_alien_files_are_not_averaged_and_disturb_nobody(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        for key in (
            f"{layout.headers(0)}notes.txt",
            layout.header(0, Member(9, 1)),
            "rounds/00000000/p/notes.txt",
            f"{layout.COMMITS}notes.txt",
            f"{layout.BEATS}notes.txt",
            f"{layout.MEMBERS}notes.txt",
        ):
            await members.store.write(key, b"not ours")
        outcomes = await asyncio.gather(*(members.take_part(rank) for rank in range(3)))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 1, 2)}
        named = {out.rank: out.reason for out in (await members.committed()).left_out}
        assert "is not a valid Header" in named[9]

    run(Members(store_uri, "skip"), scenario)


@pytest.mark.parametrize("size", [None, 300, 0], ids=["a bit", "cut short", "empty"])
def test_a_payload_corrupted_before_the_commit_is_left_out_and_named(store_uri: str, size: int | None) -> None:
    async def scenario(members: Members) -> None:
        await members.contribute(1)
        if size is None:
            await members.corrupt(1)
        else:
            key = layout.payload(0, Member(1, 1))
            await members.store.write(key, (await members.store.read(key))[:size])
        outcomes = await asyncio.gather(members.take_part(0), members.take_part(2))
        assert {bits(outcome) for outcome in outcomes} == {by_hand(0, 2)}
        [out] = (await members.committed()).left_out
        assert (out.rank, out.attempt) == (1, 1)
        assert out.reason != "late"

    run(Members(store_uri, "skip"), scenario)


def test_a_payload_corrupted_after_the_commit_is_never_averaged(store_uri: str) -> None:
    async def scenario(members: Members) -> None:
        await asyncio.gather(members.take_part(0), members.take_part(1))
        await members.corrupt(1)
        with pytest.raises(CorruptObjectError, match=r"round 0 was committed, but rank 1 \(attempt 1\)'s payload"):
            await members.take_part(2)

    run(Members(store_uri, "skip", grace=0.05), scenario)


def test_a_run_from_its_first_claim_to_its_result(store_uri: str) -> None:
    """Three members claim, agree on the run and the initial state, average all rounds, and end with one result."""
    record = run_record(policy="strict", rounds=4)
    settings = ExchangeSettings(poll_first=0.005, poll_most=0.02, timeout=60)
    step = OuterStep()

    def state(seed: int) -> FragmentState:
        weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        return FragmentState(0, {"weight": weight}, {"weight": torch.zeros(4, 6)})

    async def member(rank: int) -> tuple[str, RunResult]:
        store = open_store(store_uri)
        try:
            me = await membership.claim(store, rank)
            context = Context(store, SystemClock(), me, settings, await membership.agree_on_run(store, record))
            mine = state(seed=rank)
            manifest = await checkpoint.agree_on_initial(context, [mine])
            await checkpoint.load_checkpoint(context, manifest, [mine])
            allreduce = ObjectStoreAllReduce(context)
            for round_ in range(record.rounds):
                fragment = Fragment(0, mine.numel, mine.layout, mine.digest())
                generator = torch.Generator().manual_seed(100 * round_ + rank)
                values = torch.randn(4, 6, generator=generator)
                await allreduce.contribute(round_, fragment, [values], weight=1)
                outcome = await settle(allreduce, round_, fragment)
                assert outcome.mean is not None
                mine.apply(outcome.mean, step, round_)
            again = state(seed=9)
            await checkpoint.load_checkpoint(context, manifest, [again])
            assert await checkpoint.replay(context, [again], 0, step) == record.rounds
            assert again.digest() == mine.digest()
            digest = whole_digest([mine.digest()])
            await ending.vote(context, digest)
            found = await ending.await_result(context, digest)
            if not isinstance(found, RunResult):
                found = await ending.write_result(context, digest, found, None, None)
            return digest, found
        finally:
            await store.close()

    async def everybody() -> list[tuple[str, RunResult]]:
        return await asyncio.gather(*(member(rank) for rank in range(3)))

    ends = asyncio.run(everybody())
    assert len({digest for digest, _ in ends}) == 1
    assert len({result.nonce for _, result in ends}) == 1
    assert ends[0][1].digest == ends[0][0]
