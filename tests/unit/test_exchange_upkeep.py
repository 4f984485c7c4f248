"""What a long run needs: the adaptive grace period, pruning, a replica's own state, and the verification of it all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diloco.errors import ConfigurationError, CorruptRoundError
from diloco.exchange import checkpoint, inner, layout, pruning, verify
from diloco.exchange.grace import LEAST, MOST, Grace
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Header, Manifest
from diloco.exchange.replica import Replica
from diloco.exchange.state import FragmentState, OuterStep
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import World, member_context, run_record

if TYPE_CHECKING:
    from diloco.exchange.checkpoint import Snapshot

WORLD_SIZE, NUMEL = 3, 6


def state(seed: int) -> FragmentState:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    return FragmentState(0, {"weight": values}, {"weight": torch.zeros(NUMEL)})


class Run:
    """A whole run of three replicas, as short as can be, driven as the manager drives it."""

    def __init__(self, rounds: int = 12, every: int = 2, seed: int = 0, **run: Any) -> None:
        self.world, self.store = World(seed), MemoryStore()
        self.record = run_record(rounds=rounds, world_size=WORLD_SIZE, min_replicas=2, **run)
        self.every = every
        self.step = OuterStep(self.record.outer_lr, self.record.outer_momentum, self.record.nesterov)

    async def replica(self, rank: int, until: int, attempt: int = 1) -> Replica:
        context = member_context(self.world, self.store, rank, attempt=attempt, run=self.record)
        settings = context.settings.model_copy(update={"checkpoint_every": self.every})
        mine = state(rank)

        async def digest(value: str) -> str:
            return value

        class Digest:
            def __init__(self, state: FragmentState) -> None:
                self.value = state.digest()

            def __await__(self) -> Any:
                return digest(self.value).__await__()

        replica = await Replica.enter(
            context.store, self.world, Member(rank, attempt), settings, self.record, [mine], self.step, Digest
        )
        while replica.round < until:
            turn = await replica.quorum()
            assert turn is not None
            gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * turn.round + rank))
            mean = torch.empty(NUMEL)
            await replica.exchange(turn, [gradient], [mean])
            if turn.averaged:
                self.step(mine.parameters["weight"], mine.momentum["weight"], mean)
            snapshot: Snapshot | None = replica.applied(turn)
            if snapshot is not None:
                await replica.write(snapshot)
        return replica

    def go(self, until: int, attempt: int = 1) -> list[Replica]:
        return self.world.complete(*(self.replica(rank, until, attempt) for rank in range(WORLD_SIZE)))

    def rounds_left(self) -> set[int]:
        keys = [key for key in self.store._objects if key.startswith(layout.ROUNDS)]
        return {int(key.split("/")[1]) for key in keys}

    def verdict(self) -> verify.Verdict:
        [found] = self.world.complete(verify.verify(self.store, self.world))
        return found


def test_the_grace_period_follows_how_late_ranks_are() -> None:
    grace = Grace()
    assert grace.seconds == MOST
    for _ in range(20):
        grace.observe(0.0)
    assert grace.seconds == LEAST
    for _ in range(20):
        grace.observe(4.0)
    assert grace.seconds == 9.0
    for _ in range(40):
        grace.observe(1000.0)
    assert grace.seconds == MOST
    assert Grace(7.5).seconds == 7.5


def test_one_slow_round_does_not_make_everyone_wait() -> None:
    grace = Grace()
    for _ in range(30):
        grace.observe(0.1)
    grace.observe(25.0)
    assert grace.seconds < 2


def test_checkpoints_and_pruning_keep_the_two_newest_confirmed_and_the_rounds_since() -> None:
    run = Run(rounds=12, every=2)
    run.go(until=9)
    # Checkpoint 8 awaits the commit of round 8, which pruned nothing yet; 6 and 4 were confirmed when it was written.
    assert run.rounds_left() == set(range(4, 9))
    whole = {
        int(key.split("/")[1]) for key in run.store._objects if key.startswith("checkpoints/") and "/000" in key[20:]
    }
    assert min(whole) == 4
    assert {layout.commit(round_) for round_ in range(9)} <= run.store._objects.keys()
    assert {layout.manifest(round_) for round_ in (0, 2, 4, 6, 8)} <= run.store._objects.keys()


def test_a_restart_starts_from_a_checkpoint_and_has_the_same_bits() -> None:
    run = Run(rounds=12, every=2)
    before = run.go(until=9)
    digests = [run.world.complete(replica.final_digest())[0] for replica in before]
    again = run.world.complete(run.replica(1, until=9, attempt=2))[0]
    assert run.world.complete(again.final_digest())[0] == digests[0] == digests[1] == digests[2]
    assert again.round == 9


def test_nothing_is_pruned_between_the_last_round_and_the_result() -> None:
    run = Run(rounds=8, every=2)
    run.go(until=8)
    context = member_context(run.world, run.store, 0, run=run.record)
    before = run.rounds_left()
    assert run.world.complete(pruning.prune(context)) == [None]
    assert run.rounds_left() == before


def test_an_unconfirmed_checkpoint_licenses_nothing() -> None:
    run = Run(rounds=12, every=2)
    run.go(until=7)
    context = member_context(run.world, run.store, 0, run=run.record)
    run.world.complete(checkpoint.write_checkpoint(context, 10, [state(5)]))
    # Of the confirmed ones 6 and 4 are the newest; with the unconfirmed one it would be 10 and 6.
    assert run.world.complete(pruning.prune(context)) == [4]
    assert run.rounds_left() == {4, 5, 6}


def test_a_copy_that_is_not_what_was_applied_is_no_checkpoint() -> None:
    run = Run(rounds=12, every=2)
    [replica, *_] = run.go(until=3)
    snapshot = replica._snapshot()
    snapshot.states[0].parameters["weight"][0] += 1
    with pytest.raises(Exception, match="is not what was applied"):
        run.world.complete(replica.write(snapshot))
    assert layout.manifest(3) not in run.store._objects


def spoil(store: MemoryStore, key: str) -> None:
    data = bytearray(store._objects[key])
    data[-1] ^= 1
    store._objects[key] = bytes(data)


def test_who_could_not_average_a_round_in_time_goes_on_from_a_checkpoint_beyond_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A payload of round 5 is spoilt once ranks 0 and 1 have averaged it; rank 2 comes after that."""
    run = Run(rounds=14, every=4, policy="skip")

    async def late() -> Replica:
        while layout.commit(6) not in run.store._objects:
            await run.world.sleep(0.1)
        spoil(run.store, layout.payload(5, Member(1, 1)))
        return await run.replica(2, 14)

    replicas = run.world.complete(run.replica(0, 14), run.replica(1, 14), late())
    assert len({run.world.complete(replica.final_digest())[0] for replica in replicas}) == 1
    assert "round 5 was committed, but rank 1 (attempt 1)'s payload is corrupt now" in caplog.text


