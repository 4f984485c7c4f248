"""The tests' SageMaker runs jobs: real processes, as the execution role, with the service's statuses."""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.sagemaker.standin_requests import BUCKET, LOGS, STORAGE, request
from tests.sagemaker.standin_requests import make_account as make
from tests.support.sagemaker import Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sagemaker import Emulator, SageMakerServer

PATIENCE = 60.0
NAME = "diloco-r0-s1"


@pytest.fixture
def server(emulator: Emulator, serve: Callable[..., SageMakerServer]) -> SageMakerServer:
    make(emulator)
    return serve(emulator=emulator, timing=Timing(starting=0.05, stop_grace=1.0))


@pytest.fixture
def client(server: SageMakerServer, client_of: Callable[..., Any]) -> Any:
    return client_of(server)


def wait(client: Any, *statuses: str, name: str = NAME, secondary: str | None = None) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.describe_training_job(TrainingJobName=name)
        if job["TrainingJobStatus"] in statuses and secondary in (None, job["SecondaryStatus"]):
            return job
        time.sleep(0.02)
    raise AssertionError(f"{name} is {job['TrainingJobStatus']}, {job['SecondaryStatus']}, not {statuses}, {secondary}")


def logged(emulator: Emulator, name: str = NAME) -> list[str]:
    logs = emulator.client("logs")
    group = "/aws/sagemaker/TrainingJobs"
    streams = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/algo-1-")["logStreams"]
    events = [
        event
        for stream in streams
        for event in logs.get_log_events(logGroupName=group, logStreamName=stream["logStreamName"], startFromHead=True)[
            "events"
        ]
    ]
    return [event["message"] for event in sorted(events, key=lambda event: event["timestamp"])]


