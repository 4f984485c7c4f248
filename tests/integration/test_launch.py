"""`scripts/launch.py run` for real: processes, torch, the default trainer, the embedded S3, and nothing replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PATIENCE = 280  # seconds; only against hangs
SMALL = ["--replicas", "2", "--steps", "12", "--sync-every", "4"]

REPLICA_FIELDS = {
    "rank", "status", "steps", "tokens", "tokens_per_second", "final_train_loss", "seconds_training",
    "seconds_waiting", "bytes_up", "bytes_down", "requests", "digest", "restarts", "error",
}  # fmt: skip
RUN_FIELDS = {
    "run_id", "status", "rendezvous_uri", "model_uri", "replicas", "rounds_committed", "rounds_expected",
    "initial_eval_loss", "final_eval_loss", "wall_seconds", "error",
}  # fmt: skip


class Launcher:
    """Runs the command line in a folder of its own, and can tell which processes came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"DILOCO_TEST_MARK": str(folder)}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "scripts" / "launch.py"), "run", "--local", *arguments]

    def run(self, *arguments: str, patience: int = PATIENCE) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: PLW1510 - the tests look at the exit code
            self.command(*arguments), cwd=self.folder, env=self.env, text=True, capture_output=True, timeout=patience
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def processes(self) -> list[int]:
        """Live processes that were started below this launcher, whoever their parent is now."""
        mark = f"DILOCO_TEST_MARK={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def wait_until_gone(self) -> None:
        wait_for(lambda: not self.processes(), "its processes to be gone")


def wait_for(condition: Any, what: str) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.processes():
        os.kill(process, signal.SIGKILL)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_json_document_and_the_model(launcher: Launcher) -> None:
    run = document(launcher.run(*SMALL, "--json", "--run-id", "whole"))
    assert run.keys() >= RUN_FIELDS
    assert run["status"] == "succeeded"
    assert run["error"] is None
    assert run["rounds_committed"] == run["rounds_expected"] == 3
    assert run["final_eval_loss"] < run["initial_eval_loss"]
    for rank, replica in enumerate(run["replicas"]):
        assert replica.keys() == REPLICA_FIELDS
        assert (replica["rank"], replica["status"], replica["steps"]) == (rank, "succeeded", 12)
        assert min(replica["tokens"], replica["bytes_up"], replica["bytes_down"], replica["requests"]) > 0
    assert len({replica["digest"] for replica in run["replicas"]}) == 1
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(launcher.folder / ".diloco" / "runs" / "whole" / "model")
    assert 300_000 < model.num_parameters() < 600_000
    launcher.wait_until_gone()


def test_fragments_and_delay_over_a_folder_with_an_output(launcher: Launcher) -> None:
    rendezvous, output = (launcher.folder / "runs").as_uri(), (launcher.folder / "models").as_uri()
    schedule = ["--replicas", "2", "--steps", "16", "--sync-every", "8", "--fragments", "2", "--sync-delay", "2"]
    run = document(
        launcher.run(
            *schedule, "--codec", "bf16", "--rendezvous", rendezvous, "--output", output, "--json", "--run-id", "split"
        )
    )
    assert run["rounds_committed"] == run["rounds_expected"] == 4
    assert run["rendezvous_uri"] == f"{rendezvous}/split"
    assert run["model_uri"] == f"{output}/split"
    assert (launcher.folder / "models" / "split" / "model.safetensors").exists()
    assert len({replica["digest"] for replica in run["replicas"]}) == 1


def test_a_launcher_killed_midway_leaves_nothing_and_the_same_run_id_resumes(launcher: Launcher) -> None:
    schedule = ["--replicas", "2", "--steps", "160", "--sync-every", "4", "--run-id", "killed"]
    first = launcher.start(*schedule)
    commits = launcher.folder / ".diloco" / "runs" / "killed" / "s3"
    wait_for(
        lambda: any("00000001.json" in str(path) for path in commits.rglob("*commits*/*")), "the first two commits"
    )
    first.kill()
    first.communicate()
    launcher.wait_until_gone()
    other = launcher.run("--replicas", "2", "--steps", "800", "--sync-every", "4", "--run-id", "killed")
    assert other.returncode == 2
    assert "160" in other.stderr
    assert "800" in other.stderr
    run = document(launcher.run(*schedule, "--json"))
    assert run["status"] == "succeeded"
    assert run["rounds_committed"] == 40
    assert run["initial_eval_loss"] > run["final_eval_loss"]
    assert len({replica["digest"] for replica in run["replicas"]}) == 1


def test_ctrl_c_says_how_to_resume(launcher: Launcher) -> None:
    running = launcher.start("--replicas", "2", "--steps", "4000", "--sync-every", "4", "--run-id", "stopped")
    commits = launcher.folder / ".diloco" / "runs" / "stopped" / "s3"
    wait_for(lambda: any("00000000.json" in str(path) for path in commits.rglob("*commits*/*")), "the first commit")
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert "--run-id stopped" in said
    assert "Traceback" not in said
    launcher.wait_until_gone()


def test_the_example_trainer(launcher: Launcher) -> None:
    launcher.env["PYTHONPATH"] = str(ROOT)
    example = ["--trainer-module", "examples.plain_pytorch", "--trainer-fn", "train"]
    run = document(launcher.run("--replicas", "2", "--steps", "40", "--sync-every", "10", *example, "--json"))
    assert run["final_eval_loss"] < run["initial_eval_loss"]
    assert len({replica["digest"] for replica in run["replicas"]}) == 1
    lines = (ROOT / "examples" / "plain_pytorch.py").read_text().splitlines()
    assert len(lines) < 60


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "no/such-model"], "no/such-model"),
        (["--data", "no/such/folder/*.txt"], "no/such/folder"),
        (
            ["--fragments", "3", "--sync-every", "6", "--steps", "12", "--model", "tiny", "--sync-delay", "2"],
            "sync-delay",
        ),
        (["--fragments", "6", "--sync-every", "6", "--steps", "12"], "fragments"),
        (["--rendezvous", "s3://bucket-that-is-not-there/runs"], "credentials"),
        (["--rendezvous", "ftp://host/folder"], "ftp"),
    ],
)
def test_what_can_not_work_is_one_line_and_leaves_nothing(launcher: Launcher, arguments: list[str], says: str) -> None:
    done = launcher.run(*SMALL, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not (launcher.folder / ".diloco").exists()
    launcher.wait_until_gone()


@pytest.mark.timeout(700)
def test_the_demo_learns_as_well_as_data_parallelism(launcher: Launcher) -> None:
    demo = ["--replicas", "4", "--steps", "100", "--sync-every", "20"]
    run = document(launcher.run(*demo, "--baseline", "--json", patience=600))
    assert run["rounds_committed"] == 5
    assert run["initial_eval_loss"] - run["final_eval_loss"] >= 1.0
    assert run["final_eval_loss"] <= 1.05 * run["baseline_eval_loss"]
    assert len({replica["digest"] for replica in run["replicas"]}) == 1
