"""The life of one job: capacity, image, data, container, upload; statuses as the service documents them.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_SecondaryStatusTransition.html
"""

from __future__ import annotations

import tarfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.sagemaker.container import Container, lay_out
from tests.support.sagemaker.logs import LogWriter
from tests.support.sagemaker.resources import pull_image, split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.sagemaker.jobs import Job
    from tests.support.sagemaker.service import Service

CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
_LOOK_EVERY = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a container ended: `exit`, `stopped`, `spot`, `internal` or `runtime`."""

    kind: str
    code: int = 0


class JobRunner:
    """Runs one job in the thread that calls :meth:`run`."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        self._request: Mapping[str, Any] = job.request

    def run(self) -> None:
        """Take the job to a terminal status."""
        try:
            self._run()
        except (ClientError, BotoCoreError, Boto3Error) as problem:
            self._service.note(f"{self._job.name}: {problem}")
            self._fail(f"ClientError: {problem}")
        finally:
            self._service.ended(self._job)

    def _run(self) -> None:
        job = self._job
        if not self._get_instance():
            return
        while True:
            if not self._prepare():
                return
            outcome = self._train()
            retry = self._request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
            if outcome.kind == "spot":
                job.enter("InProgress", "Interrupted", "The spot instance was interrupted")
                job.enter("InProgress", "Starting", "Waiting for spot capacity")
            elif outcome.kind == "internal" and job.restarts < retry:
                job.enter("InProgress", "Restarting", "Restarting the training job")
            else:
                break
            job.restarts += 1
            time.sleep(self._service.timing.starting)
        self._finish(outcome)

    def _get_instance(self) -> bool:
        job, timing = self._job, self._service.timing
        job.enter("InProgress", "Starting", "Starting the training job")
        warm = self._service.take_warm_pool(job)
        if self._stopped_within(timing.warm_start if warm else timing.starting):
            self._stop()
            return False
        if warm:
            job.selected_type = job.candidates[0]
            return True
        job.enter("InProgress", "Pending", "Preparing the instances for training")
        for instance_type in job.candidates:
            if self._service.faults.take_capacity(instance_type):
                job.selected_type = instance_type
                return True
        self._fail(CAPACITY)
        return False

    def _prepare(self) -> bool:
        """Pull the image and the data as the execution role."""
        job = self._job
        lay_out(job.folder, self._request, job.instance_type)
        job.enter("InProgress", "Downloading", "Downloading the training image")
        pull_image(self._service, self._request)
        for channel in self._request.get("InputDataConfig", ()):
            source = channel["DataSource"]["S3DataSource"]["S3Uri"]
            found = self._download(source, job.folder / "ml" / "input" / "data" / channel["ChannelName"])
            if not found:
                self._fail(f"ClientError: No data found. Please ensure that the S3 URI {source} is valid.")
                return False
        checkpoints = self._request.get("CheckpointConfig")
        if checkpoints is not None:
            self._download(checkpoints["S3Uri"], job.folder / "ml" / "checkpoints")
        if job.stop_asked:
            self._stop()
            return False
        return True

    def _train(self) -> Outcome:
        job, service = self._job, self._service
        job.enter("InProgress", "Training", "Training image download completed. Training in progress.")
        job.training_started = job.training_started or time.time()
        deadline = time.monotonic() + self._request["StoppingCondition"].get("MaxRuntimeInSeconds", 86400)
        role = self._request["RoleArn"]
        logs = LogWriter(lambda action, stream: service.logs_as_role(role, action, stream), job.name, service.note)
        container = Container(self._command(), service.environment(job), job.folder, logs.write)
        job.container = container
        try:
            while True:
                code = container.poll()
                if code is not None:
                    return Outcome("exit", code)
                if job.stop_asked or time.monotonic() > deadline:
                    job.enter("Stopping", "Stopping", "Stopping the training job")
                    kind = "stopped" if job.stop_asked else "runtime"
                    return Outcome(kind, container.stop(service.timing.stop_grace))
                if job.interruption is not None:
                    kind, job.interruption = job.interruption, None
                    container.kill()
                    container.stop(0.0)
                    return Outcome(kind)
                job.changed.wait(_LOOK_EVERY)
                job.changed.clear()
        finally:
            job.training_ended = time.time()
            job.container = None
            container.stop(0.0)
            logs.close()

    def _command(self) -> Sequence[str]:
        algorithm = self._request["AlgorithmSpecification"]
        entrypoint = algorithm.get("ContainerEntrypoint") or self._service.image_entrypoint
        return [*entrypoint, *algorithm.get("ContainerArguments", ["train"])]

    def _finish(self, outcome: Outcome) -> None:
        job = self._job
        if outcome.kind == "internal":
            self._fail(INTERNAL)
            return
        if outcome.kind == "exit" and outcome.code != 0:
            self._upload()
            written = job.folder / "ml" / "output" / "failure"
            reason = written.read_text(errors="replace")[:1024] if written.is_file() else ""
            self._fail(f"AlgorithmError: {reason}, exit code: {outcome.code}"[:1024])
            return
        if outcome.kind == "exit":
            job.enter("InProgress", "Uploading", "Uploading generated training model")
        self._upload()
        if outcome.kind == "exit":
            self._service.keep_warm(job)
            job.enter("Completed", "Completed", "Training job completed")
        elif outcome.kind == "runtime":
            job.enter("Stopped", "MaxRuntimeExceeded", "Training job exceeded the maximum runtime")
        else:
            job.enter("Stopped", "Stopped", "Training job stopped")

    def _upload(self) -> None:
        """Write model.tar.gz and output.tar.gz below the job's output path, as the execution role."""
        job, output = self._job, self._request["OutputDataConfig"]
        base = f"{output['S3OutputPath'].rstrip('/')}/{job.name}/output"
        extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": output["KmsKeyId"]} if "KmsKeyId" in output else {}
        s3 = self._service.as_role(self._request["RoleArn"], "s3")
        for source, name in (("model", "model.tar.gz"), ("output", "output.tar.gz")):
            folder = job.folder / "ml" / source
            if not any(path.is_file() for path in folder.rglob("*")):
                continue
            archive = job.folder / name
            with tarfile.open(archive, "w:gz") as tar:
                for path in sorted(folder.iterdir()):
                    tar.add(path, arcname=path.name)
            bucket, key = split(f"{base}/{name}")
            s3.upload_file(str(archive), bucket, key, ExtraArgs=extra)
            if source == "model":
                job.artifacts = f"{base}/{name}"
        checkpoints = self._request.get("CheckpointConfig")
        if checkpoints is not None:
            root = job.folder / "ml" / "checkpoints"
            for path in (each for each in root.rglob("*") if each.is_file()):
                bucket, key = split(f"{checkpoints['S3Uri'].rstrip('/')}/{path.relative_to(root).as_posix()}")
                s3.upload_file(str(path), bucket, key)

    def _download(self, uri: str, folder: Path) -> int:
        """Copy what a URI names into a folder, as the execution role; returns how many objects there were."""
        folder.mkdir(parents=True, exist_ok=True)
        s3 = self._service.as_role(self._request["RoleArn"], "s3")
        bucket, prefix = split(uri)
        found = 0
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(prefix).lstrip("/") or entry["Key"].rsplit("/", 1)[-1]
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, entry["Key"], str(target))
                found += 1
        return found

    def _stopped_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._job.stop_asked and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        return self._job.stop_asked

    def _stop(self) -> None:
        self._job.enter("Stopping", "Stopping", "Stopping the training job")
        self._job.enter("Stopped", "Stopped", "Training job stopped")

    def _fail(self, reason: str) -> None:
        self._job.failure = reason
        self._job.enter("Failed", "Failed", "Training job failed")
