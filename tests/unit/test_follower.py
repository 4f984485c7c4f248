"""A replica that is behind comes to be with the others again: real managers in threads on a memory store."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from diloco.exchange import layout, rounds
from diloco.exchange.layout import Member
from diloco.exchange.records import Commit, Header
from diloco.exchange.stores import MemoryStore
from diloco.manager import ObjectStoreManager
from diloco.outer import make_diloco_outer_loop
from tests.support.replicas import FAST, all_well, run_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

H, ROUNDS = 400, 6
BOUND = 60.0
STRICT = FAST.model_copy(update={"beat_every": 0.02})
SKIP = STRICT.model_copy(update={"policy": "skip", "grace": 20.0, "min_replicas": 2, "join_timeout": 0.0})


@pytest.fixture
def uri(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"memory://{request.node.name}"
    yield name
    MemoryStore.forget(name)


def objects(uri: str) -> dict[str, bytes]:
    return MemoryStore(uri)._objects


def until_there(uri: str, key: str) -> None:
    ends = time.monotonic() + BOUND
    while key not in objects(uri):
        assert time.monotonic() < ends, f"{key} never came"
        time.sleep(0.005)


def train(manager: ObjectStoreManager, before_step: Callable[[int], None]) -> tuple[str, list[int]]:
    """The result's digest and the inner steps that were made."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = make_diloco_outer_loop(manager, [model], optimizer, steps=H * ROUNDS, sync_every=H)
    made = []
    with outer:
        for step in outer.steps():
            before_step(step)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            outer.report(tokens=1)
            optimizer.step()
            made.append(step)
    return outer.finish().digest, made


def restarted(uri: str, manager: ObjectStoreManager, rank: int, before_step: Callable[[int], None]) -> list[int]:
    """Train until round 1 has begun, die, and train as the next attempt: the inner steps of that one."""

    def dies(step: int) -> None:
        if step == H + 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(manager, dies)
    again = ObjectStoreManager(
        uri, rank=rank, world_size=manager.presence.world_size, settings=manager.presence.settings
    )
    digest, made = train(again, before_step)
    again.close()
    assert digest
    return made


def test_who_restarts_contributes_what_it_has_when_the_others_wait(uri: str) -> None:
    def slowly(step: int) -> None:
        if step == H + 1:
            until_there(uri, layout.header(1, Member(0, 1)))
        if step < 2 * H - 1:
            time.sleep(0.02)

    def waits(step: int) -> None:
        if step == 2 * H:
            until_there(uri, layout.header(2, Member(1, 2)))

    def trainer(manager: ObjectStoreManager, rank: int) -> list[int]:
        return train(manager, waits)[1] if rank == 0 else restarted(uri, manager, rank, slowly)

    made = all_well(run_replicas(uri, 2, trainer, STRICT))[1]
    first = [step for step in made if step < 2 * H]
    assert first[0] == H
    assert first[-1] == 2 * H - 1
    assert len(first) < H
    header = Header.from_json(objects(uri)[layout.header(1, Member(1, 2))], "header")
    assert (header.kind, header.weight) == ("contribution", len(first))
    # From then on it is with the others: whole rounds.
    assert [step for step in made if step >= 2 * H] == list(range(2 * H, ROUNDS * H))


def test_who_misses_a_round_begins_the_next_one_with_the_others(uri: str) -> None:
    """Rank 2 joins in round 2 and stays in its first inner step until round 3 is over; nobody waits for it."""
    late, joined = Member(2, 1), threading.Event()

    def slowly(step: int) -> None:
        if not joined.is_set():
            joined.set()
            until_there(uri, layout.commit(3))
        if step < 4 * H:
            time.sleep(0.02)

    def waits(step: int) -> None:
        if step == 2 * H:
            assert joined.wait(BOUND)
        if step == 4 * H:
            until_there(uri, layout.header(4, late))

    def trainer(manager: ObjectStoreManager, rank: int) -> list[int]:
        if rank == late.rank:
            until_there(uri, layout.commit(1))
        return train(manager, slowly if rank == late.rank else waits)[1]

    made = all_well(run_replicas(uri, 3, trainer, SKIP))[2]
    assert made[0] == 2 * H
    assert not [step for step in made if 3 * H <= step < 4 * H]
    assert [step for step in made if step >= 4 * H] == list(range(4 * H, ROUNDS * H))
    commits = [Commit.from_json(objects(uri)[layout.commit(round_)], "commit") for round_ in range(5)]
    assert [[p.rank for p in commit.participants] for commit in commits] == [[0, 1]] * 4 + [[0, 1, 2]]
    assert not [out for commit in commits for out in commit.left_out if out.reason == rounds.CAUGHT_UP]


def test_at_the_beginning_nobody_looks(uri: str) -> None:
    def trainer(manager: ObjectStoreManager, rank: int) -> list[int]:
        def slowly(step: int) -> None:
            if rank == 1 and step == 1:
                until_there(uri, layout.header(0, Member(0, 1)))

        return train(manager, slowly)[1]

    assert all_well(run_replicas(uri, 2, trainer, STRICT)) == [list(range(ROUNDS * H))] * 2
