"""The tests' SageMaker refuses what the real one documents that it refuses."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.sagemaker.standin_requests import VALID, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sagemaker import SageMakerServer

ALGORITHM = VALID["AlgorithmSpecification"]
RESOURCES = VALID["ResourceConfig"]
TAG = {"Key": "run", "Value": "x"}


@pytest.fixture
def client(serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]) -> Any:
    return client_of(serve())


def test_accepts_a_valid_request(client: Any) -> None:
    arn = client.create_training_job(**request())["TrainingJobArn"]

    assert arn == "arn:aws:sagemaker:us-east-1:123456789012:training-job/diloco-r0-s1"
    assert client.describe_training_job(TrainingJobName="diloco-r0-s1")["TrainingJobStatus"] == "InProgress"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"RoleArn": None}, "at 'roleArn'.*must not be null"),
        ({"OutputDataConfig": {}}, "outputDataConfig.s3OutputPath.*must not be null"),
        ({"RoleArn": "diloco"}, "greater than or equal to 20.*regular expression"),
        ({"ResourceConfig": {**RESOURCES, "InstanceType": "ml.g5.3xlarge"}}, "enum value set"),
        ({"ResourceConfig": {**RESOURCES, "KeepAlivePeriodInSeconds": 21601}}, "less than or equal to 21600"),
        ({"AlgorithmSpecification": {**ALGORITHM, "TrainingImage": "i" * 256}}, "less than or equal to 255"),
        ({"AlgorithmSpecification": {**ALGORITHM, "TrainingInputMode": "Fast"}}, "enum value set"),
        ({"AlgorithmSpecification": {**ALGORITHM, "ContainerArguments": ["a" * 257]}}, "less than or equal to 256"),
        ({"AlgorithmSpecification": {**ALGORITHM, "ContainerArguments": []}}, "greater than or equal to 1"),
        ({"AlgorithmSpecification": {**ALGORITHM, "ContainerArguments": ["a"] * 101}}, "less than or equal to 100"),
        ({"Environment": {"A": "v" * 513}}, "less than or equal to 512"),
        ({"Environment": {f"A{n}": "" for n in range(101)}}, "less than or equal to 100"),
        ({"Environment": {"1A": ""}}, "regular expression"),
        ({"Tags": [{"Key": f"k{n}", "Value": ""} for n in range(51)]}, "less than or equal to 50"),
        ({"Tags": [{"Key": "k", "Value": "a,b"}]}, "regular expression"),
        ({"Tags": [TAG, TAG]}, "Tag keys must be unique"),
        ({"Tags": [{"Key": "aws:x", "Value": ""}]}, "must not begin with aws:"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 28 * 86400 + 1}}, "must not exceed"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}}, "only allowed when"),
        ({"EnableManagedSpotTraining": True}, "MaxWaitTimeInSeconds is required"),
        (
            {
                "EnableManagedSpotTraining": True,
                "StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 8},
            },
            "equal to or greater than MaxRuntimeInSeconds",
        ),
        (
            {
                "EnableManagedSpotTraining": True,
                "StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9},
                "ResourceConfig": {**RESOURCES, "KeepAlivePeriodInSeconds": 60},
            },
            "not supported with managed spot",
        ),
        (
            {"ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeKmsKeyId": "key"}},
            "local storage",
        ),
        ({"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1}}, "VolumeSizeInGB"),
        ({"ResourceConfig": {**RESOURCES, "InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}]}}, "exclusive"),
        ({"ResourceConfig": {"InstanceCount": 1, "VolumeSizeInGB": 1}}, "needs InstanceType"),
        ({"RetryStrategy": {"MaximumRetryAttempts": 31}}, "less than or equal to 30"),
        ({"InputDataConfig": [{"ChannelName": "a b", "DataSource": {}}]}, "regular expression"),
    ],
)
def test_refuses(client: Any, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ClientError, match=f"(?s){expected}") as refused:
        client.create_training_job(**request(**fields))

    assert refused.value.response["Error"]["Code"] == "ValidationException"
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_lists_every_violated_constraint(client: Any) -> None:
    with pytest.raises(ClientError, match=r"2 validation errors detected.*roleArn.*trainingJobName"):
        client.create_training_job(**request(name="a_b", RoleArn=None))


def test_refuses_unknown_members_and_wrong_types(client: Any, serve: Callable[..., SageMakerServer]) -> None:
    server = serve()
    for wrong in ({"Colour": "red"}, {"RoleArn": 3}, {"EnableNetworkIsolation": "no"}):
        with pytest.raises(Exception, match=r"no member Colour|must be of type"):
            server.service.call("CreateTrainingJob", request(**wrong), "test")


def test_names_are_unique_until_deleted(client: Any) -> None:
    client.create_training_job(**request())

    with pytest.raises(client.exceptions.ResourceInUse, match="unique"):
        client.create_training_job(**request())
    with pytest.raises(client.exceptions.ResourceInUse):
        client.delete_training_job(TrainingJobName="diloco-r0-s1")
    client.stop_training_job(TrainingJobName="diloco-r0-s1")
    client.delete_training_job(TrainingJobName="diloco-r0-s1")
    client.create_training_job(**request())


@pytest.mark.parametrize("operation", ["describe_training_job", "stop_training_job", "delete_training_job"])
def test_a_missing_job_is_a_validation_error(client: Any, operation: str) -> None:
    with pytest.raises(ClientError, match="Requested resource not found") as refused:
        getattr(client, operation)(TrainingJobName="nobody")

    assert refused.value.response["Error"]["Code"] == "ValidationException"


def test_throttles_above_the_rate(serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]) -> None:
    server = serve()
    server.service.faults.rates["CreateTrainingJob"] = 0.001
    client = client_of(server)

    for number in range(server.service.faults.burst):
        client.create_training_job(**request(f"job-{number}"))
    with pytest.raises(ClientError, match="Rate exceeded") as refused:
        client.create_training_job(**request("job-last"))

    assert refused.value.response["Error"]["Code"] == "ThrottlingException"
    assert server.service.faults.throttled == 1


def test_quotas_name_themselves(serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]) -> None:
    server = serve()
    server.service.faults.quotas["ml.m5.xlarge for training job usage"] = 1
    client = client_of(server)
    client.create_training_job(**request("job-1"))

    with pytest.raises(client.exceptions.ResourceLimitExceeded, match=r"'ml\.m5\.xlarge for training job usage' is 1"):
        client.create_training_job(**request("job-2"))


def test_a_lost_answer_leaves_the_job(serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]) -> None:
    server = serve()
    server.service.faults.lost_answers = 1
    client = client_of(server)

    with pytest.raises(Exception, match="onnection"):
        client.create_training_job(**request())
    assert client.describe_training_job(TrainingJobName="diloco-r0-s1")["TrainingJobStatus"] == "InProgress"


def test_lists_in_pages_that_are_cut_before_they_are_filtered(client: Any) -> None:
    for number in range(5):
        client.create_training_job(**request(f"job-{number}"))
    client.stop_training_job(TrainingJobName="job-4")

    first = client.list_training_jobs(MaxResults=2, StatusEquals="InProgress", NameContains="job-")
    assert [job["TrainingJobName"] for job in first["TrainingJobSummaries"]] == ["job-3"]
    pages = client.get_paginator("list_training_jobs").paginate(PaginationConfig={"PageSize": 2})
    assert sum(len(page["TrainingJobSummaries"]) for page in pages) == 5


def test_tags_are_kept_and_added(client: Any) -> None:
    arn = client.create_training_job(**request(Tags=[TAG]))["TrainingJobArn"]

    client.add_tags(ResourceArn=arn, Tags=[{"Key": "more", "Value": "y"}])

    assert client.list_tags(ResourceArn=arn)["Tags"] == [TAG, {"Key": "more", "Value": "y"}]


def test_only_signed_calls_are_answered(serve: Callable[..., SageMakerServer]) -> None:
    connection = HTTPConnection(serve().url.removeprefix("http://"))
    connection.request("POST", "/", body=b"{}", headers={"X-Amz-Target": "SageMaker.ListTrainingJobs"})

    assert connection.getresponse().status == 403
    connection.close()
