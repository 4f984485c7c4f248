"""Options and values that several commands share."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import ConfigurationError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class ModelRanks(StrEnum):
    """Which ranks leave the trained model in their job's output."""

    rank0 = "rank0"
    all = "all"
    none = "none"


class Backend(StrEnum):
    """Where replicas run, if not on this machine."""

    sagemaker = "sagemaker"
    kubernetes = "kubernetes"


class WorkloadKind(StrEnum):
    """What wraps the pods on a cluster."""

    job = "job"
    volcano = "volcano"
    rayjob = "rayjob"


def seconds(text: str | int) -> int:
    """A time such as 90, 90s, 30m, 2h or 5d, in seconds. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+)([smhd]?)", str(text).strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no time: write 90, 90s, 30m, 2h or 5d")
    return int(found[1]) * _UNITS[found[2]]


StackOption = Annotated[str | None, typer.Option(help="Stack of the Pulumi project whose outputs to use.")]
OutputsOption = Annotated[
    Path | None, typer.Option(help="File with what `pulumi stack output --json` printed; -: standard input.")
]
RunIdArgument = Annotated[str, typer.Argument(metavar="RUN_ID", help="The run's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
InstanceTypeOption = Annotated[
    str | None,
    typer.Option(
        "--instance-type",
        "--instance-types",
        help="ml.g5.2xlarge, or several in the order of preference: ml.g5.2xlarge,ml.g6.2xlarge."
        "  [default: ml.m5.xlarge]",
        show_default=False,
    ),
]
SpotOption = Annotated[bool, typer.Option("--spot", help="On spot capacity, which SageMaker may take away.")]
KeepAliveOption = Annotated[
    int, typer.Option(parser=seconds, metavar="TIME", help="Keep instances warm after a job: 30m.")
]
PricesOption = Annotated[Path | None, typer.Option(help="Price table to use instead of diloco/prices.json.")]
MaxCostOption = Annotated[float | None, typer.Option(metavar="DOLLARS", help="Stop the run once it has cost this.")]
BackendOption = Annotated[Backend, typer.Option(help="Where the replicas run: SageMaker jobs, or pods of a cluster.")]
NamespaceOption = Annotated[
    str | None,
    typer.Option(help="kubernetes: the namespace.  [default: the stack's, else the context's]", show_default=False),
]
KubeconfigOption = Annotated[
    Path | None, typer.Option(help="kubernetes: file with the cluster's address.  [default: as kubectl]")
]
ContextOption = Annotated[str | None, typer.Option(help="kubernetes: context of that file.  [default: the current]")]
WorkloadOption = Annotated[
    WorkloadKind,
    typer.Option(
        help="kubernetes: an Indexed Job; or a Volcano Job or a RayJob a rank, which need Volcano or KubeRay."
    ),
]
TakeoverOption = Annotated[bool, typer.Option("--takeover", help="Replace a launcher that may live at once.")]


def types(text: str | None) -> tuple[str, ...]:
    """Instance types of a comma-separated list."""
    from diloco.executors.sagemaker_instances import DEFAULT

    return (DEFAULT,) if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def pairs(option: str, values: list[str] | None) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. Raises ConfigurationError."""
    found = {}
    for text in values or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"{option} {text}: write it as NAME=VALUE")
        found[name] = value
    return found
