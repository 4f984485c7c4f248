"""The local executor, with small commands in the place of replicas."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest

from diloco.errors import DilocoError
from diloco.executors import local
from diloco.executors.base import ReplicaHandle, ReplicaSpec, ServerlessExecutor
from diloco.executors.local import LocalProcessExecutor, usable_cores

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 20.0


def spec(rank: int, world_size: int = 2, **env: str) -> ReplicaSpec:
    return ReplicaSpec(
        rank=rank,
        world_size=world_size,
        rendezvous_uri="memory://run",
        trainer_module="trainers",
        trainer_fn="train",
        trainer_kwargs={"steps": 4},
        exchange={"policy": "strict"},
        env=env,
    )


def executor(tmp_path: Path, program: str, **options: object) -> LocalProcessExecutor:
    return LocalProcessExecutor(log_dir=tmp_path, command=[sys.executable, "-c", program], grace=0.3, **options)  # type: ignore[arg-type]


def wait_for_log(it: LocalProcessExecutor, handle: ReplicaHandle, text: str) -> None:
    deadline = time.monotonic() + PATIENCE
    for line in it.stream_logs(handle, follow=True):
        assert time.monotonic() < deadline
        if text in line:
            return
    pytest.fail(f"{text!r} was never logged")


def test_it_is_an_executor(tmp_path: Path) -> None:
    assert isinstance(executor(tmp_path, "pass"), ServerlessExecutor)


def test_each_replica_gets_its_contract(tmp_path: Path) -> None:
    program = """
import json, os, sys
names = "REPLICA_RANK", "WORLD_SIZE", "RENDEZVOUS_URI", "GIVEN", "REMOVED"
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
"""
    it = executor(tmp_path, program, env={"GIVEN": "all", "REMOVED": None})
    os.environ["REMOVED"] = "yes"
    try:
        handles = it.launch_replicas([spec(0), spec(1, GIVEN="one")])
    finally:
        del os.environ["REMOVED"]
    results = it.collect(handles, timeout=PATIENCE)
    assert [(result.rank, result.status, result.exit_code) for result in results] == [
        (0, "succeeded", 0),
        (1, "succeeded", 0),
    ]
    assert results[0].metrics == {"preemptions": 0}
    argv, env = json.loads((tmp_path / "rank-00001.log").read_text())
    assert argv == local.arguments(spec(1))
    assert env == {
        "REPLICA_RANK": "1",
        "WORLD_SIZE": "2",
        "RENDEZVOUS_URI": "memory://run",
        "GIVEN": "one",
        "REMOVED": None,
    }


def test_the_package_is_importable_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    it = executor(tmp_path, "import diloco.errors")
    assert it.collect(it.launch_replicas([spec(0)]), timeout=PATIENCE)[0].status == "succeeded"


@pytest.mark.parametrize("given", [None, "7"])
def test_threads_are_shared_out_unless_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    it = executor(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])")
    handles = it.launch_replicas([spec(rank) for rank in range(2)])
    it.collect(handles, timeout=PATIENCE)
    shared = given or str(max(1, usable_cores() // 2))
    assert list(it.stream_logs(handles[0])) == [shared]
    again = it.launch_replicas([spec(1)])  # relaunched beside the others
    it.collect(again, timeout=PATIENCE)
    assert list(it.stream_logs(again[0])) == [shared]


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [
        ("import sys; print('diloco: error: no such model\\nbye'); sys.exit(78)", 78, "no such model"),
        ("raise ValueError('the cause')", 1, "ValueError: the cause"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("import os; print('a\\nb\\nc\\nd', flush=True); os._exit(3)", 3, "b | c | d"),
        ("import os; os._exit(3)", 3, "nothing was logged"),
    ],
)
def test_why_a_replica_ended(tmp_path: Path, program: str, code: int, error: str) -> None:
    (tmp_path / "rank-00000.log").write_text("diloco: error: of an earlier launch\n")
    it = executor(tmp_path, program)
    [result] = it.collect(it.launch_replicas([spec(0)]), timeout=PATIENCE)
    assert (result.status, result.exit_code, result.error) == ("failed", code, error)


def test_logs_are_appended_and_followed_to_the_end(tmp_path: Path) -> None:
    it = executor(tmp_path, "import os; print('first'); print('last', end='')")
    handles = it.launch_replicas([spec(0)])
    assert list(it.stream_logs(handles[0], follow=True)) == ["first", "last"]
    it.collect(it.launch_replicas([spec(0)]), timeout=PATIENCE)
    assert (tmp_path / "rank-00000.log").read_text() == "first\nlast" * 2


def test_cancel_ends_even_those_that_ignore_it(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
    it = executor(tmp_path, stubborn)
    handles = it.launch_replicas([spec(0), spec(1)])
    for handle in handles:
        wait_for_log(it, handle, "up")
    with pytest.raises(TimeoutError, match="rank 0 still runs"):
        it.collect(handles, timeout=0)
    started = time.monotonic()
    it.cancel(handles)
    assert time.monotonic() - started < 5
    assert [(handle.status, handle.exit_code) for handle in it.poll(handles)] == [("cancelled", 137)] * 2
    it.cancel(handles)


def test_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.log").mkdir()
    it = executor(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(DilocoError, match=r"rank 1 could not be started: .*directory"):
        it.launch_replicas([spec(0), spec(1)])
    assert [process.guard.poll() is None for process in it._processes.values()] == [False]
