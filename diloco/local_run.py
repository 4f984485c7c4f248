"""What a run on this machine keeps around its replicas: a folder with a lock, the model's local copy, the baseline.

`.diloco/runs/<run id>/` holds `s3` (the embedded S3's objects), `logs`, `model` and two locks. One is the launcher's: a
second launcher is refused. The other is also held by the guards of all that was started: a launcher that follows a
killed one waits until all of it is gone, so that no two embedded S3s or attempts write into one folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco import guard
from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange.store import open_store
from diloco.executors.local import package_on_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.spec import RunSettings

RUNS = Path(".diloco") / "runs"

_LAUNCHER_LOCK = "launcher.lock"
_PROCESSES_LOCK = "processes.lock"
_LOCK_SECONDS = guard.DEFAULT_GRACE + 3.0  # what a killed launcher left is gone by then
_TRAINING_PACKAGES = ("torch", "torchft", "safetensors", "numpy")
_BLOCK = 8 * 2**20


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, under the working folder."""

    path: Path

    @classmethod
    def of(cls, run_id: str) -> RunFolder:
        """Return the folder of a run; nothing is made."""
        return cls(Path.cwd() / RUNS / run_id)

    @property
    def s3(self) -> Path:
        """Objects of the embedded S3."""
        return self.path / "s3"

    @property
    def logs(self) -> Path:
        """One log a rank."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """Local copy of the trained model."""
        return self.path / "model"

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the run for this launcher; ConfigurationError if another one has it.

        Yields the descriptor of a second lock, for the guards of what is started (`hold`): it is free once the launcher
        and all that it started are gone.
        """
        launcher = self._lock_for_launcher()
        try:
            processes = self._lock_for_processes()
            try:
                yield processes
            finally:
                os.close(processes)
        finally:
            self._remove_if_unused()
            os.close(launcher)

    def _lock_for_launcher(self) -> int:
        while True:
            descriptor = self._open(_LAUNCHER_LOCK)
            if not _try_lock(descriptor):
                holder = (self.path / _LAUNCHER_LOCK).read_text().strip() or "that is starting"
                os.close(descriptor)
                raise ConfigurationError(
                    f"another launcher (process {holder}) is running {self.path.name} in this folder:"
                    " wait for it, stop it, or choose another --run-id"
                )
            if _is_named(descriptor, self.path / _LAUNCHER_LOCK):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
            os.close(descriptor)

    def _lock_for_processes(self) -> int:
        descriptor = self._open(_PROCESSES_LOCK)
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ConfigurationError(
                    f"processes of an earlier launch of {self.path.name} still run:"
                    " stop them, or choose another --run-id"
                )
            time.sleep(0.05)
        return descriptor

    def _open(self, name: str) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as problem:
            raise ConfigurationError(f"the folder of the run can't be made: {problem}") from None

    def _remove_if_unused(self) -> None:
        """Leave nothing of a run that never began. The launcher's lock is still held."""
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {_LAUNCHER_LOCK, _PROCESSES_LOCK}:
            (self.path / _PROCESSES_LOCK).unlink(missing_ok=True)
            (self.path / _LAUNCHER_LOCK).unlink(missing_ok=True)
            for folder in (self.path, self.path.parent, self.path.parent.parent):
                with suppress(OSError):
                    folder.rmdir()


def check_packages() -> None:
    """Raise ConfigurationError if what replicas need on this machine is not installed."""
    missing = [name for name in _TRAINING_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"replicas on this machine need {', '.join(missing)}: pip install 'diloco-aws[local]'")


async def copy_model(uri: str, folder: Path) -> None:
    """Copy a model's objects into a folder, which appears whole."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    parent, _, name = uri.rpartition("/")
    store = open_store(parent)
    try:
        for entry in await store.list(f"{name}/"):
            target = aside / entry.key.removeprefix(f"{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                async for block in store.stream(entry.key, 0, entry.size, _BLOCK):
                    file.write(block)
    finally:
        await store.close()
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


async def train_baseline(settings: RunSettings, folder: RunFolder, *, hold: int) -> float:
    """Train one process by plain data parallelism on the same tokens; return its held-out loss. Cancelling stops it."""
    log = folder.logs / "baseline.log"
    answer = folder.logs / "baseline.json"
    folder.logs.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "diloco.training.baseline"),
        *("--kwargs-json", json.dumps(settings.trainer_kwargs)),
        *("--world-size", str(settings.replicas)),
        *("--steps", str(settings.steps)),
        *("--seed", str(settings.seed)),
    ]
    with answer.open("wb") as output, log.open("wb") as errors:
        child = guard.spawn(command, env=package_on_path(os.environ), output=output, errors=errors, hold=[hold])
    try:
        await asyncio.to_thread(child.wait)
    finally:
        guard.stop([child])
    if guard.exit_code(child) != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise DilocoError(f"the baseline failed: {lines[-1] if lines else 'nothing was logged'} ({log})")
    return float(json.loads(answer.read_text().splitlines()[-1])["baseline_eval_loss"])


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name: a launcher that ends may have removed it in between."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)
