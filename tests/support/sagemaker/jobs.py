"""A training job as the service remembers it: its request, its statuses with their transitions, its warm pool."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sagemaker.container import Container

TERMINAL = ("Completed", "Failed", "Stopped")

_ECHOED = (
    "HyperParameters",
    "AlgorithmSpecification",
    "RoleArn",
    "InputDataConfig",
    "OutputDataConfig",
    "VpcConfig",
    "StoppingCondition",
    "CheckpointConfig",
    "Environment",
    "RetryStrategy",
    "ExperimentConfig",
)
_REUSED_IF_EQUAL = ("InstanceType", "InstanceCount", "VolumeSizeInGB", "VolumeKmsKeyId")


@dataclass
class Job:
    """One training job. Its lock guards the mutable part; `changed` tells the thread that runs it of a request."""

    request: dict[str, Any]
    arn: str
    tags: dict[str, str]
    folder: Path
    status: str = "InProgress"
    secondary: str = "Starting"
    transitions: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    created: float = field(default_factory=time.time)
    modified: float = field(default_factory=time.time)
    training_started: float | None = None
    training_ended: float | None = None
    selected_type: str | None = None
    warm_pool: dict[str, Any] | None = None
    warm_until: float = 0.0
    restarts: int = 0
    """How often the service itself started it again."""
    stop_asked: bool = False
    interruption: str | None = None
    """`spot` or `internal`, asked for by a test."""
    artifacts: str = ""
    container: Container | None = None
    """What runs it at the moment."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.request["TrainingJobName"])

    @property
    def terminal(self) -> bool:
        """Whether it will not change any more, but for its warm pool."""
        return self.status in TERMINAL

    @property
    def instance_type(self) -> str:
        """What it runs on, or would first be tried on."""
        return self.selected_type or self.candidates[0]

    @property
    def candidates(self) -> list[str]:
        """Instance types to try, in order."""
        resources = self.request["ResourceConfig"]
        if "InstancePreferences" in resources:
            return [entry["InstanceType"] for entry in resources["InstancePreferences"]]
        return [resources["InstanceType"]]

    @property
    def spot(self) -> bool:
        """Whether it is a managed spot job."""
        return bool(self.request.get("EnableManagedSpotTraining", False))

    @property
    def keep_alive(self) -> int:
        """Seconds that its instance is kept after it."""
        return int(self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0))

    def enter(self, status: str, secondary: str, message: str) -> None:
        """Go to another status."""
        now = time.time()
        with self.lock:
            if self.transitions:
                self.transitions[-1].setdefault("EndTime", now)
            self.status, self.secondary, self.modified = status, secondary, now
            entry = {"Status": secondary, "StartTime": now, "StatusMessage": message}
            if status in TERMINAL:
                entry["EndTime"] = now
            self.transitions.append(entry)

    def fits(self, other: Job) -> bool:
        """Whether this job's warm pool can take the other one (the conditions of the warm pools' page)."""
        mine, theirs = self.request, other.request
        same = all(mine["ResourceConfig"].get(name) == theirs["ResourceConfig"].get(name) for name in _REUSED_IF_EQUAL)
        return (
            same
            and mine["RoleArn"] == theirs["RoleArn"]
            and mine.get("VpcConfig") == theirs.get("VpcConfig")
            and mine["OutputDataConfig"].get("KmsKeyId") == theirs["OutputDataConfig"].get("KmsKeyId")
        )

    def describe(self) -> dict[str, Any]:
        """The answer of DescribeTrainingJob."""
        with self.lock:
            answer: dict[str, Any] = {
                "TrainingJobName": self.name,
                "TrainingJobArn": self.arn,
                "ModelArtifacts": {"S3ModelArtifacts": self.artifacts},
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "SecondaryStatusTransitions": [dict(each) for each in self.transitions],
                "CreationTime": self.created,
                "LastModifiedTime": self.modified,
                "EnableNetworkIsolation": self.request.get("EnableNetworkIsolation", False),
                "EnableInterContainerTrafficEncryption": False,
                "EnableManagedSpotTraining": self.spot,
                "ResourceConfig": dict(self.request["ResourceConfig"]),
            }
            answer |= {name: self.request[name] for name in _ECHOED if name in self.request}
            if self.selected_type is not None and "InstancePreferences" in self.request["ResourceConfig"]:
                answer["ResourceConfig"] |= {"SelectedInstanceType": self.selected_type, "SelectedInstanceCount": 1}
            if self.failure is not None:
                answer["FailureReason"] = self.failure[:1024]
            if self.training_started is not None:
                end = self.training_ended or time.time()
                seconds = max(1, round(end - self.training_started))
                answer |= {"TrainingStartTime": self.training_started, "TrainingTimeInSeconds": seconds}
                answer["BillableTimeInSeconds"] = max(1, seconds * 3 // 10) if self.spot else seconds
            if self.training_ended is not None:
                answer["TrainingEndTime"] = self.training_ended
            if self.warm_pool is not None:
                answer["WarmPoolStatus"] = dict(self.warm_pool)
            return answer

    def summary(self) -> dict[str, Any]:
        """Its entry in ListTrainingJobs."""
        described = self.describe()
        names = (
            *("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingEndTime"),
            *("LastModifiedTime", "TrainingJobStatus", "SecondaryStatus", "WarmPoolStatus"),
        )
        return {name: described[name] for name in names if name in described}
