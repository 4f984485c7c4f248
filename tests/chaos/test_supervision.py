"""`scripts/launch.py run` as a supervisor: real launchers, real entrypoints, replicas that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ExitCode
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Claim
from tests.chaos.harness import PATIENCE, Run, header, held, killed, payload
from tests.integration.test_launch import ROOT, Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    NewRun = Callable[..., Run]

ROUNDS = 5


class Supervised:
    """One run, supervised from a folder of its own, on the S3 that the other tests use."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.launchers: list[Launcher] = []

    def launch(self, *arguments: str, **trainer: Any) -> subprocess.Popen[str]:
        """Start a launcher, as on a machine that has nothing of the others' files. Its stderr is mixed into stdout."""
        folder = self.folder / f"launcher-{len(self.launchers)}"
        folder.mkdir()
        launcher = Launcher(folder)
        self.launchers.append(launcher)
        launcher.env |= {name: value for name, value in self.run.s3.env.items() if value is not None}
        launcher.env["PYTHONPATH"] = str(ROOT)
        process = launcher.start(
            *("--rendezvous", self.run.s3.uri, "--run-id", self.run.run_id),
            *("--replicas", "2", "--steps", str(2 * ROUNDS), "--sync-every", "2", "--checkpoint-every", "2"),
            *("--trainer-module", "tests.support.chaos_replica", "--trainer-fn", "train"),
            *("--trainer-kwargs-json", json.dumps(trainer)),
            *arguments,
        )
        self.run.launchers.append(process)
        return process

    def wait_until_gone(self) -> None:
        for launcher in self.launchers:
            launcher.wait_until_gone()


@pytest.fixture
def supervised(new_run: NewRun, tmp_path: Path) -> Iterator[Supervised]:
    run = new_run(replicas=2, rounds=ROUNDS, exchange={"policy": "strict"})
    supervised = Supervised(run, tmp_path)
    yield supervised
    for launcher in supervised.launchers:
        for process in launcher.processes():
            os.kill(process, signal.SIGKILL)
    for running in run.launchers:
        if running.stdout is not None and not running.stdout.closed:
            sys.stderr.write(running.communicate()[0])


def ended(launcher: subprocess.Popen[str], code: int) -> str:
    said, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code, said
    return said


def test_a_killed_replica_is_relaunched_and_a_fenced_one_is_not(supervised: Supervised) -> None:
    """Rank 1 dies in round 1. Its second attempt, the launcher's, is fenced by a third that the launcher knows nothing
    of, and which takes its place to the end."""
    run = supervised.run
    launcher = supervised.launch(
        "--json",
        points=[{"rank": 1} | killed("before", "create", header(1, 1))],
        acts=[{"rank": 0} | held(3, header(3, 1, attempt=3))],
    )
    run.wait_for(header(2, 1, attempt=2))
    third = run.start(1)
    said = ended(launcher, 0)
    assert third.end() == 0
    run.check(reported={0: 1, 1: 3})
    assert not run.keys(layout.claim(Member(1, 4)))
    assert run.error(1, attempt=2).exit_code == ExitCode.FENCED
    document = json.loads(said[said.index("{") :])
    assert document["status"] == "succeeded"
    assert [replica["restarts"] for replica in document["replicas"]] == [0, 1]
    verified = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "launch.py"), "verify", run.uri],
        env=supervised.launchers[0].env,
        text=True,
        capture_output=True,
        check=True,
    )
    assert "all replicas held the same bits" in verified.stdout
    supervised.wait_until_gone()


def test_a_run_fails_with_a_reason_when_fewer_than_min_replicas_are_left(supervised: Supervised) -> None:
    launcher = supervised.launch(
        *("--policy", "skip", "--min-replicas", "2", "--max-restarts", "0"),
        points=[{"rank": 1} | killed("before", "create", payload(1, 1))],
    )
    said = " ".join(ended(launcher, 1).split())
    assert "rank 1 ended with exit code 137: killed by SIGKILL (left: 1, --min-replicas 2)" in said
    assert "Traceback" not in said
    supervised.wait_until_gone()


def test_one_launcher_a_run_which_the_next_takes_over_and_a_finished_run_is_only_reported(
    supervised: Supervised,
) -> None:
    run = supervised.run
    trainer = {"acts": [{"rank": rank} | held(2, "never") for rank in (0, 1)]}
    first = supervised.launch(**trainer)
    run.commit(1)
    second = supervised.launch(**trainer)
    said = " ".join(ended(second, 2).split())
    assert f"launcher 1 (process {first.pid} on " in said
    assert "supervises this run: wait for it, stop it, or take the run over with --takeover" in said
    other = supervised.launch("--codec", "bf16", **trainer)
    assert "was started with --codec fp32, not bf16" in " ".join(ended(other, 2).split())
    first.kill()
    first.communicate()
    supervised.wait_until_gone()  # the replicas of a killed launcher end with it
    ended(supervised.launch("--takeover", **trainer), 0)
    run.check(reported={0: 2, 1: 2})
    again = supervised.launch("--json", **trainer)
    said = ended(again, 0)
    assert json.loads(said[said.index("{") :])["status"] == "succeeded"
    claims = [Claim.from_json(run.wait_for(key), key) for key in run.keys(layout.MEMBERS)]
    assert sorted((claim.rank, claim.attempt) for claim in claims) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert len(run.keys(layout.LAUNCHERS)) == 2
    supervised.wait_until_gone()
