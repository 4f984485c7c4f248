"""What DescribeTrainingJob says of a job, in the terms of executors: status, exit code, why it ended, what it cost.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Literal

from diloco.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from diloco.executors.base import Status

    Job = Mapping[str, Any]

ENDED = ("Completed", "Failed", "Stopped")
TIMED_OUT = {"MaxRuntimeExceeded": "--max-runtime", "MaxWaitTimeExceeded": "--max-wait"}
"""Secondary statuses of a job that a limit of ours ended, with the option that sets it."""

Failure = Literal["capacity", "configuration", "internal", "algorithm"]

_RUNNING = ("Downloading", "Training", "Uploading", "Stopping")
_CODE = re.compile(r"exit code: (\d+)")
_CAPACITY = re.compile(
    r"CapacityError|InsufficientCapacity|Insufficient(?:Instance)?Capacity|Unable to provision", re.IGNORECASE
)


def has_ended(job: Job) -> bool:
    """Whether its status is final."""
    return job["TrainingJobStatus"] in ENDED


def status(job: Job) -> Status:
    """Its status as an executor says it."""
    primary, secondary = job["TrainingJobStatus"], job["SecondaryStatus"]
    if primary == "Completed":
        return "succeeded"
    if primary == "Failed" or secondary in TIMED_OUT:
        return "failed"
    if primary == "Stopped":
        return "cancelled"
    return "running" if secondary in _RUNNING else "pending"


def failure(job: Job) -> Failure | None:
    """What kind of failure ended it, None if none did."""
    if job["TrainingJobStatus"] != "Failed":
        return None
    reason = job.get("FailureReason", "")
    if _CAPACITY.search(reason):
        return "capacity"
    if reason.startswith("ClientError"):
        return "configuration"
    return "algorithm" if reason.startswith("AlgorithmError") else "internal"


def exit_code(job: Job) -> int | None:
    """The container's exit code, or the one that says as much; None where there is neither.

    A limit of ours and what the service calls the client's error (no such data, no such image) come back at every
    relaunch: they count as bad configuration.
    """
    if not has_ended(job):
        return None
    if job["TrainingJobStatus"] == "Completed":
        return int(ExitCode.OK)
    if job["SecondaryStatus"] in TIMED_OUT or failure(job) == "configuration":
        return int(ExitCode.BAD_CONFIGURATION)
    found = _CODE.findall(job.get("FailureReason", ""))
    return int(found[-1]) if found and failure(job) == "algorithm" else None


def why(job: Job) -> str | None:
    """Why it did not succeed, in one line with what to do; None if it did or still runs."""
    if not has_ended(job) or job["TrainingJobStatus"] == "Completed":
        return None
    option = TIMED_OUT.get(job["SecondaryStatus"])
    if option is not None:
        return f"{job['TrainingJobName']} was stopped by {option}: run again with more, and the same run id"
    if job["TrainingJobStatus"] == "Stopped":
        return f"{job['TrainingJobName']} was stopped"
    reason = " ".join(str(job.get("FailureReason", "SageMaker gives no reason")).split())
    reason = re.sub(r"^AlgorithmError: (.*?),? exit code: \d+$", r"\1", reason).strip(" ,") or "nothing was logged"
    return f"{reason} ({job['TrainingJobName']})"


def instance_type(job: Job) -> str:
    """What it ran on, or is being started on."""
    resources = job["ResourceConfig"]
    preferences = resources.get("InstancePreferences") or [{}]
    found = resources.get("SelectedInstanceType") or resources.get("InstanceType") or preferences[0].get("InstanceType")
    return str(found)


def billed_seconds(job: Job) -> float:
    """Seconds that are charged at the full price, so far: for a spot job SageMaker tells less than it ran, and until
    it has ended all of its time counts.
    """
    kept = (job.get("WarmPoolStatus") or {}).get("ResourceRetainedBillableTimeInSeconds") or 0
    if has_ended(job):
        return float(job.get("BillableTimeInSeconds", 0) + kept)
    started: datetime | None = job.get("TrainingStartTime")
    return max(0.0, time.time() - started.timestamp()) if started is not None else 0.0


def interruptions(job: Job) -> int:
    """How often SageMaker took its instance away and started it again."""
    return sum(each["Status"] == "Interrupted" for each in job.get("SecondaryStatusTransitions", ()))


def warm_pool(job: Job) -> str | None:
    """The status of its warm pool, if it has one."""
    found = (job.get("WarmPoolStatus") or {}).get("Status")
    return None if found is None else str(found)
