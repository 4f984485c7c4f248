"""What follows from the end of a replica's process: the policy as tables, then real processes that stand in for
replicas, and launchers that follow or replace one another. Time and chance of the tables are given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError, DilocoError, ExitCode
from diloco.exchange import layout
from diloco.exchange.records import Claim, LauncherBeat, LauncherRecord
from diloco.executors.local import LocalProcessExecutor
from diloco.report import read_report
from diloco.run import run_replicas
from diloco.supervisor import Action, Backoff, Supervisor
from tests.support import standin_replica
from tests.support.standin_replica import executor, quick, run, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from diloco.executors.base import ReplicaHandle, ReplicaResult, ReplicaSpec
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.status import RunStatus

SKIP: dict[str, Any] = {"policy": "skip", "min_replicas": 1}


class NoChance(random.Random):
    def random(self) -> float:
        return 0.0


def supervisor(ranks: int = 2, **changes: Any) -> Supervisor:
    values: dict[str, Any] = {
        "ranks": range(ranks),
        "policy": "strict",
        "min_replicas": ranks,
        "max_restarts": 3,
        "chance": NoChance(),
    }
    return Supervisor(**(values | changes))


@pytest.mark.parametrize(
    ("code", "action", "text"),
    [
        (0, "done", "finished"),
        (1, "relaunch", "restart 1 of 3 in 1 s: exit code 1: why"),
        (ExitCode.LOST_RENDEZVOUS, "relaunch", "restart 1 of 3 in 1 s: exit code 69: why"),
        (ExitCode.INTERRUPTED, "relaunch", "restart 1 of 3 in 1 s: exit code 143: why"),
        (137, "relaunch", "restart 1 of 3 in 1 s: exit code 137: why"),
        (-9, "relaunch", "restart 1 of 3 in 1 s: exit code -9: why"),
        (3, "relaunch", "restart 1 of 3 in 1 s: exit code 3: why"),
        (None, "relaunch", "restart 1 of 3 in 1 s: it ended: why"),
        (ExitCode.FENCED, "fenced", "fenced: why"),
        (ExitCode.BAD_CONFIGURATION, "fail", "rank 1 ended with exit code 78: why"),
        (ExitCode.USAGE, "fail", "rank 1 ended with exit code 2: why"),
    ],
)
@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_what_an_exit_code_leads_to(policy: str, code: int | None, action: Action, text: str) -> None:
    it = supervisor(policy=policy, min_replicas=1)
    decision = it.decide(1, code, "why", now=100.0)
    assert (decision.action, decision.text) == (action, text)
    assert decision.at == (101.0 if action == "relaunch" else None)
    assert it.failure() == (text if action == "fail" else None)
    assert it.due(1e9) == ([1] if action == "relaunch" else [])


@pytest.mark.parametrize(
    ("restart", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 30.0), (7, 30.0), (5000, 30.0)]
)
def test_the_backoff_doubles_up_to_its_most(restart: int, seconds: float) -> None:
    assert Backoff().seconds(restart, NoChance()) == seconds
    drawn = {Backoff().seconds(restart, random.Random(seed)) for seed in range(50)}
    assert len(drawn) == 50
    assert 0.75 * seconds <= min(drawn) < 0.8 * seconds
    assert 0.95 * seconds < max(drawn) <= seconds


def test_a_rank_is_relaunched_later_each_time_and_then_given_up() -> None:
    it = supervisor()
    now, waits = 0.0, []
    for restart in (1, 2, 3):
        at = it.decide(1, 137, "killed", now).at
        assert at is not None
        assert it.due(at - 0.001) == []
        assert it.due(at) == [1]
        assert it.state(1) == "waiting"
        assert it.restarts(1) == restart - 1
        it.relaunched(1, at)
        assert it.due(at) == []
        assert it.state(1) == "running"
        waits.append(at - now)
        now = at + 29
    assert waits == [1.0, 2.0, 4.0]
    last = it.decide(1, 137, "killed", now)
    assert (last.action, last.text) == ("fail", "rank 1 ended with exit code 137: killed (restarted 3 times)")
    assert it.due(1e9) == []


def test_one_that_lived_well_is_restarted_at_once_and_then_the_back_off_begins_anew() -> None:
    it = supervisor(max_restarts=9)
    it.launched(0.0)
    now, waits = 0.0, []
    for lived in (29.0, 5.0, 30.0, 5.0, 5.0, 3600.0):
        now += lived
        at = it.decide(1, 137, "killed", now).at
        assert at is not None
        it.relaunched(1, at)
        waits.append(at - now)
        now = at
    assert waits == [1.0, 2.0, 0.0, 1.0, 2.0, 0.0]
    out = supervisor(max_restarts=0)
    out.launched(0.0)
    assert out.decide(1, 137, "killed", 3600.0).action == "fail", "it may not be restarted all the same"


def test_restarts_are_counted_for_each_rank_alone() -> None:
    it = supervisor(max_restarts=1)
    for rank in (0, 1):
        assert it.decide(rank, 1, "died", 0.0).action == "relaunch"
    assert it.due(1.0) == [0, 1]
    it.relaunched(0, 5.0)
    assert it.due(1.0) == [1]


def test_strict_fails_with_the_first_rank_that_is_given_up() -> None:
    it = supervisor(3, max_restarts=0, min_replicas=1)
    assert it.decide(2, 1, "died", 0.0).text == "rank 2 ended with exit code 1: died"
    assert it.failure() == "rank 2 ended with exit code 1: died"


def test_skip_goes_on_while_enough_can_take_part() -> None:
    it = supervisor(4, policy="skip", min_replicas=2, max_restarts=1)
    assert it.decide(0, 1, "died", 0.0).action == "relaunch"
    it.relaunched(0, 5.0)
    first = it.decide(0, 69, "no store", 5.0)
    assert (first.action, first.text) == ("out", "given up after 1 restart: exit code 69: no store")
    assert it.decide(1, 76, "newer", 5.0).action == "fenced"  # its newer attempt takes part
    assert it.decide(2, 1, "died", 5.0).action == "relaunch"  # and one that waits for its restart will
    it.relaunched(2, 5.0)
    assert it.decide(2, 1, "died again", 9.0).action == "out"
    it.decide(3, 1, "died", 9.0)
    it.relaunched(3, 5.0)
    assert it.failure() is None
    last = it.decide(3, 137, "killed", 12.0)
    assert last.action == "fail"
    assert last.text == (
        "rank 0 ended with exit code 69: no store (restarted 1 time);"
        " rank 2 ended with exit code 1: died again (restarted 1 time);"
        " rank 3 ended with exit code 137: killed (restarted 1 time) (left: 1, --min-replicas 2)"
    )


def test_a_done_rank_still_counts() -> None:
    it = supervisor(**SKIP, max_restarts=0)
    it.decide(0, 0, None, 0.0)
    assert it.decide(1, 1, "died", 0.0).action == "out"
    assert it.failure() is None


def test_a_bad_configuration_is_the_reason_whatever_else_died() -> None:
    it = supervisor(3, max_restarts=0)
    it.decide(0, 1, "died", 0.0)
    it.decide(1, 78, "no such model", 0.0)
    it.decide(2, 78, "no such data", 0.0)
    assert it.failure() == "rank 1 ended with exit code 78: no such model"


def test_idle_once_nothing_runs_or_will() -> None:
    it = supervisor(4, **SKIP, max_restarts=1)
    it.decide(0, 0, None, 0.0)
    it.decide(1, 76, "replaced by attempt 2", 0.0)
    it.decide(2, 1, "died", 0.0)
    it.relaunched(2, 5.0)
    it.decide(2, 1, "died", 0.0)
    assert not it.idle, "rank 3 runs"
    it.decide(3, 1, "died", 0.0)
    assert not it.idle, "rank 3 will run"
    it.relaunched(3, 5.0)
    it.decide(3, 0, None, 0.0)
    assert it.idle
    assert it.failure() is None
    assert it.explain() == (
        "rank 1 was fenced: replaced by attempt 2; rank 2 ended with exit code 1: died (restarted 1 time)"
    )


def test_nothing_to_explain_when_all_are_done() -> None:
    it = supervisor()
    it.decide(0, 0, None, 0.0)
    it.decide(1, 0, None, 0.0)
    assert (it.idle, it.explain()) == (True, None)


def claims(folder: Path, rank: int) -> list[Claim]:
    paths = sorted((folder / "run" / layout.claims(rank)).glob("*.json"))
    return [Claim.from_json(path.read_bytes(), str(path)) for path in paths]


def launcher(folder: Path, number: int) -> LauncherRecord:
    key = layout.launcher(number)
    return LauncherRecord.from_json((folder / "run" / key).read_bytes(), key)


def launcher_beat(folder: Path, number: int) -> LauncherBeat:
    key = layout.launcher_beat(number)
    return LauncherBeat.from_json((folder / "run" / key).read_bytes(), key)


def notes(seen: list[RunStatus], rank: int) -> list[str]:
    """What was said of a rank, each once."""
    return list(dict.fromkeys(it.note for status in seen for it in status.replicas if it.rank == rank and it.note))


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_a_killed_replica_is_relaunched_and_the_run_succeeds(tmp_path: Path, policy: str) -> None:
    seen: list[RunStatus] = []
    killed: list[int] = []

    def kill(status: RunStatus) -> None:
        seen.append(status)
        if not killed and len(status.beats) == 2:
            [claim] = claims(tmp_path, 1)
            killed.append(claim.pid)
            os.kill(claim.pid, signal.SIGKILL)

    exchange = {"policy": policy} | ({"min_replicas": 2} if policy == "skip" else {})
    report = run(tmp_path, "patient", "hang,late", on_status=kill, max_restarts=3, exchange=exchange)
    assert (report.status, report.error) == ("succeeded", None)
    assert [(line.status, line.restarts, line.digest) for line in report.replicas] == [
        ("succeeded", 0, "d"),
        ("succeeded", 1, "d"),
    ]
    assert report.document()["replicas"][1]["restarts"] == 1
    assert notes(seen, 1) == ["restart 1 of 3 in 0 s: exit code 137: killed by SIGKILL"]
    assert {status.replicas[1].phase for status in seen} >= {"training", "restarting", "starting", "finished"}
    assert notes(seen, 0) == []
    again = [status.replicas[1] for status in seen if status.replicas[1].restarts]
    assert {it.beat.attempt for it in again if it.beat} == {2}, "the beat of the process that died is not the new one's"
    mine = launcher(tmp_path, 1).nonce
    assert [(claim.attempt, claim.launcher) for claim in claims(tmp_path, 1)] == [(1, mine), (2, mine)]


def test_restarts_are_counted_and_come_later_each_time(tmp_path: Path) -> None:
    pace = quick(restarts=Backoff(0.1, 10.0))
    started = time.monotonic()
    report = run(tmp_path, "hang", "exit 69", max_restarts=2, pace=pace)
    assert time.monotonic() - started >= 0.75 * (0.1 + 0.2)
    assert report.error == "rank 1 ended with exit code 69: it ends in attempt 3 (restarted 2 times)"
    assert [(line.status, line.restarts) for line in report.replicas] == [("cancelled", 0), ("failed", 2)]
    assert len(claims(tmp_path, 1)) == 3


@pytest.mark.parametrize("exchange", [{}, {"policy": "skip", "min_replicas": 1}])
def test_a_bad_configuration_is_not_retried(tmp_path: Path, exchange: dict[str, Any]) -> None:
    seen: list[RunStatus] = []
    report = run(tmp_path, "hang", "hang", "refuse", on_status=seen.append, max_restarts=3, exchange=exchange)
    assert report.error == "rank 2 ended with exit code 78: it does not want to"
    assert [(line.status, line.restarts) for line in report.replicas] == [
        ("cancelled", 0),
        ("cancelled", 0),
        ("failed", 0),
    ]
    assert notes(seen, 2) == []


def test_skip_names_all_that_are_out_of_restarts(tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    exchange = {"policy": "skip", "min_replicas": 2}
    report = run(tmp_path, "hang", "crash", "crash", on_status=seen.append, max_restarts=1, exchange=exchange)
    assert report.error == (
        "rank 1 ended with exit code 137: killed by SIGKILL (restarted 1 time);"
        " rank 2 ended with exit code 137: killed by SIGKILL (restarted 1 time) (left: 1, --min-replicas 2)"
    )
    given_up = "given up after 1 restart: exit code 137: killed by SIGKILL"
    assert (given_up in notes(seen, 1)) != (given_up in notes(seen, 2)), "the second one ends the run"


def test_a_fenced_replica_is_not_relaunched(tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    report = run(tmp_path, "patient", "fenced", on_status=seen.append, max_restarts=3)
    assert report.status == "succeeded", "its newer attempt takes part"
    assert report.replicas[1].restarts == 0
    assert notes(seen, 1) == ["fenced: replaced by attempt 2 (process 1 on here), not started by this launcher"]
    assert seen[-1].replicas[1].phase == "fenced"
    assert [claim.launcher for claim in claims(tmp_path, 1)] == [launcher(tmp_path, 1).nonce, "another"]


def test_a_run_whose_replicas_were_all_fenced_says_so(tmp_path: Path) -> None:
    report = run(tmp_path, "fenced", max_restarts=3)
    assert (report.status, report.error) == (
        "failed",
        "rank 0 was fenced: replaced by attempt 2 (process 1 on here), not started by this launcher",
    )


def test_nothing_is_relaunched_once_the_result_is_there(tmp_path: Path) -> None:
    pace = quick(restarts=Backoff(3600.0, 3600.0))
    report = run(tmp_path, "ok", "crash", max_restarts=3, pace=pace)
    assert report.status == "succeeded"
    assert [(line.status, line.restarts) for line in report.replicas] == [("succeeded", 0), ("failed", 0)]
    assert len(claims(tmp_path, 1)) == 1


class Preempted(LocalProcessExecutor):
    """Counts a preemption for each process, and can't start any after the first launch."""

    starts = 0
    most = 100

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
        self.starts += 1
        if self.starts > self.most:
            raise DilocoError("no capacity")
        return super().launch_replicas(specs)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        return [replace(it, metrics={"preemptions": 1}) for it in super().collect(handles, timeout=timeout)]


