"""The command line: what it refuses and how, and whole launches with stand-ins for replicas."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli import main, resume_command
from diloco.embedded import EmbeddedS3, environment
from diloco.exchange.records import Claim
from diloco.exchange.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "support" / "standin_replica.py"
PATIENCE = 30.0

RUN = ["run", "--local", "--replicas", "2", "--steps", "20", "--sync-every", "5"]

# The real command line with another program in the place of the replicas', and a quick pace.
DRIVER = f"""
import os, sys
import diloco.executors.local as local
local.ENTRYPOINT = (sys.executable, {str(STANDIN)!r})
import diloco.run
from diloco.supervisor import Backoff
diloco.run.PACE = diloco.run.Pace(
    processes=0.05, status=0.1, beats=0.1, dead_after=float(os.environ["DEAD_AFTER"]), restarts=Backoff(0.01, 0.01)
)
from diloco.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*RUN, "--replicas", "0"], "--replicas 0 is below 1: use at least 1"),
        ([*RUN, "--max-restarts", "-1"], "--max-restarts -1 is below 0: use at least 0"),
        ([*RUN, "--grace", "-1"], "--grace -1.0: input should be greater than or equal to 0"),
        ([*RUN, "--checkpoint-every", "0"], "--checkpoint-every 0: input should be greater than or equal to 1"),
        ([*RUN, "--replicas", "two"], "Invalid value for '--replicas'"),
        ([*RUN, "--sync-evry", "5"], "No such option"),
        (["run", "--local"], "Missing option"),
        (["train"], "No such command"),
        (
            [word for word in RUN if word != "--local"],
            "--stack NAME or --outputs FILE for SageMaker, or --backend kubernetes",
        ),
        ([*RUN, "--sync-every", "25"], "use --sync-every 20 or less"),
        ([*RUN, "--fragments", "3"], "--sync-every 5 is not a multiple of --fragments 3: use --sync-every 3 or 6"),
        ([*RUN, "--fragments", "5"], "use --fragments 4 or fewer"),
        ([*RUN, "--steps", "22"], "--steps 22 is not a multiple of --sync-every 5: use --steps 20 or 25"),
        ([*RUN, "--sync-delay", "5"], "use --sync-delay 4 or less"),
        ([*RUN, "--run-id", "Not_OK"], "use 1 to 40 lower-case letters, digits and hyphens"),
        ([*RUN, "--policy", "lazy"], "Invalid value for '--policy'"),
        ([*RUN, "--min-replicas", "3"], "use --min-replicas 2 or less"),
        ([*RUN, "--data", "/no/such/file.txt"], "No such file or directory; check the path and its permissions"),
        ([*RUN, "--trainer-module", "nowhere"], "--trainer-module nowhere: no module 'nowhere'"),
        ([*RUN, "--trainer-module", "json", "--model", "tiny"], "--model belongs to the default trainer"),
        ([*RUN, "--trainer-module", "json", "--baseline"], "--baseline knows only the default trainer"),
        ([*RUN, "--trainer-kwargs-json", "{"], "--trainer-kwargs-json is not JSON"),
        ([*RUN, "--trainer-kwargs-json", "[]"], "--trainer-kwargs-json must be a JSON object"),
        ([*RUN, "--trainer-kwargs-json", '{"seed": 1}'], "use --seed, not --trainer-kwargs-json"),
        ([*RUN, "--trainer-kwargs-json", '{"batch": 1}'], "batch is unknown (did you mean batch_size?)"),
        ([*RUN, "--model", "tiny", "--trainer-kwargs-json", '{"model": "tiny"}'], "model is given twice"),
        ([*RUN, "--rendezvous", "memory://x"], "use s3://bucket/prefix or file:///folder"),
        ([*RUN, "--rendezvous", "some/folder"], "has no scheme: use s3://bucket/prefix or file:///"),
        ([*RUN, "--output", "some/folder"], "--output some/folder has no scheme: use s3://bucket/prefix or file:///"),
    ],
)
def test_one_line_for_what_can_not_work(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("diloco: error: ")
    assert line in shown.err
    assert shown.err.count("\n") == 1
    assert list(Path.cwd().iterdir()) == []


def test_an_endpoint_that_is_down(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    started = time.monotonic()
    assert main([*RUN, "--rendezvous", "s3://bucket/runs", "--endpoint-url", "http://127.0.0.1:9"]) == 2
    assert time.monotonic() - started < 10
    error = capsys.readouterr().err
    assert "127.0.0.1:9" in error
    assert error.count("\n") == 1
    assert "AWS_ENDPOINT_URL_S3" not in os.environ
    assert list(Path.cwd().iterdir()) == []


def test_the_command_to_resume_can_be_pasted() -> None:
    argv = ["scripts/launch.py", "run", "--local", "--data", "my file.txt"]
    assert resume_command("x1", argv) == "python scripts/launch.py run --local --data 'my file.txt' --run-id x1"
    assert resume_command("x1", ["/usr/bin/diloco", "run", "--run-id=x1"]) == "diloco run --run-id=x1"


def test_the_door_works_from_any_folder_and_loads_no_torch() -> None:
    program = (
        "import runpy, sys; sys.argv = ['launch.py', 'run', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'scripts' / 'launch.py')!r}, run_name='__main__')\n"
        "finally: print({'torch', 'boto3', 'botocore', 'transformers'} & set(sys.modules))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert "--sync-every" in done.stdout
    assert done.stdout.endswith("set()\n")


class Launch:
    """A launcher in a process of its own, with stand-ins for replicas, on a `file://` rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead_after = 1.0
        self.processes: list[subprocess.Popen[str]] = []

    def begun(self) -> None:
        """Leave what replicas leave once they have agreed on the run: from then on its settings are fixed."""
        (self.folder / "rendezvous" / "x1" / "run.json").write_bytes(b"{}")

    def command(self, *behave: str, **changes: str) -> list[str]:
        options = {
            "--replicas": str(len(behave)),
            "--steps": "20",
            "--sync-every": "5",
            "--rendezvous": (self.folder / "rendezvous").as_uri(),
            "--run-id": "x1",
            "--trainer-module": "json",
            "--trainer-kwargs-json": json.dumps({"behave": behave}),
        } | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        words = [word for pair in options.items() for word in pair]
        return [sys.executable, "-c", DRIVER, "run", "--local", "--json", *words]

    def start(
        self, *behave: str, more: Sequence[str] = (), cwd: Path | None = None, command: Sequence[str] | None = None
    ) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command or [*self.command(*behave), *more], cwd=cwd, env=self.env, stdout=pipe, stderr=pipe, text=True
        )
        self.processes.append(process)
        return process

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "DEAD_AFTER": str(self.dead_after)}

    def run(
        self, *behave: str, more: Sequence[str] = (), cwd: Path | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        command = [*self.command(*behave, **changes), *more]
        return subprocess.run(
            command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def wait_for_beats(self, ranks: int) -> None:
        """Until so many replicas have written their first beat."""
        wait_until(lambda: len(list(self._members("beats"))) >= ranks)

    def pids(self) -> list[int]:
        claims = (Claim.from_json(path.read_bytes(), str(path)) for path in self._members("members"))
        return [claim.pid for claim in claims]

    def launchers(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "rendezvous" / "x1" / "launcher").iterdir())

    def exchange(self, run_id: str = "x1") -> dict[str, Any]:
        """What the replicas were told of the exchange, as far as it is looked at here."""
        told = json.loads((self.folder / "rendezvous" / run_id / "told.json").read_text())
        return {name: told[name] for name in ("grace", "checkpoint_every")}

    def _members(self, prefix: str) -> Iterator[Path]:
        return (self.folder / "rendezvous" / "x1" / prefix).glob("[0-9]*/*.json")


def wait_until(there: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    it = Launch(tmp_path)
    (tmp_path / "rendezvous").mkdir()
    yield it
    for process in it.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_stdout_carries_one_document(launch: Launch) -> None:
    done = launch.run("ok", "late")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["status"], document["run_id"], document["rounds_committed"]) == ("succeeded", "x1", 4)
    assert "held-out loss  5.000 -> 3.000 (-2.000)" in done.stderr
    again = launch.run("ok", "late")
    assert json.loads(again.stdout) | {"wall_seconds": 0} == document | {"wall_seconds": 0}
    other = launch.run("ok", "late", steps="25")
    assert (other.returncode, other.stdout) == (2, "")
    assert "run x1 was started with --steps 20, not 25" in other.stderr.splitlines()[-1]


def test_a_failed_run_says_why_and_how_to_resume(launch: Launch) -> None:
    done = launch.run("hang", "refuse")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] == "rank 1 ended with exit code 78: it does not want to"
    assert "Traceback" not in done.stderr
    assert "To resume" not in done.stderr  # the same command would fail the same way
    assert not any(map(lives, launch.pids()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_all_within_five_seconds(launch: Launch, number: signal.Signals, code: int) -> None:
    process = launch.start("hang", "stubborn")
    launch.wait_for_beats(2)
    started = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - started < 5
    assert process.returncode == code
    assert not any(map(lives, launch.pids()))
    assert json.loads(stdout)["error"] == f"stopped by {number.name}"
    assert "To resume:\n  " in stderr
    assert "--run-id x1" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_second_launcher_is_refused_and_a_killed_one_replaced(launch: Launch) -> None:
    process = launch.start("hang", "stubborn")
    launch.wait_for_beats(2)
    second = launch.run("hang", "stubborn")
    assert (second.returncode, second.stdout) == (2, "")
    assert f"another launcher (process {process.pid}) is running x1 in this folder" in second.stderr
    first = launch.pids()
    process.kill()
    launch.begun()
    third = launch.run("hang", "refuse", trainer_kwargs_json=json.dumps({"behave": ["hang", "stubborn"], "new": 1}))
    assert third.returncode == 2, "it got past the lock, and then the settings differ"
    assert "trainer argument new" in third.stderr
    assert not any(map(lives, first)), "the lock is free only once the killed launcher's replicas are gone"
    process.communicate()


def test_options_reach_the_replicas(launch: Launch) -> None:
    done = launch.run("ok", more=["--checkpoint-every", "3", "--max-restarts", "0"])
    assert done.returncode == 0, done.stderr
    assert launch.exchange() == {"grace": None, "checkpoint_every": 3}
    done = launch.run("ok", run_id="x2", grace="2.5")
    assert done.returncode == 0, done.stderr
    assert launch.exchange("x2") == {"grace": 2.5, "checkpoint_every": 10}


def test_a_restart_is_told_in_a_line_and_in_the_document(launch: Launch) -> None:
    done = launch.run("patient", "crash,late")
    assert done.returncode == 0, done.stderr
    assert [line["restarts"] for line in json.loads(done.stdout)["replicas"]] == [0, 1]
    assert "rank 1: restart 1 of 3 in 0 s: exit code 137: killed by SIGKILL" in done.stderr.splitlines(), done.stderr
    assert "restarts       rank 1: 1" in [line.rstrip() for line in done.stderr.splitlines()]


def test_out_of_restarts(launch: Launch) -> None:
    done = launch.run("hang", "crash", max_restarts="1")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["error"] == "rank 1 ended with exit code 137: killed by SIGKILL (restarted 1 time)"
    assert [line["restarts"] for line in document["replicas"]] == [0, 1]


BEGUN = ("hang,ok", "hang,late")  # they end only when they are launched again


def killed(launch: Launch) -> int:
    """A launcher that began and was killed, so that its last beat does not say that it ended; its process id."""
    process = launch.start(*BEGUN)
    launch.wait_for_beats(2)
    process.kill()
    process.communicate()
    return process.pid


def test_a_launcher_that_follows_a_killed_one_waits_until_its_beat_is_dead(launch: Launch) -> None:
    pid = killed(launch)
    done = launch.run(*BEGUN)
    assert done.returncode == 0, done.stderr
    assert f"launcher 1 (process {pid} on {socket.gethostname()})" in done.stderr
    assert "may still supervise this run: waiting 1 s for its beat; --takeover does not wait" in done.stderr
    assert launch.launchers() == ["00001.json", "00002.json"]


def test_takeover_does_not_wait(launch: Launch) -> None:
    killed(launch)
    launch.dead_after = 3600.0
    done = launch.run(*BEGUN, more=["--takeover"])
    assert done.returncode == 0, done.stderr
    assert "may still supervise" not in done.stderr
    assert launch.launchers() == ["00001.json", "00002.json"]


def test_a_launcher_elsewhere_is_refused_or_takes_over(launch: Launch, tmp_path: Path) -> None:
    first = launch.start("hang", "hang")
    launch.wait_for_beats(2)
    launch.dead_after = 3600.0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    refused = launch.run("hang", "hang", cwd=elsewhere)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == (
        f"diloco: error: launcher 1 (process {first.pid} on {socket.gethostname()}) supervises this run: wait for it,"
        " stop it, or take the run over with --takeover"
    )
    assert list(elsewhere.iterdir()) == []
    assert first.poll() is None
    old = launch.pids()
    second = launch.start("hang", "hang", cwd=elsewhere, more=["--takeover"])
    stdout, stderr = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1
    assert json.loads(stdout)["error"] == (
        f"launcher 2 (process {second.pid} on {socket.gethostname()}) took this run over:"
        " this launcher stopped its own replicas"
    )
    assert "Traceback" not in stderr
    assert not any(map(lives, old))
    launch.wait_for_beats(4)
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE) == 143


def test_a_killed_launcher_of_an_embedded_s3_is_followed_at_once(launch: Launch) -> None:
    pytest.importorskip("ministack")
    launch.dead_after = 3600.0  # the folder's lock says that it is dead
    command = [word for word in launch.command("mute") if word != "--rendezvous" and not word.startswith("file:")]
    objects = Path.cwd() / ".diloco" / "runs" / "x1" / "s3"
    for number in (1, 2):
        process = launch.start(command=command)
        wait_until(lambda: any(f"launcher/0000{number}.json" in str(path) for path in objects.rglob("*")))  # noqa: B023
        process.kill()
        process.communicate()


def test_the_embedded_s3_keeps_the_run(launch: Launch) -> None:
    pytest.importorskip("ministack")
    command = [word for word in launch.command("refuse") if word != "--rendezvous" and not word.startswith("file:")]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env=launch.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    first = run()
    assert first.returncode == 1, first.stderr
    assert json.loads(first.stdout)["rendezvous_uri"] == "s3://diloco/x1"
    assert (Path.cwd() / ".diloco" / "runs" / "x1" / "s3").is_dir()
    with EmbeddedS3(Path.cwd() / ".diloco" / "runs" / "x1" / "s3") as s3, environment(s3.env):
        spec = asyncio.run(open_store(f"{s3.uri}/x1").read("spec.json"))
    assert json.loads(spec)["replicas"] == 1
