"""Checkpoints: one initial state for all, only what commits confirm is loaded, and no wrong bit gets in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from diloco.errors import CorruptObjectError, DivergedError, ObjectMissingError
from diloco.exchange import checkpoint, codec, layout
from diloco.exchange.formats import CODECS
from diloco.exchange.layout import Member
from diloco.exchange.records import Commit, Participant
from diloco.exchange.state import FragmentState, OuterStep
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import World, member_context, run_record

if TYPE_CHECKING:
    from diloco.exchange.context import Context
    from diloco.exchange.records import Manifest
    from diloco.exchange.store import Store

STEP = OuterStep()


def states(seed: int, fragments: int = 2) -> list[FragmentState]:
    generator = torch.Generator().manual_seed(seed)
    return [
        FragmentState(
            index,
            {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)},
            {"w": torch.zeros(4, 3), "b": torch.zeros(3)},
        )
        for index in range(fragments)
    ]


LAYOUT = states(0)[0].layout


def digests(found: list[FragmentState]) -> list[str]:
    return [state.digest() for state in found]


class Members:
    """Members of one run with two fragments on one memory store."""

    def __init__(self, seed: int = 0, **run: Any) -> None:
        self.world, self.store = World(seed), MemoryStore()
        self.run = run_record(fragments=2, rounds=8, **run)

    def member(self, rank: int, **settings: Any) -> Context:
        return member_context(self.world, self.store, rank, run=self.run, **settings)

    def write(self, rank: int, round_: int, found: list[FragmentState]) -> Manifest:
        return self.world.complete(checkpoint.write_checkpoint(self.member(rank), round_, found))[0]

    def newest(self) -> int | None:
        async def rounds() -> list[int]:
            return [manifest.round async for manifest in checkpoint.confirmed(self.member(0), newest_first=True)]

        [found] = self.world.complete(rounds())
        return found[0] if found else None

    def commit(self, round_: int, base: str, participants: list[Participant] | None = None) -> None:
        record = Commit(
            round=round_,
            fragment=round_ % 2,
            base_digest=base,
            algorithm="gather",
            participants=participants or [],
            left_out=[],
            committed_by=0,
            committed_by_attempt=1,
            reason="all are there",
        )
        self.world.complete(self.store.write(layout.commit(round_), record.to_json()))

    def contribute(self, round_: int, rank: int, values: torch.Tensor, weight: int = 1) -> Participant:
        encoded = codec.encode([values], CODECS["fp32"], chunk_bytes=64, layout=LAYOUT, metadata={})
        self.world.complete(self.store.write(layout.payload(round_, Member(rank, 1)), encoded.data))
        return Participant(rank=rank, attempt=1, weight=weight, payload=encoded.info)


@pytest.mark.parametrize("seed", range(25))
def test_everybody_starts_from_the_state_that_won(seed: int) -> None:
    members = Members(seed)
    # So little patience that ranks 1 and 2 propose as well in many schedules.
    contexts = [members.member(rank, dead_after=0.01) for rank in range(3)]

    async def join(context: Context) -> list[str]:
        mine = states(seed=context.member.rank)
        manifest = await checkpoint.agree_on_initial(context, mine)
        await checkpoint.load_checkpoint(context, manifest, mine)
        return digests(mine)

    joined = members.world.complete(*(join(context) for context in contexts))
    assert joined[0] == joined[1] == joined[2]
    assert joined[0] in [digests(states(seed=rank)) for rank in range(3)]


def test_rank_0_proposes_the_initial_state() -> None:
    members = Members()
    manifests = members.world.complete(
        *(checkpoint.agree_on_initial(members.member(rank), states(seed=rank)) for rank in range(3))
    )
    assert {(m.rank, m.round) for m in manifests} == {(0, 0)}


def test_another_rank_proposes_when_rank_0_stays_away() -> None:
    members = Members()
    context = members.member(2, dead_after=20)
    [manifest] = members.world.complete(checkpoint.agree_on_initial(context, states(seed=2)))
    assert manifest.rank == 2
    assert 20 < members.world.monotonic() < 25


def test_a_checkpoint_holds_every_bit_and_the_last_round() -> None:
    members = Members()
    before = states(seed=1)
    for state in before:
        state.apply(torch.randn(state.numel), STEP, 4 + state.index)
    manifest = members.write(1, 6, before)
    after = states(seed=2)
    members.world.complete(checkpoint.load_checkpoint(members.member(0), manifest, after))
    assert digests(after) == digests(before)
    assert [state.last_round for state in after] == [4, 5]
    for ours, theirs in zip(after, before, strict=True):
        assert all(torch.equal(ours.momentum[name], theirs.momentum[name]) for name in ours.momentum)


def test_of_two_writers_one_wins_and_parts_do_not_mix() -> None:
    members = Members()
    first, second = states(seed=1), states(seed=2)
    assert members.write(1, 2, first) == members.write(2, 2, second)
    loaded = states(seed=3)
    manifest = members.write(2, 2, second)
    members.world.complete(checkpoint.load_checkpoint(members.member(0), manifest, loaded))
    assert digests(loaded) == digests(first)


def test_there_is_no_checkpoint_at_first() -> None:
    assert Members().newest() is None


def test_the_initial_state_needs_no_confirmation() -> None:
    members = Members()
    members.write(0, 0, states(seed=0))
    assert members.newest() == 0


def test_a_checkpoint_counts_once_every_fragments_commit_confirms_it() -> None:
    members = Members()
    members.write(0, 0, states(seed=0))
    later = states(seed=1)
    members.write(1, 4, later)
    assert members.newest() == 0
    members.commit(4, digests(later)[0])
    assert members.newest() == 0
    members.commit(5, digests(later)[1])
    assert members.newest() == 4


@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint_that_a_commit_refutes_is_ignored(which: int) -> None:
    members = Members()
    members.write(0, 0, states(seed=0))
    good, diverged = states(seed=1), states(seed=2)
    members.write(1, 2, good)
    members.write(2, 4, diverged)
    for round_ in (2, 3):
        members.commit(round_, digests(good)[round_ % 2])
    for round_ in (4, 5):
        true = states(seed=3) if round_ % 2 == which else diverged
        members.commit(round_, digests(true)[round_ % 2])
    assert members.newest() == 2


def test_parts_without_a_manifest_are_no_checkpoint() -> None:
    members = Members()
    members.write(0, 4, states(seed=0))
    members.world.complete(members.store.delete([layout.manifest(4)]))
    assert members.newest() is None


def test_a_file_that_is_no_manifest_does_not_hide_the_checkpoints() -> None:
    members = Members()
    members.write(0, 0, states(seed=0))
    members.world.complete(members.store.write(layout.manifest(6), b"not ours"))
    members.world.complete(members.store.write(f"{layout.CHECKPOINTS}readme/manifest.json", b""))
    assert members.newest() == 0


def change(store: Store, key: str, at: int) -> None:
    data = bytearray(World().complete(store.read(key))[0])
    data[at] ^= 1
    World().complete(store.write(key, data))


@pytest.mark.parametrize("fragment", [0, 1])
@pytest.mark.parametrize("at", [-1, -70, 0, 7, 12], ids=["last value", "a value", "length", "length's end", "names"])
def test_a_corrupt_part_is_refused_by_key(fragment: int, at: int) -> None:
    members = Members()
    manifest = members.write(1, 0, states(seed=1))
    key = layout.checkpoint_part(0, Member(1, 1), fragment)
    change(members.store, key, at)
    with pytest.raises(CorruptObjectError, match=key):
        members.world.complete(checkpoint.load_checkpoint(members.member(0), manifest, states(seed=0)))


@pytest.mark.parametrize("size", [0, 5, 200])
def test_a_truncated_part_is_refused_by_key(size: int) -> None:
    members = Members()
    manifest = members.write(1, 0, states(seed=1))
    key = layout.checkpoint_part(0, Member(1, 1), 1)
    [data] = members.world.complete(members.store.read(key))
    members.world.complete(members.store.write(key, data[:size]))
    with pytest.raises(CorruptObjectError, match=key):
        members.world.complete(checkpoint.load_checkpoint(members.member(0), manifest, states(seed=0)))


def test_a_part_of_another_shape_is_refused_by_name() -> None:
    members = Members()
    manifest = members.write(1, 0, states(seed=1))
    key = layout.checkpoint_part(0, Member(1, 1), 0)
    [data] = members.world.complete(members.store.read(key))
    tensors = safetensors.torch.load(data)
    tensors["parameters/w"] = tensors["parameters/w"].reshape(3, 4)
    members.world.complete(members.store.write(key, safetensors.torch.save(tensors)))
    with pytest.raises(CorruptObjectError, match=r"has no w of shape \[4, 3\]"):
        members.world.complete(checkpoint.load_checkpoint(members.member(0), manifest, states(seed=0)))


def test_a_manifest_that_lacks_a_fragment_is_refused() -> None:
    members = Members()
    manifest = members.write(1, 0, states(seed=1))
    short = manifest.model_copy(update={"parts": manifest.parts[:1]})
    with pytest.raises(CorruptObjectError):
        members.world.complete(checkpoint.load_checkpoint(members.member(0), short, states(seed=0)))


def trained(members: Members, rounds: int) -> list[FragmentState]:
    """Commit some rounds of two ranks, and return the state after them, computed beside the exchange."""
    live = states(seed=0)
    for round_ in range(rounds):
        state = live[round_ % 2]
        base = state.digest()
        gradients = [torch.randn(15, generator=torch.Generator().manual_seed(10 * round_ + rank)) for rank in range(2)]
        if round_ == 2:
            members.commit(round_, base)  # all abstained
            continue
        members.commit(round_, base, [members.contribute(round_, rank, gradients[rank], rank + 1) for rank in range(2)])
        share = [torch.tensor(1 / 3), torch.tensor(2 / 3)]
        state.apply(gradients[0] * share[0] + gradients[1] * share[1], STEP, round_)
    return live


def test_replaying_gives_the_same_bits() -> None:
    members = Members()
    live = trained(members, 6)
    again = states(seed=0)
    [round_] = members.world.complete(checkpoint.replay(members.member(0), again, 0, STEP))
    assert round_ == 6
    assert digests(again) == digests(live)
    assert [state.last_round for state in again] == [4, 5]


def test_replaying_ends_at_the_last_round() -> None:
    members = Members()
    trained(members, 8)
    [round_] = members.world.complete(checkpoint.replay(members.member(0), states(seed=0), 0, STEP))
    assert round_ == 8


def test_replaying_on_other_bits_is_refused() -> None:
    members = Members()
    trained(members, 3)
    with pytest.raises(DivergedError, match=r"rank 0 \(attempt 1\): fragment 0 before round 0"):
        members.world.complete(checkpoint.replay(members.member(0), states(seed=5), 0, STEP))


def test_a_committed_payload_that_is_corrupt_now_is_refused() -> None:
    members = Members()
    trained(members, 3)
    change(members.store, layout.payload(1, Member(1, 1)), -1)
    with pytest.raises(CorruptObjectError, match=r"round 1 was committed, but rank 1 \(attempt 1\)'s payload"):
        members.world.complete(checkpoint.replay(members.member(0), states(seed=0), 0, STEP))


def test_a_committed_payload_that_is_gone_is_named() -> None:
    members = Members()
    trained(members, 3)
    key = layout.payload(1, Member(1, 1))
    members.world.complete(members.store.delete([key]))
    with pytest.raises(ObjectMissingError, match=key):
        members.world.complete(checkpoint.replay(members.member(0), states(seed=0), 0, STEP))
