"""What a run on this machine keeps around its replicas: a folder with a lock, the model's local copy, the baseline.

`.diloco/runs/<run id>/` holds `s3` (the embedded S3's objects), `logs`, `model` and `lock`. The lock's descriptor is
also held by the guards of all that was started: a launcher that follows a killed one waits until all of it is gone.
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
        """Hold the run for this launcher and yield the lock's descriptor; ConfigurationError if another one has it."""
        descriptor = self._acquire()
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield descriptor
        finally:
            self._remove_if_unused()
            os.close(descriptor)

    def _acquire(self) -> int:
        lock = self.path / "lock"
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as problem:
                raise ConfigurationError(f"the folder of the run can't be made: {problem}") from None
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(descriptor, lock):
                    return descriptor
            holder = lock.read_text().strip() if lock.exists() else ""
            os.close(descriptor)
            # A holder that lives is waited for by nobody; a dead one's replicas are still being stopped.
            if time.monotonic() >= deadline or _lives(holder):
                raise ConfigurationError(
                    f"another launcher (process {holder or 'unknown'}) is running {self.path.name} in this folder:"
                    " wait for it, stop it, or choose another --run-id"
                )
            time.sleep(0.05)

    def _remove_if_unused(self) -> None:
        """Leave nothing of a run that never began."""
        if [entry.name for entry in self.path.iterdir()] == ["lock"]:
            (self.path / "lock").unlink()
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
        for key, size in await store.list(f"{name}/"):
            target = aside / key.removeprefix(f"{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                async for block in store.stream(key, 0, size, _BLOCK):
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


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name: a launcher that ends may have removed it in between."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
