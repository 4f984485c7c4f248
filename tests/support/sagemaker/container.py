"""One start of a job's container: its command as a real process that sees /opt/ml as SageMaker lays it out.

The process has mount and process namespaces of its own. /opt/ml is mounted in there, so nothing of it is on this
machine's /opt; the command is process 1, as in a container, and all its children die with it.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HOST = "algo-1"

_SET_UP = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=/opt,upperdir=$1/upper,workdir=$1/work" /opt
mkdir -p /opt/ml
mount --bind "$2" /opt/ml
mount -t overlay overlay -o "ro,lowerdir=$3:/usr/local/bin" /usr/local/bin
shift 3
cd /
exec "$@"
"""


class Container:
    """Starts at once. `lines` gets each line of stdout and stderr."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, lines: Callable[[str], None]
    ) -> None:
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", *as_root, "--mount", "--pid", "--fork"),
                *("--mount-proc", "--kill-child", "--propagation", "private", "/bin/sh", "-c", _SET_UP, "sh"),
                *(str(scratch), str(folder / "ml"), str(folder / "bin"), *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, 128 + n for a signal, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to process 1 of the container, and to no other."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill process 1, and with it all others."""
        self._signal(signal.SIGKILL)

    def stop(self, grace: float) -> int:
        """SIGTERM, after `grace` seconds SIGKILL; returns the exit code."""
        deadline = time.monotonic() + grace
        self.terminate()
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        while (code := self.poll()) is None:
            self.kill()
            time.sleep(0.02)
        return code

    def _signal(self, number: int) -> None:
        parent = self._process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                os.kill(int(child), number)

    def _read(self, lines: Callable[[str], None]) -> None:
        stream = self._process.stdout
        if stream is not None:
            with stream:
                for line in stream:
                    lines(line.decode(errors="replace").rstrip("\n"))


def lay_out(folder: Path, request: Mapping[str, Any], instance_type: str) -> None:
    """Make /opt/ml anew for a start: configuration, empty folders for what the job writes."""
    root = folder / "ml"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("input/config", "input/data", "model", "output/data", "code", "checkpoints"):
        (root / name).mkdir(parents=True)
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": channel.get("InputMode", request["AlgorithmSpecification"]["TrainingInputMode"]),
            "S3DistributionType": channel["DataSource"]["S3DataSource"].get(
                "S3DataDistributionType", "FullyReplicated"
            ),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
        }
        for channel in request.get("InputDataConfig", ())
    }
    resources = {
        "current_host": HOST,
        "current_instance_type": instance_type,
        "current_group_name": "homogeneousCluster",
        "hosts": [HOST],
        "network_interface_name": "eth0",
    }
    for name, value in (
        ("hyperparameters", request.get("HyperParameters", {})),
        ("inputdataconfig", channels),
        ("resourceconfig", resources),
    ):
        (root / "input" / "config" / f"{name}.json").write_text(json.dumps(value))
