"""Error feedback: what rounding takes away comes back later, and what is no longer owed is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from diloco.exchange import codec, inner
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.codec import DATA_OFFSET
from diloco.exchange.feedback import Feedback
from diloco.exchange.formats import CODECS
from diloco.exchange.replica import Replica
from diloco.exchange.state import FragmentState, OuterStep
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import Settled, World, member_context, run_record, settle

if TYPE_CHECKING:
    from collections.abc import Coroutine


NUMEL = 2000
FRAGMENT = Fragment(0, NUMEL, "layout", "base")
integers = pytest.mark.parametrize("name", ["int8", "int4"])


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def sent(values: torch.Tensor, name: str, residual: torch.Tensor | None) -> torch.Tensor:
    wire = CODECS[name]
    encoded = codec.encode([values], wire, chunk_bytes=65536, layout="l", metadata={}, residual=residual)
    return codec.Decoder(wire, len(encoded.data))(memoryview(encoded.data)[DATA_OFFSET:])[:NUMEL].clone()


@integers
def test_what_rounding_takes_away_comes_back_later(name: str) -> None:
    """The sum of what was sent stays within one step of the sum of what was meant, however many rounds."""
    residual, meant, came = torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL).double()
    alone = torch.zeros(NUMEL).double()
    for _ in range(50):
        values = gradient(1) * 0.9  # the same small values are rounded away each time without feedback
        meant += values
        came += sent(values, name, residual)
        alone += sent(values, name, None)
    step = float(meant.abs().max()) / 50 / {"int8": 127, "int4": 7}[name]
    assert float((meant - came).abs().max()) < step
    assert float((meant - alone).abs().max()) > 10 * step


class Members:
    """Members of one run in virtual time, whose codec is int4."""

    def __init__(self, **run: Any) -> None:
        self.world, self.store = World(0), MemoryStore()
        plain = {"world_size": 3, "min_replicas": 2, "codec": "int4", "chunk_bytes": 65536, "policy": "skip"}
        self.run = run_record(**(plain | run))

    def member(self, rank: int) -> ObjectStoreAllReduce:
        return ObjectStoreAllReduce(member_context(self.world, self.store, rank, run=self.run))

    async def take_part(
        self, member: ObjectStoreAllReduce, round_: int, values: torch.Tensor, after: float = 0
    ) -> Settled:
        if after:
            await self.world.sleep(after)
        await member.contribute(round_, FRAGMENT, [values], weight=1)
        return await settle(member, round_, FRAGMENT)

    def together(self, *parts: Coroutine[Any, Any, Settled]) -> list[Settled]:
        return self.world.complete(*parts)


def residual(member: ObjectStoreAllReduce) -> torch.Tensor | None:
    return member.feedback.state().get("feedback/0")


def test_a_round_in_int4_is_the_same_on_all_and_leaves_what_was_not_sent() -> None:
    members = Members()
    all_ = [members.member(rank) for rank in range(3)]
    for round_ in range(3):
        owed = [residual(member) for member in all_]
        values = [gradient(10 * round_ + rank) for rank in range(3)]
        outcomes = members.together(*(members.take_part(all_[r], round_, values[r].clone()) for r in (2, 0, 1)))
        assert len({outcome.mean.numpy().tobytes() for outcome in outcomes if outcome.mean is not None}) == 1
        for member, before, value in zip(all_, owed, values, strict=True):
            expected = torch.zeros(NUMEL) if before is None else before.clone()
            sent(value, "int4", expected)
            after = residual(member)
            assert after is not None
            assert torch.equal(after, expected)
            assert after.any()


def test_a_contribution_that_was_left_out_owes_nothing() -> None:
    members = Members()
    all_ = [members.member(rank) for rank in range(3)]
    members.together(*(members.take_part(member, 0, gradient(r)) for r, member in enumerate(all_)))
    late = members.take_part(all_[2], 1, gradient(7), after=60)
    members.together(members.take_part(all_[0], 1, gradient(5)), members.take_part(all_[1], 1, gradient(6)), late)
    assert residual(all_[0]) is not None
    assert residual(all_[2]) is None


def test_after_nan_nothing_is_owed() -> None:
    members = Members()
    all_ = [members.member(rank) for rank in range(3)]
    members.together(*(members.take_part(member, 0, gradient(r)) for r, member in enumerate(all_)))
    bad = gradient(3)
    bad[5] = torch.nan
    members.together(*(members.take_part(m, 1, bad if r == 1 else gradient(r)) for r, m in enumerate(all_)))
    assert residual(all_[1]) is None
    assert residual(all_[0]) is not None


def test_fp32_carries_nothing_over() -> None:
    members = Members(codec="fp32")
    all_ = [members.member(rank) for rank in range(3)]
    members.together(*(members.take_part(member, 0, gradient(r)) for r, member in enumerate(all_)))
    assert all(member.feedback.state() == {} for member in all_)


class Digest:
    """A digest that is there already."""

    def __init__(self, state: FragmentState) -> None:
        self._value = state.digest()

    def __await__(self) -> Any:
        async def value() -> str:
            return self._value

        return value().__await__()


def states() -> list[FragmentState]:
    return [FragmentState(i, {"w": torch.ones(NUMEL)}, {"w": torch.zeros(NUMEL)}) for i in range(2)]


async def replica(members: Members, rank: int, attempt: int = 1) -> Replica:
    context = member_context(members.world, members.store, rank, attempt=attempt, run=members.run)
    step = OuterStep(members.run.outer_lr, members.run.outer_momentum, members.run.nesterov)
    return await Replica.enter(
        context.store, members.world, context.member, context.settings, members.run, states(), step, Digest
    )


async def rounds(replica: Replica, until: int) -> None:
    while replica.round < until:
        turn = await replica.quorum()
        assert turn is not None
        mean = torch.empty(NUMEL)
        await replica.exchange(turn, [gradient(replica.round)], [mean])
        state = replica.states[turn.fragment]
        state.apply(mean, replica._step, turn.round)
        replica.applied(turn)


def test_the_next_attempt_takes_over_what_still_holds() -> None:
    """Saved before round 2; then fragment 0 had its turn, in round 2, and fragment 1 did not."""
    members = Members(world_size=1, min_replicas=1, fragments=2, rounds=8)

    async def first() -> dict[str, torch.Tensor]:
        mine = await replica(members, 0)
        await rounds(mine, 2)
        saved = mine.feedback()
        await inner.save(mine.context, mine.round, saved)
        await rounds(mine, 3)
        return saved

    async def second(attempt: int) -> tuple[Replica, dict[str, torch.Tensor]]:
        again = await replica(members, 0, attempt)
        found = await inner.load(again.context, again.round)
        assert found is not None
        assert found.round == 2
        again.load_feedback(found)
        return again, again.feedback()

    [saved] = members.world.complete(first())
    assert saved.keys() == {"feedback/0", "feedback/1"}
    [(again, taken)] = members.world.complete(second(2))
    assert taken.keys() == {"feedback/1"}
    assert torch.equal(taken["feedback/1"], saved["feedback/1"])
    # Nor is anything owed after a catch-up.
    members.world.complete(again.catch_up())
    assert again.feedback() == {}


def test_a_copy_is_not_changed_by_later_rounds() -> None:
    feedback = Feedback()
    feedback.residual(0, 3).fill_(1)
    copy = feedback.state()
    feedback.residual(0, 3).fill_(2)
    assert copy["feedback/0"].tolist() == [1, 1, 1]
    feedback.load(copy | {"0/exp_avg": torch.ones(2)}, unchanged={0})
    assert feedback.state()["feedback/0"].tolist() == [1, 1, 1]
    assert feedback.residual(0, 4).tolist() == [0, 0, 0, 0]  # of another model
