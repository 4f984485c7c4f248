"""What the tests of whole runs have in common: small runs, and looks at what they left."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sagemaker.account import TestAccount
    from tests.support.sagemaker.jobs import Job

SMALL = ("--trainer-kwargs-json", '{"batch_size": 2, "eval_batches": 1, "threads": 1}')
PATIENCE = 120.0


def run(replicas: int, run_id: str, *more: str, steps: int = 4, sync_every: int = 2) -> list[str]:
    schedule = ["--replicas", str(replicas), "--steps", str(steps), "--sync-every", str(sync_every)]
    return [*schedule, "--run-id", run_id, "--json", *SMALL, *more]


def jobs(aws: TestAccount, run_id: str) -> list[Job]:
    return [job for job in aws.service.jobs if f"-{run_id}-r" in job.name]


def until(condition: Callable[[], object], what: str, aws: TestAccount) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE:g} s\n{aws.told()}"
        time.sleep(0.05)


def objects(aws: TestAccount, prefix: str) -> dict[str, bytes]:
    s3 = aws.emulator.client("s3")
    bucket = aws.stack.outputs()["bucket"]
    found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {entry["Key"]: s3.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read() for entry in found}


def check_finished(aws: TestAccount, run_id: str, document: dict[str, Any], replicas: int) -> None:
    """The run has its result, all replicas hold the same bits, and no job is left or doubled."""
    assert document["status"] == "succeeded"
    assert document["rounds_committed"] == document["rounds_expected"]
    assert {line["rank"] for line in document["replicas"]} == set(range(replicas))
    assert len({line["digest"] for line in document["replicas"]}) == 1
    assert all(job.terminal for job in jobs(aws, run_id))
    finished = Counter(
        job.name.split("-r")[-1].split("-s")[0] for job in jobs(aws, run_id) if job.status == "Completed"
    )
    assert finished == {str(rank): 1 for rank in range(replicas)}
