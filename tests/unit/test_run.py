"""Settings, spec.json, and the supervision of real processes that stand in for replicas."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError, RunMismatchError, StoreError
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.executors.base import ReplicaHandle
from diloco.preflight import preflight
from diloco.run import _without_adopted, run_replicas
from diloco.spec import new_run_id, spec_record
from diloco.status import RunStatus
from tests.support.standin_replica import executor, run, settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diloco.executors.base import ReplicaResult


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"replicas": 0}, "--replicas 0 is below 1: use at least 1"),
        ({"max_restarts": -1}, "--max-restarts -1 is below 0: use at least 0"),
        (
            {"sync_every": 30},
            "--sync-every 30 is above --steps 20, so nothing would be exchanged: use --sync-every 20 or less",
        ),
        ({"sync_every": 6}, "--steps 20 is not a multiple of --sync-every 6: use --steps 18 or 24"),
        ({"fragments": 2}, "--sync-every 5 is not a multiple of --fragments 2: use --sync-every 4 or 6"),
        ({"sync_delay": 5}, "--sync-delay 5 is not below sync-every / fragments = 5: use --sync-delay 4 or less"),
        ({"exchange": {"min_replicas": 3}}, "--min-replicas 3 is above --replicas 2: use --min-replicas 2 or less"),
        ({"exchange": {"grace": -1}}, "--grace -1: input should be greater than or equal to 0"),
        (
            {"run_id": "My_run"},
            "--run-id 'My_run': use 1 to 40 lower-case letters, digits and hyphens, no hyphen first or last",
        ),
        (
            {"trainer_kwargs": {"steps": 3}},
            "trainer argument 'steps' is reserved: use --steps, not --trainer-kwargs-json",
        ),
        ({"steps": "many"}, "--steps 'many': input should be a valid integer"),
    ],
)
def test_one_line_names_the_problem_and_the_fix(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(line)) as caught:
        settings(tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"3 problems: \(1\) --steps .*; \(2\) --sync-every .*; \(3\) --run-id"
    ):
        settings(tmp_path, steps=21, fragments=2, run_id="-")


def test_fresh_run_ids_are_valid() -> None:
    fresh = new_run_id()
    assert layout.RUN_ID.fullmatch(fresh)
    assert re.fullmatch(r"\d{8}-\d{4}-[a-z2-9]{4}", fresh)


def test_replicas_get_the_schedule_and_the_output(tmp_path: Path) -> None:
    [first, second] = settings(tmp_path, output="s3://models/", seed=3, fragments=5).replica_specs("the nonce")
    assert (first.rank, second.rank, second.world_size) == (0, 1, 2)
    assert second.rendezvous_uri == f"{tmp_path.as_uri()}/run"
    assert second.trainer_kwargs == {
        "steps": 20,
        "sync_every": 5,
        "fragments": 5,
        "sync_delay": 0,
        "seed": 3,
        "behave": [],
    }
    assert second.exchange["output_uri"] == "s3://models/run"
    assert second.env == {"DILOCO_LAUNCHER": "the nonce"}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"steps": 25}, ("--steps", 20, 25)),
        ({"exchange": {"codec": "bf16"}}, ("--codec", "fp32", "bf16")),
        ({"trainer_kwargs": {"behave": [], "model": "small"}}, ("--model", None, "small")),
        ({"trainer_kwargs": {"behave": [], "depth": 2}}, ("trainer argument depth", None, 2)),
        ({"exchange": {"timeout": 3}, "output": "s3://elsewhere"}, None),
    ],
)
def test_what_may_change_on_resume(tmp_path: Path, changes: dict[str, Any], difference: object) -> None:
    before, now = spec_record(settings(tmp_path)), spec_record(settings(tmp_path, **changes))
    assert now.first_difference(before) == difference


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("json", True),
        ("json.decoder", True),
        ("here", True),
        ("folder.inner.trainer", True),  # no __init__.py
        ("folder.inner.no", False),
        ("json.no", False),
        ("nowhere", False),
        ("here.sub", False),
    ],
)
def test_a_trainer_is_looked_for_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, known: bool
) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("here.py", "folder/inner/trainer.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    checked = settings(tmp_path, trainer_module=module)
    if known:
        preflight(checked)
    else:
        with pytest.raises(ConfigurationError, match=f"--trainer-module {module}: no module"):
            preflight(checked)


def test_a_run_is_reported_from_the_bucket(tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    report = run(tmp_path, "ok", "late", on_status=seen.append)
    assert report.document() == {
        "run_id": "run",
        "status": "succeeded",
        "rendezvous_uri": f"{tmp_path.as_uri()}/run",
        "model_uri": None,
        "replicas": [
            {
                "rank": rank,
                "status": "succeeded",
                "steps": 20,
                "tokens": 2000,
                "tokens_per_second": 1000.0,
                "final_train_loss": 3.1,
                "seconds_training": 2.0,
                "seconds_waiting": 0.5,
                "bytes_up": 1000,
                "bytes_down": 3000,
                "requests": 40,
                "digest": "d",
                "restarts": 0,
                "error": None,
            }
            for rank in range(2)
        ],
        "rounds_committed": 4,
        "rounds_expected": 4,
        "initial_eval_loss": 5.0,
        "final_eval_loss": 3.0,
        "wall_seconds": report.wall_seconds,
        "error": None,
    }
    assert report.parameters == 1001
    last = seen[-1]
    assert [(replica.status, replica.beat.step if replica.beat else None) for replica in last.replicas] == [
        ("succeeded", 5)
    ] * 2


def test_a_finished_run_is_reported_at_once(tmp_path: Path) -> None:
    first = run(tmp_path, "ok", "ok")
    logs = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    again = run(tmp_path, "ok", "ok")
    assert again.document() | {"wall_seconds": 0} == first.document() | {"wall_seconds": 0}
    assert {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()} == logs
    assert not (tmp_path / "run" / layout.claim(layout.Member(0, 2))).exists()


def test_another_spec_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run(tmp_path, "ok", "ok")
    with pytest.raises(RunMismatchError, match=r"run run was started with --seed 0, not 1: repeat .* another --run-id"):
        run(tmp_path, "ok", "ok", seed=1)


def test_an_output_that_can_not_be_written_is_found_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        run(tmp_path, "ok", "ok", output=(tmp_path / "file").as_uri())
    assert not (tmp_path / "run" / layout.SPEC).exists()
    assert not (tmp_path / "logs").exists()


def test_strict_stops_all_when_one_dies(tmp_path: Path) -> None:
    report = run(tmp_path, "hang", "refuse", "stubborn")
    assert report.status == "failed"
    assert report.error == "rank 1 ended with exit code 78: it does not want to"
    assert [line.status for line in report.replicas] == ["cancelled", "failed", "cancelled"]


def test_a_replica_that_died_is_reported_by_its_last_beat(tmp_path: Path) -> None:
    report = run(tmp_path, "crash", "hang")
    assert report.error == "rank 0 ended with exit code 137: killed by SIGKILL"
    dead = report.replicas[0]
    assert (dead.status, dead.steps, dead.tokens, dead.final_train_loss, dead.digest) == ("failed", 5, 500, 4.0, None)


def test_skip_goes_on_while_enough_are_left(tmp_path: Path) -> None:
    exchange = {"policy": "skip", "min_replicas": 1}
    report = run(tmp_path, "ok", "crash", exchange=exchange)
    assert (report.status, report.error) == ("succeeded", None)
    assert [line.status for line in report.replicas] == ["succeeded", "failed"]


def test_skip_ends_when_too_few_are_left(tmp_path: Path) -> None:
    report = run(tmp_path, "hang", "crash", "crash", exchange={"policy": "skip", "min_replicas": 2})
    assert report.error == (
        "rank 1 ended with exit code 137: killed by SIGKILL; rank 2 ended with exit code 137: killed by SIGKILL"
        " (left: 1, --min-replicas 2)"
    )


def test_exit_code_zero_is_no_result(tmp_path: Path) -> None:
    report = run(tmp_path, "no-result", "no-result")
    assert (report.status, report.error) == ("failed", "the replicas ended without a result")
    assert [line.status for line in report.replicas] == ["succeeded", "succeeded"]


def test_a_replica_is_not_shown_as_failed_before_it_is_decided_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, seen = executor(tmp_path), list[RunStatus]()
    collect = launcher.collect

    def slowly(handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        time.sleep(0.5)  # meanwhile the status is shown several times
        return collect(handles, timeout=timeout)

    monkeypatch.setattr(launcher, "collect", slowly)
    report = run(tmp_path, "patient", "crash,late", max_restarts=1, it=launcher, on_status=seen.append)
    assert report.replicas[1].restarts == 1
    told = {(replica.supervision, replica.note) for status in seen for replica in status.replicas if replica.exit_code}
    assert told == {("restarting", "restart 1 of 1 in 0 s: exit code 137: killed by SIGKILL")}


def test_beats_of_an_earlier_launch_are_not_shown(tmp_path: Path) -> None:
    run(tmp_path, "crash", "hang")
    seen: list[RunStatus] = []
    report = run(tmp_path, "crash", "hang", on_status=seen.append)
    # Rank 1 of the first launch may have been stopped before it claimed its place.
    assert {beat.attempt for status in seen for beat in status.beats if beat.rank == 0} == {2}
    assert report.replicas[0].steps == 5


def test_cancelling_the_run_stops_its_replicas(tmp_path: Path) -> None:
    async def interrupted() -> float:
        up = asyncio.Event()

        def shown(status: RunStatus) -> None:
            if len(status.beats) == 2:
                up.set()

        task = asyncio.create_task(run_replicas(launcher, settings(tmp_path, "hang", "stubborn"), on_status=shown))
        await asyncio.wait_for(up.wait(), 30)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - started

    launcher = executor(tmp_path)
    assert asyncio.run(interrupted()) < 5
    assert all(process.guard.poll() is not None for process in launcher._processes.values())


def test_an_adopted_rank_goes_on_as_its_newest_member() -> None:
    earlier = frozenset({Member(0, 1), Member(0, 2), Member(1, 1), Member(2, 1)})
    handles = {
        rank: ReplicaHandle(rank, "sagemaker", f"job-{rank}", adopted=adopted)
        for rank, adopted in ((0, True), (1, False), (3, True))
    }

    assert _without_adopted(earlier, handles) == {Member(0, 1), Member(1, 1), Member(2, 1)}