def test_runs_the_container_and_uploads_its_model(client: Any, emulator: Emulator, server: SageMakerServer) -> None:
    emulator.client("s3").put_object(Bucket=BUCKET, Key="data/part-1.txt", Body=b"text")
    script = (
        "echo $TRAINING_JOB_NAME rank $REPLICA_RANK; cat /opt/ml/input/config/hyperparameters.json; echo;"
        " cp /opt/ml/input/data/train/part-1.txt /opt/ml/model/; ls /opt/ml"
    )
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/data/"}
    client.create_training_job(
        **request(
            script=script,
            Environment={"REPLICA_RANK": "3"},
            HyperParameters={"steps": "7"},
            InputDataConfig=[{"ChannelName": "train", "DataSource": {"S3DataSource": source}}],
        )
    )

    job = wait(client, "Completed", "Failed")

    assert job["TrainingJobStatus"] == "Completed", job.get("FailureReason")
    seen = [each["Status"] for each in job["SecondaryStatusTransitions"]]
    assert seen == ["Starting", "Pending", "Downloading", "Training", "Uploading", "Completed"]
    assert all("EndTime" in each for each in job["SecondaryStatusTransitions"])
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/out/{NAME}/output/model.tar.gz"
    body = emulator.client("s3").get_object(Bucket=BUCKET, Key=f"out/{NAME}/output/model.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        assert tar.getnames() == ["part-1.txt"]
    lines = logged(emulator)
    assert lines[0] == f"{NAME} rank 3"
    assert json.loads(lines[1]) == {"steps": "7"}
    assert {"checkpoints", "code", "input", "model", "output"} == set(lines[2:])
    assert not Path("/opt/ml").exists()
    assert server.service.problems == []


def test_a_failed_container_tells_why_and_with_which_code(client: Any) -> None:
    client.create_training_job(**request(script="echo no data > /opt/ml/output/failure; exit 78"))

    job = wait(client, "Failed", "Completed")

    assert job["FailureReason"] == "AlgorithmError: no data\n, exit code: 78"
    assert job["SecondaryStatus"] == "Failed"


def test_stop_sends_sigterm_to_process_1_and_then_kills(client: Any, emulator: Emulator) -> None:
    client.create_training_job(**request("diloco-kind", "trap 'echo got it; exit 0' TERM; while :; do sleep 0.1; done"))
    client.create_training_job(**request("diloco-deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done"))
    for name in ("diloco-kind", "diloco-deaf"):
        wait(client, "InProgress", name=name, secondary="Training")
    while not logged_or_none(emulator, "diloco-deaf"):
        time.sleep(0.05)

    for name in ("diloco-kind", "diloco-deaf"):
        client.stop_training_job(TrainingJobName=name)
        assert wait(client, "Stopping", "Stopped", name=name)

    for name in ("diloco-kind", "diloco-deaf"):
        assert wait(client, "Stopped", "Failed", "Completed", name=name)["SecondaryStatus"] == "Stopped"
    assert logged(emulator, "diloco-kind") == ["got it"]
    with pytest.raises(ClientError, match="is in status Stopped"):
        client.stop_training_job(TrainingJobName="diloco-kind")


def logged_or_none(emulator: Emulator, name: str) -> list[str]:
    try:
        return logged(emulator, name)
    except ClientError:
        return []


def test_a_spot_interruption_starts_the_same_job_again_with_its_checkpoints(
    client: Any, server: SageMakerServer
) -> None:
    script = "cd /opt/ml/checkpoints; [ -e seen ] && exit 0; touch seen; sleep 60"
    client.create_training_job(
        **request(
            script=script,
            EnableManagedSpotTraining=True,
            StoppingCondition={"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
            CheckpointConfig={"S3Uri": f"s3://{BUCKET}/checkpoints/r0"},
        )
    )
    wait(client, "InProgress", secondary="Training")
    job = server.service.job(NAME)
    while not (job.folder / "ml" / "checkpoints" / "seen").exists():
        time.sleep(0.02)
    server.service.emulator.client("s3").put_object(Bucket=BUCKET, Key="checkpoints/r0/seen", Body=b"")  # type: ignore[union-attr]

    server.service.interrupt(job)

    seen = [each["Status"] for each in wait(client, "Completed", "Failed")["SecondaryStatusTransitions"]]
    assert seen[-7:] == ["Training", "Interrupted", "Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert job.restarts == 1


def test_an_internal_error_is_retried_as_often_as_the_strategy_says(client: Any, server: SageMakerServer) -> None:
    client.create_training_job(**request(script="sleep 60", RetryStrategy={"MaximumRetryAttempts": 1}))
    job = server.service.job(NAME)
    for restarts in (0, 1):
        while not (job.restarts == restarts and job.secondary == "Training"):
            time.sleep(0.02)
        server.service.interrupt(job, "internal")

    failed = wait(client, "Failed")

    assert failed["FailureReason"].startswith("InternalServerError")
    assert "Restarting" in [each["Status"] for each in failed["SecondaryStatusTransitions"]]


def test_lacking_capacity_takes_the_next_preference_or_fails(client: Any, server: SageMakerServer) -> None:
    server.service.faults.no_capacity["ml.g5.xlarge"] = 2
    preferences = [{"InstanceType": "ml.g5.xlarge"}, {"InstanceType": "ml.g6.xlarge"}]
    client.create_training_job(
        **request("diloco-one", ResourceConfig={"InstanceType": "ml.g5.xlarge", "InstanceCount": 1})
    )
    client.create_training_job(
        **request("diloco-two", ResourceConfig={"InstancePreferences": preferences, "InstanceCount": 1})
    )

    assert wait(client, "Failed", "Completed", name="diloco-one")["FailureReason"].startswith("CapacityError")
    assert wait(client, "Failed", "Completed", name="diloco-two")["ResourceConfig"]["SelectedInstanceType"] == (
        "ml.g6.xlarge"
    )


def test_warm_pools_are_kept_within_the_quota_reused_and_released(client: Any, server: SageMakerServer) -> None:
    server.service.faults.quotas["ml.m5.xlarge for training warm pool usage"] = 1
    resources = {**request()["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    client.create_training_job(**request("diloco-1", ResourceConfig=resources))
    assert wait(client, "Completed", name="diloco-1")["WarmPoolStatus"]["Status"] == "Available"

    client.create_training_job(**request("diloco-2", ResourceConfig=resources))
    second = wait(client, "Completed", name="diloco-2")

    assert "Pending" not in [each["Status"] for each in second["SecondaryStatusTransitions"]]
    first = client.describe_training_job(TrainingJobName="diloco-1")
    assert first["WarmPoolStatus"]["ReusedByJob"] == "diloco-2"
    client.update_training_job(TrainingJobName="diloco-2", ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    assert client.describe_training_job(TrainingJobName="diloco-2")["WarmPoolStatus"]["Status"] == "Terminated"
    with pytest.raises(ClientError, match="Available"):
        client.update_training_job(TrainingJobName="diloco-2", ResourceConfig={"KeepAlivePeriodInSeconds": 60})


def test_without_a_quota_a_warm_pool_is_silently_not_kept(client: Any) -> None:
    resources = {**request()["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    client.create_training_job(**request(ResourceConfig=resources))

    assert "WarmPoolStatus" not in wait(client, "Completed", "Failed")


def test_the_longest_run_time_ends_a_job(client: Any) -> None:
    client.create_training_job(**request(script="sleep 60", StoppingCondition={"MaxRuntimeInSeconds": 1}))

    assert wait(client, "Stopped", "Failed")["SecondaryStatus"] == "MaxRuntimeExceeded"


CREDENTIALS = (
    "import boto3, os; c = boto3.client('sts', os.environ['AWS_REGION'], endpoint_url=os.environ['EMULATOR']); "
    "print(c.get_caller_identity()['Arn'].split('/')[1])"
)


def test_the_container_has_the_credentials_of_its_role(
    emulator: Emulator, serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]
) -> None:
    make(emulator)
    server = serve(emulator=emulator, container_env={"EMULATOR": emulator.endpoint_url})
    made = request()
    made["AlgorithmSpecification"]["ContainerEntrypoint"] = ["python", "-c"]
    made["AlgorithmSpecification"]["ContainerArguments"] = [CREDENTIALS]
    client = client_of(server)
    client.create_training_job(**made)

    job = wait(client, "Completed", "Failed")

    assert job["TrainingJobStatus"] == "Completed", (job, logged_or_none(emulator, NAME), server.service.problems)
    assert logged(emulator) == ["diloco-jobs-standin-twin"]


@pytest.mark.parametrize(
    ("statements", "name", "expected"),
    [
        ([LOGS], NAME, "Access denied to OutputDataConfig S3 bucket"),
        ([STORAGE, LOGS], "other-r0", "Could not assume role"),
    ],
)
def test_a_role_that_is_short_of_something_is_refused(
    emulator: Emulator,
    serve: Callable[..., SageMakerServer],
    client_of: Callable[..., Any],
    statements: list[dict[str, Any]],
    name: str,
    expected: str,
) -> None:
    make(emulator, statements)

    with pytest.raises(ClientError, match=expected):
        client_of(serve(emulator=emulator)).create_training_job(**request(name))


def test_a_role_that_may_not_write_fails_late_and_logs_that_can_not_be_written_are_noted(
    emulator: Emulator, serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]
) -> None:
    make(emulator, [{**STORAGE, "Action": ["s3:ListBucket"]}])
    server = serve(emulator=emulator)
    client = client_of(server)
    client.create_training_job(**request(script="echo hello; touch /opt/ml/model/weights"))

    assert "AccessDenied" in wait(client, "Failed", "Completed")["FailureReason"]
    assert any("CreateLogGroup" in problem for problem in server.service.problems)
