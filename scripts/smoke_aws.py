#!/usr/bin/env python
"""The cheapest run that proves the whole on a real account: two SageMaker jobs on CPUs, four steps, two exchanges.

    AWS_SMOKE=1 python scripts/smoke_aws.py --stack dev

It prints what it will cost, runs, and compares the files in both jobs' model.tar.gz byte by byte: each rank wrote its
own parameters there, so they are equal only if the exchange through S3 made them so.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diloco.cli import main as launch  # noqa: E402 - works from a checkout, from any folder
from diloco.cost import Prices  # noqa: E402
from diloco.errors import DilocoError  # noqa: E402
from diloco.executors.sagemaker import SageMakerExecutor  # noqa: E402
from diloco.sagemaker_run import job_settings  # noqa: E402
from diloco.spec import new_run_id  # noqa: E402
from diloco.stack import read_outputs  # noqa: E402

if TYPE_CHECKING:
    from diloco.stack import StackOutputs

INSTANCE_TYPE = "ml.m5.xlarge"
REPLICAS = 2
MINUTES = 10
"""Of each job that are paid for, generously: SageMaker does not charge for the start."""
MAX_COST = 1.0


def main() -> int:
    """Run, compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--stack", help="stack of the Pulumi project")
    where.add_argument("--outputs", type=Path, help="file with what `pulumi stack output --json` printed")
    options = parser.parse_args()
    price = Prices.load().per_hour(INSTANCE_TYPE) or 0.0
    say(
        f"two {INSTANCE_TYPE} jobs of at most {MINUTES} minutes: about ${REPLICAS * price * MINUTES / 60:.2f}"
        f" (${price:g} an hour each), less than a cent of S3; stopped at ${MAX_COST:g}"
    )
    if os.environ.get("AWS_SMOKE") != "1":
        say("nothing was started: set AWS_SMOKE=1 to spend that")
        return 2
    run_id = f"smoke-{new_run_id()}"
    stack = ["--stack", options.stack] if options.stack else ["--outputs", str(options.outputs)]
    code = launch(
        [
            *("run", *stack, "--run-id", run_id, "--replicas", str(REPLICAS), "--steps", "4", "--sync-every", "2"),
            *("--instance-type", INSTANCE_TYPE, "--max-runtime", f"{6 * MINUTES}m", "--model-from", "all"),
            *("--max-cost", str(MAX_COST), "--max-restarts", "1"),
        ]
    )
    if code:
        return code
    try:
        return compare(read_outputs(options.outputs, options.stack), run_id)
    except DilocoError as problem:
        say(f"error: {problem}")
        return 1


def compare(outputs: StackOutputs, run_id: str) -> int:
    """Compare what the jobs left behind; returns the exit code."""
    executor = SageMakerExecutor(job_settings(outputs, run_id))
    handles = executor.existing()
    found = [result.metrics["model_artifacts"] for result in executor.collect(handles, timeout=60)]
    if len(found) != REPLICAS or None in found:
        say(f"error: not every job left a model: {found}")
        return 1
    contents = [files(executor.clients.s3, uri) for uri in found]
    names = sorted(set().union(*contents))
    different = [name for name in names if len({content.get(name) for content in contents}) > 1]
    for name in names:
        say(f"{'DIFFERENT' if name in different else 'equal':<10}{name} ({len(contents[0].get(name) or b'')} bytes)")
    if different or not names:
        say("error: the replicas do not hold the same bits")
        return 1
    say(f"run {run_id}: both jobs left the same {len(names)} files, byte for byte")
    return 0


def files(s3: Any, uri: str) -> dict[str, bytes]:
    """The files of a model.tar.gz, by name."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body = io.BytesIO(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    with tarfile.open(fileobj=body) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        return {member.name: file.read() for member in members if (file := tar.extractfile(member)) is not None}


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
