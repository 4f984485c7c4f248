"""The operations: CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, and what else a launcher calls."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from tests.support.sagemaker import resources, rules, shapes
from tests.support.sagemaker.errors import ApiError, not_found
from tests.support.sagemaker.faults import Faults
from tests.support.sagemaker.jobs import TERMINAL, Job
from tests.support.sagemaker.logs import GROUP
from tests.support.sagemaker.role import Roles
from tests.support.sagemaker.runner import JobRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.sagemaker.callers import Callers
    from tests.support.sagemaker.emulator import Emulator

SESSION_SECONDS = 30.0
"""How long a role's permissions are used as they were: IAM, too, takes its time."""
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Timing:
    """Seconds; the service's own figures are in the comments."""

    starting: float = 0.1
    """A cold start takes 3 to 5 minutes."""
    warm_start: float = 0.02
    stop_grace: float = 6.0
    """120 s between SIGTERM and SIGKILL."""
    keep_alive_factor: float = 1.0
    """Real seconds for each second of a warm pool."""


@dataclass
class Service:
    """All training jobs of an account. `folder` holds the jobs' files."""

    folder: Path
    emulator: Emulator | None = None
    """None: jobs do not run."""
    callers: Callers | None = None
    """None: any caller may do anything."""
    timing: Timing = field(default_factory=Timing)
    faults: Faults = field(default_factory=Faults)
    region: str = "us-east-1"
    account: str = "123456789012"
    container_env: dict[str, str] = field(default_factory=dict)
    """What an image and its network would give a container: PYTHONPATH, an emulator's endpoint, …"""
    image_entrypoint: tuple[str, ...] = ("/usr/local/bin/diloco-replica",)
    """The image's ENTRYPOINT; `container/start` has that name in a container."""
    url: str = ""
    problems: list[str] = field(default_factory=list)
    """What went wrong without a job's status showing it, such as logs that could not be written."""
    history: list[tuple[str, str]] = field(default_factory=list)
    """Every accepted call: operation and job's name."""
    received: int = 0
    """How many calls there were, refused ones included."""
    tokens: dict[str, Job] = field(default_factory=dict)
    """Each job's own authorisation for its role's credentials."""
    _jobs: dict[str, Job] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _roles: Roles | None = None
    _sessions: dict[str, tuple[dict[str, str], float]] = field(default_factory=dict)
    _sessions_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.emulator is not None:
            self.region, self.account = self.emulator.region, self.emulator.account
            self._roles = Roles(self.emulator.client, self.account, self.region)

    # What the API offers.

    def call(self, operation: str, request: dict[str, Any], access_key: str) -> dict[str, Any]:
        """Carry out a call; raises ApiError."""
        self.received += 1
        handler = getattr(self, f"_{re.sub('(?<!^)(?=[A-Z])', '_', operation).lower()}", None)
        if handler is None:
            raise ApiError("UnknownOperationException", f"this stand-in has no {operation}")
        self.faults.throttle(operation)
        shapes.check(operation, request)
        self._authorise(operation, request, access_key)
        answer: dict[str, Any] = handler(request)
        self.history.append((operation, request.get("TrainingJobName", "")))
        return answer

    def _create_training_job(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_create(request)
        name = request["TrainingJobName"]
        self.faults.refuse(name)
        arn = self.job_arn(name)
        with self._lock:
            if name in self._jobs:
                raise ApiError("ResourceInUse", f"Training job names must be unique within an AWS account: {name}")
        if self._roles is not None:
            self._roles.check_trust(request["RoleArn"], arn)
            resources.check(self, request)
        tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", ())}
        with self._lock:
            if name in self._jobs:
                raise ApiError("ResourceInUse", f"Training job names must be unique within an AWS account: {name}")
            job = Job(request, arn, tags, self.folder / name)
            self._check_quota(job)
            self._jobs[name] = job
            self.tokens[secrets.token_hex(16)] = job
        if self.emulator is None:
            job.enter("InProgress", "Training", "Training in progress")
        else:
            job.folder.mkdir(parents=True)
            self._lay_image(job.folder / "bin")
            thread = threading.Thread(target=JobRunner(self, job).run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return {"TrainingJobArn": arn}

    def _describe_training_job(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._find(request)
        self._expire(job)
        return job.describe()

    def _stop_training_job(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._find(request)
        with job.lock:
            if job.terminal:
                raise ApiError(
                    "ValidationException",
                    f"The request was rejected because the training job is in status {job.status}.",
                )
            job.stop_asked = True
            job.enter("Stopping", "Stopping", "Stopping the training job")
            if self.emulator is None:
                job.enter("Stopped", "Stopped", "Training job stopped")
        job.changed.set()
        return {}

    def _update_training_job(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._find(request)
        seconds = request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds")
        self._expire(job)
        if seconds is not None:
            with job.lock:
                if job.warm_pool is None or job.warm_pool["Status"] != "Available":
                    raise ApiError(
                        "ValidationException",
                        "KeepAlivePeriodInSeconds can only be updated while the warm pool's status is Available.",
                    )
                job.request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = seconds
                job.warm_until = time.monotonic() + seconds * self.timing.keep_alive_factor
            self._expire(job)
        return {"TrainingJobArn": job.arn}

    def _delete_training_job(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._find(request)
        self._expire(job)
        with self._lock:
            warm = job.warm_pool is not None and job.warm_pool["Status"] == "Available"
            if not job.terminal or warm:
                raise ApiError("ResourceInUse", f"Training job {job.name} is in use and can't be deleted.")
            del self._jobs[job.name]
        return {}

    def _list_training_jobs(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            jobs = sorted(self._jobs.values(), key=lambda job: (job.created, job.name))
        if request.get("SortOrder", "Descending") == "Descending":
            jobs.reverse()
        part = request.get("NameContains", "")
        after = request.get("CreationTimeAfter", 0.0)
        jobs = [job for job in jobs if part in job.name and job.created > after]
        start = int(request.get("NextToken", "0"))
        size = request.get("MaxResults", 10)
        page = jobs[start : start + size]
        # As documented: the page is cut first, then filtered by status.
        status = request.get("StatusEquals")
        shown = [job for job in page if status in (None, job.status)]
        for job in shown:
            self._expire(job)
        warm = request.get("WarmPoolStatusEquals")
        shown = [job for job in shown if warm is None or (job.warm_pool or {}).get("Status") == warm]
        answer: dict[str, Any] = {"TrainingJobSummaries": [job.summary() for job in shown]}
        if start + size < len(jobs):
            answer["NextToken"] = str(start + size)
        return answer

    def _list_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._by_arn(request["ResourceArn"])
        return {"Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()]}

    def _add_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._by_arn(request["ResourceArn"])
        changed = job.tags | {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        if len(changed) > 50:
            raise ApiError("ResourceLimitExceeded", "A resource can have at most 50 tags.")
        job.tags = changed
        return self._list_tags(request)

    # What tests do.

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order of their creation."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: job.created)

    def job(self, name: str) -> Job:
        """The job of that name."""
        return self._jobs[name]

    def interrupt(self, job: Job, kind: str = "spot") -> None:
        """Take a running job's instance away: `spot` for an interruption, `internal` for an error of the service."""
        if kind == "spot" and not job.spot:
            raise ValueError(f"{job.name} is no spot job")
        job.interruption = kind
        job.changed.set()

    def freeze(self, job: Job, *, frozen: bool = True) -> None:
        """Let a running job's processes stand still, as on an instance that hangs; or go on."""
        if job.container is None:
            raise ValueError(f"{job.name} does not run")
        job.container.freeze(frozen=frozen)

    def close(self) -> None:
        """Stop all jobs and return once nothing of them runs."""
        for job in self.jobs:
            job.stop_asked = True
            job.changed.set()
        for thread in self._threads:
            thread.join(self.timing.stop_grace + 20)
        shutil.rmtree(self.folder, ignore_errors=True)

    # What running jobs need.

    def note(self, problem: str) -> None:
        """Remember what went wrong."""
        self.problems.append(problem)

    def as_role(self, role_arn: str, service: str) -> Any:
        """A boto3 client with the permissions of an execution role."""
        if self.emulator is None:
            raise RuntimeError("jobs do not run without an emulator")
        return self.emulator.client(service, self._session(role_arn))

    def logs_as_role(self, role_arn: str, action: str, stream: str) -> Any:
        """A Logs client for one action on one stream, if the execution role may; else raises ClientError.

        CloudWatch Logs authorises a stream's actions on the stream, MiniStack on its group: with an authority that
        knows better, that is asked, and the emulator's root writes.
        """
        if self.callers is None or self.emulator is None:
            return self.as_role(role_arn, "logs")
        group = f"arn:aws:logs:{self.region}:{self.account}:log-group:{GROUP}"
        resource = f"{group}:log-stream:{stream}" if stream else group
        reason = self.callers.refusal(role_arn, action, resource)
        if reason is not None:
            error = {"Error": {"Code": "AccessDeniedException", "Message": reason}}
            raise ClientError(error, action.partition(":")[2])  # type: ignore[arg-type]
        return self.emulator.client("logs")

    def role_credentials(self, job: Job) -> dict[str, str]:
        """Credentials of a job's role, as the container's endpoint hands them out."""
        return self._session(job.request["RoleArn"])

    def _session(self, role_arn: str) -> dict[str, str]:
        """A session of a role, made anew after a while: a container's SDK waits a second or two for credentials, and
        to bring a twin's permissions up to date takes many calls.
        """
        if self._roles is None:
            raise RuntimeError("jobs do not run without an emulator")
        with self._sessions_lock:
            now = time.monotonic()
            known, since = self._sessions.get(role_arn, ({}, -SESSION_SECONDS))
            if now - since >= SESSION_SECONDS:
                known = self._roles.credentials(role_arn)
                self._sessions[role_arn] = known, now
            return known

    def environment(self, job: Job) -> dict[str, str]:
        """What a container's process sees: nothing of this process's own environment but where programs are."""
        token = next(token for token, owner in self.tokens.items() if owner is job)
        return {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            **self.container_env,
            **job.request.get("Environment", {}),
            "AWS_REGION": self.region,
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": job.arn,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.url}/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": token,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def take_warm_pool(self, job: Job) -> bool:
        """Whether a kept instance takes the job."""
        with self._lock:
            for other in self.jobs:
                self._expire(other)
                pool = other.warm_pool
                if other is not job and pool is not None and pool["Status"] == "Available" and other.fits(job):
                    pool |= {"Status": "Reused", "ReusedByJob": job.name}
                    if job.keep_alive:
                        job.warm_pool = {"Status": "InUse"}
                    return True
        return False

    def keep_warm(self, job: Job) -> None:
        """Keep a job's instance, if it asks for that and the quota has room; else silently nothing."""
        quota = self.faults.quotas.get(f"{job.instance_type} for training warm pool usage", 0)
        with self._lock:
            kept = sum(
                (other.warm_pool or {}).get("Status") == "Available" and other.instance_type == job.instance_type
                for other in self.jobs
            )
            job.warm_pool = None
            if job.keep_alive and kept < quota:
                job.warm_pool = {"Status": "Available", "ResourceRetainedBillableTimeInSeconds": 0}
                job.warm_until = time.monotonic() + job.keep_alive * self.timing.keep_alive_factor

    def ended(self, job: Job) -> None:
        """A job's thread is done."""
        if not job.terminal:
            job.failure = "InternalServerError: the stand-in itself failed"
            job.enter("Failed", "Failed", "Training job failed")

    def job_arn(self, name: str) -> str:
        """A job's ARN."""
        return f"arn:aws:sagemaker:{self.region}:{self.account}:training-job/{name.lower()}"

    def _lay_image(self, folder: Path) -> None:
        """Make what a container finds in /usr/local/bin: the image's own start script."""
        folder.mkdir()
        shutil.copy(_ROOT / "container" / "start", folder / "diloco-replica")
        (folder / "diloco-replica").chmod(0o755)

    def _find(self, request: Mapping[str, Any]) -> Job:
        with self._lock:
            job = self._jobs.get(request["TrainingJobName"])
        if job is None:
            raise not_found()
        return job

    def _by_arn(self, arn: str) -> Job:
        for job in self.jobs:
            if job.arn == arn:
                return job
        raise not_found()

    def _expire(self, job: Job) -> None:
        with job.lock:
            pool = job.warm_pool
            if pool is not None and pool["Status"] == "Available" and time.monotonic() >= job.warm_until:
                pool["Status"] = "Terminated"

    def _check_quota(self, job: Job) -> None:
        kind = "spot training job usage" if job.spot else "training job usage"
        for instance_type in job.candidates[:1]:
            name = f"{instance_type} for {kind}"
            most = self.faults.quotas.get(name)
            used = sum(
                other.status not in TERMINAL and other.spot == job.spot and other.instance_type == instance_type
                for other in self._jobs.values()
            )
            if most is not None and used + 1 > most:
                raise ApiError(
                    "ResourceLimitExceeded",
                    f"The account-level service limit '{name}' is {most} Instances, with current utilization of {used}"
                    " Instances and a request delta of 1 Instances. Please use AWS Service Quotas to request an"
                    " increase for this quota. If AWS Service Quotas is not available, contact AWS support to request"
                    " an increase for this quota.",
                )

    def _authorise(self, operation: str, request: dict[str, Any], access_key: str) -> None:
        if self.callers is None:
            return
        resource = "*"
        if "TrainingJobName" in request:
            resource = self.job_arn(request["TrainingJobName"])
        elif "ResourceArn" in request:
            resource = request["ResourceArn"]
        self.callers.check(access_key, operation, resource, request)
