"""The summary of a run for people; the document is pinned in test_run.py."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from diloco.report import ReplicaLine, RunReport, data_parallel_bytes, summary


def replica(rank: int, **changes: Any) -> ReplicaLine:
    values: dict[str, Any] = {
        "status": "succeeded",
        "steps": 200,
        "tokens": 204_800,
        "tokens_per_second": 12_345.6,
        "final_train_loss": 2.345,
        "seconds_training": 12_345.6,
        "seconds_waiting": 123.4,
        "bytes_up": 4_000_000,
        "bytes_down": 12_000_000,
        "requests": 12_345,
        "digest": "aa",
    }
    return ReplicaLine(rank=rank, **(values | changes))


def report(**changes: Any) -> RunReport:
    values: dict[str, Any] = {
        "run_id": "20261130-1412-k3f9",
        "status": "succeeded",
        "rendezvous_uri": "s3://diloco/20261130-1412-k3f9",
        "model_uri": "s3://diloco/20261130-1412-k3f9/final/model",
        "replicas": [replica(rank) for rank in range(4)],
        "rounds_committed": 8,
        "rounds_expected": 8,
        "initial_eval_loss": 5.4,
        "final_eval_loss": 2.4,
        "wall_seconds": 65.0,
        "parameters": 100_000,
        "steps": 200,
    }
    return RunReport(**(values | changes))


def drawn(it: RunReport, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(summary(it))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_fits_and_cuts_nothing(width: int) -> None:
    lines = drawn(report(), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert lines[0] == "run            20261130-1412-k3f9  succeeded"
    assert "rounds         8 of 8 committed" in lines
    assert "held-out loss  5.400 -> 2.400 (-3.000)" in lines
    assert "digests        equal on all 4 that finished" in lines
    row = next(line for line in lines if line.startswith("   3 "))
    assert row.split() == (
        ["3", "succeeded", "200", "12.3k", "2.345", "12345.6", "123.4", "3.8", "MiB", "11.4", "MiB", "12345"]
    )


def test_what_data_parallelism_would_move() -> None:
    assert data_parallel_bytes(report()) == 2 * 3 / 4 * 4 * 100_000 * 200
    assert data_parallel_bytes(report(replicas=[replica(0)])) is None
    assert data_parallel_bytes(report(parameters=None)) is None
    text = " ".join(" ".join(drawn(report())).split())
    # Both directions: 240 MB against 16 MB.
    assert "15.3 MiB a replica, up and down; averaging gradients at every step would move 228.9 MiB (15.0 times" in text
    assert not any("traffic" in line for line in drawn(report(resumed=True)))


def test_the_baseline_is_compared_and_in_the_document_only_if_asked_for() -> None:
    assert "baseline_eval_loss" not in report().document()
    compared = report().model_copy(update={"baseline_eval_loss": 2.5})
    assert compared.document()["baseline_eval_loss"] == 2.5
    assert "held-out loss  5.400 -> 2.400 (-3.000); plain data parallelism 2.500 (-4.0%)" in drawn(compared)
    failed = report().model_copy(update={"baseline_eval_loss": None, "error": "the baseline failed: no memory"})
    assert failed.document()["baseline_eval_loss"] is None
    assert "error          the baseline failed: no memory" in drawn(failed)


def test_different_digests_are_shouted() -> None:
    lines = drawn(report(replicas=[replica(0), replica(1, digest="bb"), replica(2, digest=None)]))
    assert "digests        DIFFERENT: the replicas do not hold the same bits" in lines


def test_restarts_are_named_only_if_there_were_any() -> None:
    assert not any(line.startswith("restarts") for line in drawn(report()))
    restarted = report(replicas=[replica(0), replica(1, restarts=2), replica(2, restarts=1)])
    assert "restarts       rank 1: 2, rank 2: 1" in drawn(restarted)
    assert [line["restarts"] for line in restarted.document()["replicas"]] == [0, 2, 1]


def test_a_trainer_without_evaluation_and_a_run_without_replicas() -> None:
    it = report(
        status="failed",
        initial_eval_loss=None,
        final_eval_loss=None,
        model_uri=None,
        replicas=[ReplicaLine(rank=0, status="failed")],
        error="rank 0 ended with exit code 1: [bold]odd[/bold]",
    )
    lines = drawn(it)
    assert not any(line.startswith(("held-out", "model", "traffic", "digests")) for line in lines)
    assert "error   rank 0 ended with exit code 1: [bold]odd[/bold]" in lines
    assert drawn(report(replicas=[]))
