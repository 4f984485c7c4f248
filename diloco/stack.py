"""The outputs of a Pulumi stack: the only thing that passes from `infra/` to a launch.

The contract has a version; `docs/infrastructure.md` describes every output. What a stack does not have is left out by
the engine and is None here. Outputs come from `pulumi stack output --json`, or from a file that holds what it printed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
SECRET = "[secret]"  # noqa: S105 - what Pulumi prints in a secret's place
PROJECT = Path(__file__).resolve().parents[1]
"""Where Pulumi.yaml is, in a checkout."""
PULUMI_SECONDS = 120.0

_ARN = r"^arn:aws[a-z-]*:"
_S3 = r"^s3://[a-z0-9][a-z0-9.-]+(/|$)"


class _Contract(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


class QuotaOutput(_Contract):
    """One quota that the stack looks after."""

    name: str
    """As Service Quotas spells it: `ml.g5.2xlarge for training warm pool usage`."""
    value: float
    """In force when the stack was last updated."""
    wanted: float
    status: Literal["enough", "requested", "pending", "refused", "low"]
    request_id: str | None = None


class StackOutputs(_Contract):
    """What a launch needs to know of an environment."""

    schema_version: Literal[1]
    region: str
    account: str = Field(pattern=r"^\d{12}$")
    bucket: str
    rendezvous_uri: str = Field(pattern=_S3)
    """Parent of runs."""
    output_uri: str = Field(pattern=_S3)
    """Parent of what jobs leave behind: models."""
    image_uri: str = Field(pattern=r"@sha256:[0-9a-f]{64}$")
    """The trainer's image, by digest."""
    sagemaker_role_arn: str = Field(pattern=_ARN)
    launcher_policy_arn: str = Field(pattern=_ARN)
    job_name_prefix: str
    """Jobs are called `<prefix>-…`; role and launcher policy reach no others."""
    kms_key_arn: str | None = Field(None, pattern=_ARN)
    tags: dict[str, str] = Field(default_factory=dict)
    """On every resource of the stack, and for every job."""
    quotas: list[QuotaOutput] = Field(default_factory=list)
    subnet_ids: list[str] = Field(default_factory=list)
    """Of the VPC that jobs run in; none: in SageMaker's own network."""
    security_group_ids: list[str] = Field(default_factory=list)
    cluster_name: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    pod_role_arn: str | None = Field(None, pattern=_ARN)


def parse(document: Mapping[str, Any], source: str) -> StackOutputs:
    """Check outputs; `source` names them in errors.

    Raises one ConfigurationError that lists every output that is missing, secret or malformed.
    """
    version = document.get("schemaVersion")
    if isinstance(version, (int, float)) and version != SCHEMA_VERSION:
        side = "this checkout (git pull)" if version > SCHEMA_VERSION else "the stack (pulumi up)"
        raise ConfigurationError(
            f"{source}: outputs of schemaVersion {version:g}, and this launcher reads {SCHEMA_VERSION}: update {side}"
        )
    secret = sorted(name for name, value in document.items() if value == SECRET and name in NAMES)
    readable = {name: value for name, value in document.items() if value is not None}
    problems = []
    if secret:
        problems.append(f"secret: {', '.join(secret)} (none need be: set the config behind it again, without --secret)")
    try:
        outputs = StackOutputs.model_validate(readable)
    except ValidationError as problem:
        errors = [error for error in problem.errors() if error["loc"][0] not in secret]
        missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
        if missing:
            problems.insert(0, f"missing: {', '.join(missing)} (run `pulumi up`)")
        problems += [
            f"{'.'.join(map(str, error['loc']))} is {error['input']!r} ({error['msg'].lower()})"
            for error in errors
            if error["type"] != "missing"
        ]
    else:
        if not problems:
            return outputs
    raise ConfigurationError(f"{source}: {'; '.join(problems)}")


NAMES = frozenset(to_camel(name) for name in StackOutputs.model_fields)
"""Every output of the contract, as it is exported."""


def read_outputs(path: Path | None = None, stack: str | None = None) -> StackOutputs:
    """Outputs from a file (`-`: standard input) or from a stack of the project. Raises ConfigurationError."""
    if (path is None) == (stack is None):
        raise ConfigurationError("name the outputs by --stack NAME or by --outputs FILE, one of the two")
    if path is not None:
        return parse(_load(_read(path), str(path)), str(path))
    return parse(_load(_ask_pulumi(str(stack)), f"stack {stack}"), f"stack {stack}")


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is no text"
        raise ConfigurationError(
            f"--outputs {path}: {reason}: write it with `pulumi stack output --json > {path}`"
        ) from None


def _load(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"{source}: no JSON ({problem}): write it with `pulumi stack output --json`") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{source}: no JSON object: write it with `pulumi stack output --json`")
    return document


def _ask_pulumi(stack: str) -> str:
    pulumi = shutil.which("pulumi")
    if pulumi is None:
        raise ConfigurationError(
            f"--stack {stack}: no pulumi on PATH: install it (https://www.pulumi.com/docs/install/), or give the "
            "outputs as a file with --outputs"
        )
    folder = next((path for path in (Path.cwd(), PROJECT) if (path / "Pulumi.yaml").exists()), Path.cwd())
    command = [pulumi, "stack", "output", "--json", "--stack", stack, "--cwd", str(folder), "--non-interactive"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PULUMI_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"--stack {stack}: no answer from `pulumi stack output` within {PULUMI_SECONDS:g} s: try it by hand"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("error: ") or f"exit code {done.returncode}"
        raise ConfigurationError(f"--stack {stack}: pulumi: {reason}")
    return done.stdout
