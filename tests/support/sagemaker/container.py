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
from typing import TYPE_CHECKING, Any

from tests.support.namespace import NamespacedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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


class Container(NamespacedProcess):
    """Starts at once. `lines` gets each line of stdout and stderr."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, lines: Callable[[str], None]
    ) -> None:
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        places = (str(scratch), str(folder / "ml"), str(folder / "bin"))
        super().__init__(_SET_UP, [*places, *command], env, lines)

    def freeze(self, *, frozen: bool) -> None:
        """Stop its processes where they are, or let them go on."""
        os.killpg(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)


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
