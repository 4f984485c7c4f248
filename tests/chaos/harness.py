"""A run of real replica processes on a real S3, and what must be true of it after any fault.

A replica is a process of its own that runs `diloco.replica_entrypoint.main`. It is forked from a server that has
imported torch once (`multiprocessing`'s forkserver), so that it starts in milliseconds, not seconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from diloco import guard
from diloco.exchange import layout
from diloco.exchange.clock import SystemClock
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Commit, ErrorReport, ReplicaReport, RunResult
from diloco.exchange.store import open_store, read_if_there
from diloco.exchange.verify import verify

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from diloco.embedded import EmbeddedS3

PATIENCE = 200.0
"""Seconds; only against hangs."""

KILLED = -signal.SIGKILL

_PRELOADED = [
    "pytest",
    "tests.support.chaos_replica",
    "diloco.replica_entrypoint",
    "diloco.manager",
    "diloco.outer",
    "s3fs",
    "torch._dynamo",  # which torch loads when the first optimizer is made
]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(_PRELOADED)


def _replica(arguments: list[str], env: Mapping[str, str | None], log: str, missing: Sequence[str]) -> None:
    """A replica's process, from here on as if it had been started as `python -m diloco.replica_entrypoint`."""
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]  # None: the import fails
    guard._prctl(guard._PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    import torch

    from diloco.replica_entrypoint import main

    torch.set_num_threads(1)
    code = main(arguments, os.environ)
    gc.freeze()
    sys.exit(code)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` is true, and return its value."""
    ends = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


@dataclass
class Process:
    """One replica process."""

    rank: int
    process: Any
    log: Path

    @property
    def code(self) -> int | None:
        """Its exit code, −n if signal n ended it, None while it runs."""
        code: int | None = self.process.exitcode
        return code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_until_stopped(self) -> None:
        """Until SIGSTOP has taken effect."""
        until(lambda: self._state() in "TX", f"rank {self.rank} to be stopped")
        assert self.code is None, f"rank {self.rank} has ended:\n{self.text()}"

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "X"

    def end(self) -> int:
        """Wait for its end; its exit code."""
        self.process.join(PATIENCE)
        assert self.code is not None, f"rank {self.rank} still runs:\n{self.text()}"
        return self.code

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class Run:
    """One run under `<bucket>/<run id>`. Use it as a context manager: nothing of it is left afterwards.

    Rounds have two inner steps. `exchange` are the exchange's settings; liveness is judged quickly, and the grace
    period is long, so that only the dead are left out unless a test says otherwise.
    """

    s3: EmbeddedS3
    folder: Path
    run_id: str
    replicas: int = 3
    rounds: int = 6
    fragments: int = 1
    width: int = 16
    endpoint: str | None = None
    exchange: dict[str, Any] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        quick = {"timeout": 180, "poll_first": 0.005, "poll_most": 0.25, "beat_every": 0.2, "dead_after": 2.0}
        patient = {"policy": "skip", "grace": 30, "join_timeout": 180, "retry_for": 20, "checkpoint_every": 2}
        self.exchange = quick | patient | self.exchange
        self.uri = f"{self.s3.uri}/{self.run_id}"
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        self.store = open_store(self.uri, storage_options=self.s3.storage_options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.process.kill()
            process.process.join()
        try:
            self._loop.run(self._empty())  # MiniStack holds every object in memory
        finally:
            self._loop.close()
        for process in self.processes:  # pytest shows it if the test has failed
            sys.stderr.write(f"\n--- rank {process.rank}, exit code {process.code}\n{process.text()}")

    async def _empty(self) -> None:
        try:
            await self.store.delete([entry.key for entry in await self.store.list("")])
        finally:
            await self.store.close()

    # ---- processes

    def start(
        self,
        rank: int,
        *,
        endpoint: str | None = None,
        env: Mapping[str, str | None] | None = None,
        missing: Sequence[str] = (),
        **trainer: Any,
    ) -> Process:
        """Start a process of a rank; the next attempt, if there was one. `trainer` are more arguments of the trainer.

        `endpoint` is its S3 instead of the run's, `env` more of its environment, `missing` what it can't import.
        """
        points = [{"rank": rank} | point for point in trainer.pop("points", ())]
        acts = [{"rank": rank} | act for act in trainer.pop("acts", ())]
        schedule = {
            "steps": 2 * self.rounds,
            "sync_every": 2 * self.fragments,
            "fragments": self.fragments,
            "width": self.width,
        }
        arguments = [
            *("--rendezvous", self.uri),
            *("--world-size", str(self.replicas)),
            *("--rank", str(rank)),
            *("--trainer-module", "tests.support.chaos_replica"),
            *("--trainer-fn", "train"),
            *("--trainer-kwargs-json", json.dumps(schedule | {"points": points, "acts": acts} | trainer)),
            *("--exchange-json", json.dumps(self.exchange)),
        ]
        url = endpoint or self.endpoint or self.s3.endpoint_url
        env = self.s3.env | {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url} | dict(env or {})
        log = self.folder / f"{self.run_id}-{rank}-{len(self.processes)}.log"
        process = _processes.Process(target=_replica, args=(arguments, env, str(log), missing))
        process.start()
        self.processes.append(Process(rank, process, log))
        return self.processes[-1]

    def end(self, *processes: Process) -> list[int]:
        """Wait for these processes; their exit codes."""
        return [process.end() for process in processes]

    # ---- the bucket

    def read(self, key: str) -> bytes | None:
        """An object, or None."""
        return self._loop.run(read_if_there(self.store, key))

    def write(self, key: str, data: bytes) -> None:
        self._loop.run(self.store.write(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self._loop.run(self.store.create(key, data))

    def keys(self, prefix: str) -> list[str]:
        return [entry.key for entry in self._loop.run(self.store.list(prefix))]

    def wait_for(self, key: str) -> bytes:
        """Wait until an object is there; its bytes."""

        def look() -> bytes | None:
            # Looked at before the bucket.
            alive = any(process.code is None for process in self.processes) or any(
                launcher.poll() is None for launcher in self.launchers
            )
            found = self.read(key)
            assert found is not None or alive, f"{key} will not come: no process is left"
            return found

        found: bytes = until(look, key)
        return found

    def commit(self, round_: int) -> Commit:
        """Wait for a round's record."""
        return Commit.from_json(self.wait_for(layout.commit(round_)), layout.commit(round_))

    def left_out(self, round_: int) -> dict[int, str]:
        """Rank → why it was left out of a round."""
        return {out.rank: out.reason for out in self.commit(round_).left_out}

    def participants(self, round_: int) -> list[Member]:
        return [participant.member for participant in self.commit(round_).participants]

    def beat(self, rank: int, attempt: int = 1) -> Beat | None:
        data = self.read(layout.beat(Member(rank, attempt)))
        return None if data is None else Beat.from_json(data, "beat")

    def error(self, rank: int, attempt: int = 1) -> ErrorReport:
        """Why a process gave up, as it said in the bucket."""
        key = layout.error(Member(rank, attempt))
        data = self.read(key)
        assert data is not None, f"{key} is not there"
        return ErrorReport.from_json(data, key)

    # ---- what must be true after any fault

    def check(self, *, reported: dict[int, int], differences: Sequence[str] = ()) -> None:
        """All rounds are committed with one attempt a rank, and all replicas held the same bits at every round, but for
        the `differences`: who, and before or after which round.

        `reported` are the attempts, by rank, that must have ended well.
        """
        for round_ in range(self.rounds):
            ranks = [member.rank for member in self.participants(round_)]
            assert len(ranks) == len(set(ranks)), f"round {round_}: {ranks}"
        result = RunResult.from_json(self.wait_for(layout.RESULT), layout.RESULT)
        reports = {}
        for rank, attempt in reported.items():
            key = layout.result(Member(rank, attempt))
            data = self.read(key)
            assert data is not None, f"{key} is not there"
            reports[rank] = ReplicaReport.from_json(data, key)
        assert {report.digest for report in reports.values()} == {result.digest}
        assert self.read(f"{layout.MODEL}/model.safetensors") is not None
        assert all(process.code is not None for process in self.processes)
        verdict = self._loop.run(verify(self.store, SystemClock()))
        assert [found.partition(" has ")[0] for found in verdict.differences] == list(differences), verdict.differences
        assert verdict.committed == self.rounds
        assert verdict.compared >= self.replicas
        assert verdict.finished


def killed(when: str, operation: str, key: str, **more: Any) -> dict[str, Any]:
    """A point at which a process kills itself; see :mod:`tests.support.chaos_replica`."""
    return {"when": when, "operation": operation, "key": key, **more}


def stopped(when: str, operation: str, key: str) -> dict[str, Any]:
    """A point at which a process stops itself, until it gets SIGCONT."""
    return killed(when, operation, key, signal="STOP")


def held(round_: int, until_key: str) -> dict[str, Any]:
    """A round whose first step lasts until an object is there."""
    return {"round": round_, "do": "hold", "until": until_key}


def header(round_: int, rank: int, attempt: int = 1) -> str:
    """A member's header of a round."""
    return layout.header(round_, Member(rank, attempt))


def payload(round_: int, rank: int, attempt: int = 1) -> str:
    """A member's payload of a round."""
    return layout.payload(round_, Member(rank, attempt))
