"""The manager between torchft and the exchange, in threads on a memory store: what a trainer does, what peers see."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Commit, Evaluation, Header, ReplicaReport
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import Stats
from diloco.exchange.stores import MemoryStore
from diloco.outer import make_diloco_outer_loop
from diloco.progress import Progress
from tests.support.replicas import FAST, all_well, run_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.manager import ObjectStoreManager
    from diloco.outer import OuterLoop

SKIP = ExchangeSettings(**(FAST.model_dump() | {"policy": "skip", "grace": 20.0}))


@pytest.fixture
def uri(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"memory://{request.node.name}"
    yield name
    MemoryStore.forget(name)


def objects(uri: str) -> dict[str, bytes]:
    return MemoryStore(uri)._objects


def leave(step: int, model: nn.Module) -> None:
    """Spoil nothing."""


def constant(step: int) -> float:
    return 1.0


def train(
    manager: ObjectStoreManager,
    rank: int,
    *,
    steps: int = 16,
    fragments: int = 2,
    tokens: int = 10,
    spoil: Callable[[int, nn.Module], None] = leave,
    loss_of: Callable[[int], float] = constant,
    **options: Any,
) -> tuple[str, list[torch.Tensor], OuterLoop]:
    """Train two linear layers towards noise; `spoil(step, model)` runs before each optimizer step."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [model] if fragments == 1 else list(model)
    outer = make_diloco_outer_loop(manager, parts, optimizer, steps=steps, sync_every=4, **options)
    with outer:
        for step in outer.steps():
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=generator)).square().mean().backward()
            outer.report(loss=loss_of(step), tokens=tokens)
            spoil(step, model)
            optimizer.step()
    result = outer.finish()
    return result.digest, [parameter.detach().clone() for parameter in model.parameters()], outer


def test_an_infinite_loss_stops_neither_the_beats_nor_the_run(uri: str) -> None:
    def trainer(manager: ObjectStoreManager, rank: int) -> str:
        digest, _, outer = train(manager, rank, loss_of=lambda step: math.inf if step < 15 else math.nan)
        outer.report_evaluation(math.nan)
        return digest

    assert len(set(all_well(run_replicas(uri, 2, trainer)))) == 1
    beat = Beat.from_json(objects(uri)[layout.beat(Member(0, 1))], "beat")
    assert (beat.phase, beat.loss) == ("finished", None)
    assert Evaluation.from_json(objects(uri)[layout.evaluation(8)], "evaluation").loss is None


def test_nan_on_one_replica_is_left_out_and_forgotten(uri: str) -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 4:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]

    def trainer(manager: ObjectStoreManager, rank: int) -> tuple[str, list[torch.Tensor]]:
        return train(manager, rank, spoil=spoil if rank == 1 else leave)[:2]

    results = all_well(run_replicas(uri, 3, trainer, SKIP))
    assert len({digest for digest, _ in results}) == 1
    assert all(torch.isfinite(tensor).all() for _, tensors in results for tensor in tensors)
    reasons = {key: data for key, data in objects(uri).items() if key.startswith("commits/") and b"NaN" in data}
    assert list(reasons) == [layout.commit(2)]
    # Round 3 is of the other fragment: what it had before the reset is not behind its contribution any more.
    header = Header.from_json(objects(uri)[layout.header(3, Member(1, 1))], "header")
    peer = Header.from_json(objects(uri)[layout.header(3, Member(0, 1))], "header")
    assert (header.weight, peer.weight) == (2 * 10, 4 * 10)


def test_a_flipped_bit_in_the_global_state_is_noticed_and_mended(uri: str) -> None:
    """One replica's backups change behind its back: it is left out, catches up, and ends with the others' bits."""

    def trainer(manager: ObjectStoreManager, rank: int) -> str:
        def spoil(step: int, _: nn.Module) -> None:
            if rank == 2 and step == 9:
                manager._attached().states[0].parameters["0.weight"].view(torch.int32)[0, 0] ^= 1 << 20

        return train(manager, rank, fragments=1, steps=40, spoil=spoil)[0]

    settings = SKIP.model_copy(update={"checkpoint_every": 2, "dead_after": 3.0, "grace": 3.0})
    assert len(set(all_well(run_replicas(uri, 3, trainer, settings)))) == 1
    diverged = [key for key, data in objects(uri).items() if key.startswith("commits/") and b"diverged" in data]
    assert len(diverged) == 1
    last = Commit.from_json(objects(uri)[layout.commit(9)], "commit")
    assert [participant.rank for participant in last.participants] == [0, 1, 2]


def test_a_restart_goes_on_with_the_inner_optimizer_where_it_was(uri: str) -> None:
    moments: dict[int, float] = {}

    def first(manager: ObjectStoreManager, rank: int) -> None:
        def stop(step: int, _: nn.Module) -> None:
            if step == 13:
                raise InterruptedError

        train(manager, rank, steps=24, fragments=1, spoil=stop)

    def second(manager: ObjectStoreManager, rank: int) -> tuple[str, int]:
        steps: list[int] = []

        def note(step: int, _: nn.Module) -> None:
            steps.append(step)
            if step == steps[0]:
                assert manager._model is not None
                moments[rank] = float(manager._model.copy_inner()["0/step"])

        digest, *_ = train(manager, rank, steps=24, fragments=1, spoil=note)
        return digest, steps[0]

    settings = FAST.model_copy(update={"checkpoint_every": 1})
    assert all(isinstance(problem, InterruptedError) for problem in run_replicas(uri, 2, first, settings))
    results = all_well(run_replicas(uri, 2, second, settings))
    assert len({digest for digest, _ in results}) == 1
    # Round 3 had begun when all stopped; the state saved after round 2 had made twelve inner steps.
    assert [start for _, start in results] == [12, 12]
    assert moments == {0: 12.0, 1: 12.0}


def test_a_replica_that_catches_up_to_the_end_does_not_pass_it(uri: str) -> None:
    def trainer(manager: ObjectStoreManager, rank: int) -> int:
        train(manager, rank)
        return manager.progress.step

    assert all_well(run_replicas(uri, 2, trainer)) == [16, 16]
    assert all_well(run_replicas(uri, 2, trainer)) == [16, 16]


def test_beats_tell_the_digest_of_the_last_round_and_reports_that_of_the_end(uri: str) -> None:
    def trainer(manager: ObjectStoreManager, rank: int) -> str:
        return train(manager, rank)[0]

    results = all_well(run_replicas(uri, 2, trainer))
    for rank in range(2):
        report = ReplicaReport.from_json(objects(uri)[layout.result(Member(rank, 1))], "report")
        beat = Beat.from_json(objects(uri)[layout.beat(Member(rank, 1))], "beat")
        assert report.digest == results[rank]
        assert beat.digest_round == 7
        assert beat.digest not in {None, report.digest}


def test_digests_that_come_late_do_not_hide_newer_ones() -> None:
    progress = Progress()
    for round_, digest in [(0, "a"), (2, "c"), (1, "b")]:
        progress.note_applied(round_, digest)
    beat = progress.beat(Member(0, 1), [])
    assert (beat.digest_round, beat.digest) == (2, "c")
    progress.final_digest = "all"
    progress.note_applied(3, "d")
    assert progress.report(Member(0, 1), Stats(), {}).digest == "all"
