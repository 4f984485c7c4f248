"""Replicas as processes of this machine: a guarded process group (:mod:`diloco.guard`) and a log file for each rank."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco import guard
from diloco.errors import DilocoError
from diloco.executors.base import ReplicaHandle, ReplicaResult

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

    from diloco.executors.base import ReplicaSpec, Status

ENTRYPOINT = (sys.executable, "-m", "diloco.replica_entrypoint")
ERROR_PREFIX = "diloco: error: "
"""How the entrypoint begins the line that says why it gave up."""

_TAIL_BYTES = 64 * 2**10
_FOLLOW_EVERY = 0.1  # seconds between looks at a log that is followed
_WAIT_EVERY = 0.05


@dataclass
class _Process:
    """One launched replica: its guard, and where its part of the log begins."""

    guard: subprocess.Popen[bytes]
    log: Path
    log_start: int
    cancelled: bool = False


class LocalProcessExecutor:
    """A :class:`~diloco.executors.base.ServerlessExecutor` on this machine.

    `env` is laid over the launcher's environment (None removes a variable). Logs go to `log_dir/rank-00003.log`, where
    later launches append. `hold` are descriptors, a lock file's say, that stay open until the last replica is gone.
    `command` replaces the entrypoint's (tests).
    """

    backend_name = "local"
    supports_inter_replica_network = True

    def __init__(
        self,
        *,
        log_dir: Path,
        env: Mapping[str, str | None] | None = None,
        hold: Sequence[int] = (),
        grace: float = guard.DEFAULT_GRACE,
        command: Sequence[str] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._env = dict(env or {})
        self._hold = tuple(hold)
        self._grace = grace
        self._command = tuple(ENTRYPOINT if command is None else command)
        self._processes: dict[str, _Process] = {}
        self._together = 1

    def check(self, specs: Sequence[ReplicaSpec]) -> None:
        """This machine refuses nothing that the settings allow."""

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
        """Start all, or none. Raises DilocoError naming the rank that could not be started."""
        handles: list[ReplicaHandle] = []
        # One that is relaunched shares the machine with as many as before.
        self._together = max(self._together, len(specs))
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for spec in specs:
                handles.append(self._launch(spec))  # noqa: PERF401 - what was started must be known
        except BaseException as problem:
            self.cancel(handles)
            if isinstance(problem, OSError):
                rank = specs[len(handles)].rank if specs else 0
                raise DilocoError(f"rank {rank} could not be started: {problem}") from problem
            raise
        return handles

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaHandle]:
        """Return the same handles with their present status."""
        return [self._polled(handle) for handle in handles]

    def stream_logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines that this launch has logged; with `follow`, until it ends."""
        process = self._processes[handle.job_id]
        with process.log.open("rb") as log:
            log.seek(process.log_start)
            partial = b""
            while True:
                ended = process.guard.poll() is not None  # looked at before reading: what it wrote last is read below
                for line in log:
                    partial += line
                    if partial.endswith(b"\n"):
                        yield partial[:-1].decode(errors="replace")
                        partial = b""
                if ended or not follow:
                    break
                time.sleep(_FOLLOW_EVERY)
            if partial:
                yield partial.decode(errors="replace")

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Stop them, SIGTERM first, and return once nothing of them is left."""
        running = [process for process in map(self._find, handles) if process.guard.poll() is None]
        for process in running:
            process.cancelled = True
        guard.stop([process.guard for process in running], patience=self._grace + 1.5)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        """Wait for all to end; TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in handles:
            while self._find(handle).guard.poll() is None:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"rank {handle.rank} still runs after {timeout:g} s")
                time.sleep(_WAIT_EVERY)
        return sorted((self._result(handle) for handle in self.poll(handles)), key=lambda result: result.rank)

    def _launch(self, spec: ReplicaSpec) -> ReplicaHandle:
        log = self._log_dir / f"rank-{spec.rank:05d}.log"
        with log.open("ab") as output:
            start = output.tell()
            process = guard.spawn(
                [*self._command, *arguments(spec)],
                env=self._environment(spec),
                output=output,
                grace=self._grace,
                hold=self._hold,
            )
        job_id = f"{spec.rank}-{process.pid}"
        self._processes[job_id] = _Process(process, log, start)
        return ReplicaHandle(spec.rank, self.backend_name, job_id, "running", log_location=str(log))

    def _environment(self, spec: ReplicaSpec) -> dict[str, str]:
        laid_over = {**os.environ, **self._env, **spec.env}
        env = {name: value for name, value in laid_over.items() if value is not None}
        # N replicas that each start a thread a core are slower than one.
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self._together)))
        env["PYTHONUNBUFFERED"] = "1"
        env["REPLICA_RANK"] = str(spec.rank)
        env["WORLD_SIZE"] = str(spec.world_size)
        env["RENDEZVOUS_URI"] = spec.rendezvous_uri
        return package_on_path(env)

    def _find(self, handle: ReplicaHandle) -> _Process:
        return self._processes[handle.job_id]

    def _polled(self, handle: ReplicaHandle) -> ReplicaHandle:
        process = self._find(handle)
        code = guard.exit_code(process.guard)
        if code is None:
            return replace(handle, status="running", exit_code=None)
        status: Status = "succeeded" if code == 0 else "cancelled" if process.cancelled else "failed"
        return replace(handle, status=status, exit_code=code)

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        process = self._find(handle)
        error = None if handle.status == "succeeded" else self._why(process, handle.exit_code or 0)
        return ReplicaResult(handle.rank, handle.status, handle.exit_code, {"preemptions": 0}, error)

    def _why(self, process: _Process, code: int) -> str:
        """Say in one line why it ended: its own last error line, else how its log ends."""
        lines = _tail(process.log, process.log_start)
        for line in reversed(lines):
            if line.startswith(ERROR_PREFIX):
                return line.removeprefix(ERROR_PREFIX)
        killed = guard.signal_name(code)
        if killed is not None:
            return f"killed by {killed}"
        # A traceback says in its last line what happened; other logs rarely do.
        traceback = any(line.startswith("Traceback ") for line in lines)
        return " | ".join(lines[-1:] if traceback else lines[-3:]) or "nothing was logged"


def arguments(spec: ReplicaSpec) -> list[str]:
    """Return the entrypoint's command line for one replica."""
    return [
        *("--rendezvous", spec.rendezvous_uri),
        *("--world-size", str(spec.world_size)),
        *("--trainer-module", spec.trainer_module),
        *("--trainer-fn", spec.trainer_fn),
        *("--trainer-kwargs-json", json.dumps(dict(spec.trainer_kwargs))),
        *("--exchange-json", json.dumps(dict(spec.exchange))),
    ]


def package_on_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with this package importable: it may be a folder that the launcher put on its own path."""
    root = str(Path(__file__).resolve().parents[2])
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))}


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _tail(log: Path, start: int) -> list[str]:
    """Return the last lines of a log that are not empty, at most 64 KiB of them."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
