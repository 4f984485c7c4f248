"""moto's SageMaker as a second opinion: it answers Create, Describe and List as the stand-in does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.sagemaker.standin_requests import request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.sagemaker import SageMakerServer

TAGS = [{"Key": "run", "Value": "r1"}, {"Key": "rank", "Value": "0"}]


@pytest.fixture
def moto() -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    session: Any = boto3.session.Session("test", "test", region_name="us-east-1")
    yield session.client("sagemaker", endpoint_url=f"http://{host}:{port}")
    server.stop()


def answers(client: Any) -> dict[str, Any]:
    """What a service says of one job, without what differs from call to call."""
    created = client.create_training_job(**request(Tags=TAGS))
    described = client.describe_training_job(TrainingJobName="diloco-r0-s1")
    listed = client.list_training_jobs(NameContains="diloco-")["TrainingJobSummaries"]
    same = ("TrainingJobName", "TrainingJobArn", "RoleArn", "StoppingCondition")
    sent = request()["AlgorithmSpecification"]  # moto adds the metrics of built-in algorithms
    return {
        "created": created["TrainingJobArn"],
        "described": {name: described[name] for name in same},
        "algorithm": {name: described["AlgorithmSpecification"][name] for name in sent},
        "output": described["OutputDataConfig"]["S3OutputPath"],
        "resources": described["ResourceConfig"],
        "listed": [(entry["TrainingJobName"], entry["TrainingJobArn"]) for entry in listed],
        "tags": client.list_tags(ResourceArn=created["TrainingJobArn"])["Tags"],
    }


def test_both_say_the_same(moto: Any, serve: Callable[..., SageMakerServer], client_of: Callable[..., Any]) -> None:
    assert answers(client_of(serve())) == answers(moto)