def test_a_strict_run_ends_at_once_where_a_committed_payload_is_spoilt() -> None:
    run = Run(rounds=12, every=2, policy="strict")
    run.go(until=5)
    spoil(run.store, layout.payload(4, Member(1, 1)))
    began = run.world.monotonic()
    with pytest.raises(CorruptRoundError, match=r"round 4 was committed, but rank 1 .* start a new run"):
        run.world.complete(run.replica(2, 6, attempt=2))
    assert run.world.monotonic() - began < 10


def test_a_checkpoint_with_a_spoilt_part_falls_back_to_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(rounds=12, every=2)
    [before, *_] = run.go(until=9)
    [part] = [key for key in run.store._objects if key.startswith("checkpoints/00000008/") and "manifest" not in key]
    spoil(run.store, part)
    [again] = run.world.complete(run.replica(1, 9, attempt=2))
    assert len(set(run.world.complete(again.final_digest(), before.final_digest()))) == 1
    assert "checkpoint 8 is not used" in caplog.text


def test_a_replicas_own_state_is_found_by_its_next_attempt() -> None:
    world, store = World(0), MemoryStore()
    first = member_context(world, store, 2, attempt=1)
    second = member_context(world, store, 2, attempt=2)
    other = member_context(world, store, 1, attempt=1)
    for round_ in (4, 8):
        world.complete(inner.save(first, round_, {"0/exp_avg": torch.full((2,), float(round_))}))
    [found] = world.complete(inner.load(second, 9))
    assert found is not None
    assert found.round == 8
    assert torch.equal(found.tensors["0/exp_avg"], torch.full((2,), 8.0))
    assert world.complete(inner.load(second, 7)) == [None]
    assert world.complete(inner.load(other, 9)) == [None]
    assert [key for key in store._objects if key.startswith("replicas/")] == [layout.inner_state(Member(2, 1), 8)]


def test_a_run_whose_replicas_agreed_is_verified_from_its_oldest_checkpoint() -> None:
    run = Run(rounds=12, every=2)
    run.go(until=9)
    verdict = run.verdict()
    assert verdict.same
    assert (verdict.committed, verdict.replayed_from) == (9, 4)
    assert verdict.compared >= 5 * (1 + WORLD_SIZE)


@pytest.mark.parametrize("kind", ["header", "beat", "commit"])
def test_a_replica_that_differs_is_named(kind: str) -> None:
    run = Run(rounds=12, every=2)
    run.go(until=9)
    member = Member(1, 1)
    if kind == "header":
        key = layout.header(6, member)
        header = Header.from_json(run.store._objects[key], key)
        run.store._objects[key] = header.model_copy(update={"base_digest": "f" * 64}).to_json()
        named = "rank 1 (attempt 1) before round 6"
    elif kind == "beat":
        beat = Beat(rank=1, attempt=1, counter=1, phase="training", digest="f" * 64, digest_round=7)
        run.store._objects[layout.beat(member)] = beat.to_json()
        named = "rank 1 (attempt 1) after round 7"
    else:
        del run.store._objects[layout.commit(2)]
        named = "round 2 has no commit"
    assert any(difference.startswith(named) for difference in run.verdict().differences), run.verdict().differences


def test_where_there_is_no_run() -> None:
    world = World(0)
    with pytest.raises(ConfigurationError, match="there is no run here"):
        world.complete(verify.verify(MemoryStore(), world))


def test_a_round_counter_of_checkpoints_rotates_over_the_participants() -> None:
    run = Run(rounds=12, every=2)
    run.go(until=9)
    manifests = [run.store._objects[layout.manifest(round_)] for round_ in (2, 4, 6, 8)]
    writers = [Manifest.from_json(data, "manifest").rank for data in manifests]
    assert writers == list(itertools.islice(itertools.cycle((1, 2, 0)), 4))