def test_a_restart_that_can_not_be_started_is_a_restart(tmp_path: Path) -> None:
    it = Preempted(log_dir=tmp_path / "logs", command=[sys.executable, standin_replica.__file__], grace=0.5)
    it.most = 2
    report = run(tmp_path, "hang", "crash", it=it, max_restarts=2)
    assert report.error == "rank 1 ended with exit code 1: no capacity (restarted 2 times)"
    assert it.starts == 3
    assert report.replicas[1].restarts == 2


def test_the_metrics_of_a_rank_count_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome: dict[int, ReplicaResult] = {}

    async def read(*_: object, **given: Any) -> RunReport:
        outcome.update(given["outcome"])
        return await read_report(*_, **given)  # type: ignore[arg-type]

    monkeypatch.setattr("diloco.run.read_report", read)
    it = Preempted(log_dir=tmp_path / "logs", command=[sys.executable, standin_replica.__file__], grace=0.5)
    run(tmp_path, "patient", "crash,late", it=it, max_restarts=1)
    assert {rank: result.metrics for rank, result in outcome.items()} == {
        0: {"preemptions": 1, "restarts": 0},
        1: {"preemptions": 2, "restarts": 1},
    }


def test_the_launcher_says_when_it_has_ended(tmp_path: Path) -> None:
    run(tmp_path, "hang", "crash")
    assert launcher_beat(tmp_path, 1).ended
    assert (launcher(tmp_path, 1).pid, launcher(tmp_path, 1).number) == (os.getpid(), 1)
    said: list[str] = []
    report = run(tmp_path, "hang", "crash", on_note=said.append)
    assert report.status == "failed"
    assert said[1:] == [], "the next one did not wait"
    assert launcher_beat(tmp_path, 2).ended


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, takeover: bool = False, pace: Pace | None = None, **changes: Any
) -> AsyncIterator[asyncio.Task[RunReport]]:
    """A launch of two replicas that have begun and would never end."""
    up = asyncio.Event()

    def shown(status: RunStatus) -> None:
        if len(status.beats) == 2:
            up.set()

    launch = run_replicas(
        executor(folder),
        settings(folder, "hang", "hang", **changes),
        takeover=takeover,
        on_status=shown,
        pace=pace or quick(),
    )
    task = asyncio.create_task(launch)
    try:
        await asyncio.wait_for(up.wait(), 30)
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_a_second_launcher_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as first:
            second = run_replicas(executor(tmp_path), settings(tmp_path, "hang", "hang"), pace=quick(dead_after=60.0))
            with pytest.raises(ConfigurationError, match=rf"launcher 1 \(process {os.getpid()} on .*--takeover"):
                await second
            assert not first.done()
            assert not (tmp_path / "run" / layout.launcher(2)).exists()
        assert launcher_beat(tmp_path, 1).ended, "an interrupted launcher has ended too"

    asyncio.run(scenario())


def test_a_takeover_ends_the_older_launcher_and_its_replicas(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_restarts=3) as first, running(tmp_path, takeover=True) as second:
            report = await asyncio.wait_for(first, 30)
            assert report.status == "failed"
            assert report.error == (
                f"launcher 2 (process {os.getpid()} on {socket.gethostname()}) took this run over:"
                " this launcher stopped its own replicas"
            )
            assert not second.done()
            by_attempt = {claim.attempt: claim.launcher for claim in claims(tmp_path, 0)}
            assert by_attempt == {1: launcher(tmp_path, 1).nonce, 2: launcher(tmp_path, 2).nonce}
            assert launcher_beat(tmp_path, 1).ended
            assert not launcher_beat(tmp_path, 2).ended

    asyncio.run(scenario())


def test_an_older_launcher_relaunches_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        blind = quick(beats=3600.0)  # between its beats it does not look for a successor
        async with running(tmp_path, max_restarts=3, pace=blind) as first:
            async with running(tmp_path, takeover=True):
                os.kill(claims(tmp_path, 1)[0].pid, signal.SIGKILL)
                report = await asyncio.wait_for(first, 30)
                assert report.error is not None
                assert "took this run over" in report.error
            assert [claim.attempt for claim in claims(tmp_path, 1)] == [1, 2]

    asyncio.run(scenario())
