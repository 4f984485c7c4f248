"""Every limit of the API is found before the first call, all in one message; the tests' SageMaker says it is right."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError
from diloco.executors import sagemaker_limits as limits
from diloco.executors.base import ReplicaSpec
from diloco.executors.sagemaker import SageMakerExecutor
from diloco.executors.sagemaker_request import JobSettings, job_name, parse_job_name, training_job
from tests.support.sagemaker import ApiError, Service, rules, shapes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.sagemaker import SageMakerServer

GOOD = JobSettings(
    run_id="run-1",
    region="us-east-1",
    account="123456789012",
    image_uri=f"123456789012.dkr.ecr.us-east-1.amazonaws.com/diloco/trainer@sha256:{'0' * 64}",
    role_arn="arn:aws:iam::123456789012:role/diloco-jobs",
    output_uri="s3://sagemaker-bucket/output",
    tags={"team": "research"},
)
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"  # noqa: S105 - an ARN


def spec(rank: int = 0, **changes: Any) -> ReplicaSpec:
    values: dict[str, Any] = {
        "rank": rank,
        "world_size": 4,
        "rendezvous_uri": "s3://sagemaker-bucket/rendezvous/run-1",
        "trainer_module": "diloco.training",
        "trainer_fn": "diloco_train",
        "trainer_kwargs": {"steps": 4},
        "exchange": {"policy": "skip", "timeout": 1800.0},
    }
    return ReplicaSpec(**(values | changes))


VARIANTS = {
    "plain": GOOD,
    "spot": replace(GOOD, spot=True, instance_types=("ml.g5.2xlarge", "ml.g6.2xlarge")),
    "preferences": replace(GOOD, instance_types=("ml.g5.2xlarge", "ml.m5.xlarge")),
    "warm": replace(GOOD, keep_alive=1800),
    "kms and vpc": replace(GOOD, kms_key_arn=KEY, subnet_ids=("subnet-1",), security_group_ids=("sg-1",)),
    "kms on local disks": replace(GOOD, kms_key_arn=KEY, instance_types=("ml.g5.xlarge",)),
    "data and token": replace(GOOD, data_uri="s3://sagemaker-bucket/texts/", token_secret_arn=SECRET, model="all"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_built_is_what_the_service_accepts(name: str) -> None:
    settings = VARIANTS[name]
    assert list(limits.problems_of(settings, [spec(0), spec(3)])) == []
    for rank in (0, 3):
        request = training_job(settings, spec(rank), 1)
        shapes.check("CreateTrainingJob", request)
        rules.check_create(request)
        assert request["EnableNetworkIsolation"] is False
        assert request["ResourceConfig"]["InstanceCount"] == 1
        assert request["Environment"]["REPLICA_RANK"] == str(rank)


def test_ranks_differ_only_in_what_is_their_own() -> None:
    first, second = (training_job(GOOD, spec(rank), 1) for rank in (0, 1))
    own = ("TrainingJobName", "AlgorithmSpecification", "OutputDataConfig", "CheckpointConfig", "Environment", "Tags")
    assert {name for name in first if first[name] != second[name]} == set(own)
    assert first["AlgorithmSpecification"]["ContainerArguments"][0] == "train"


def test_a_gpu_s_name_becomes_a_type_of_the_backend_s() -> None:
    assert training_job(GOOD, spec(gpu="A10G"), 1)["ResourceConfig"]["InstanceType"] == "ml.g5.2xlarge"
    assert training_job(GOOD, spec(), 1)["ResourceConfig"]["InstanceType"] == "ml.m5.xlarge"


def test_names_lead_back_to_rank_and_submission() -> None:
    assert parse_job_name(job_name(GOOD, 17, 3)) == (17, 3)
    assert parse_job_name("somebody-elses") is None


MANY = {f"name{number}": "x" for number in range(48)}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "name too long": ({"run_id": "r" * 40, "prefix": "p" * 20}, {}, "job name .* has 67 characters: at most 63"),
    "name's pattern": ({"prefix": "my_jobs"}, {}, "job name 'my_jobs.*does not have the form"),
    "environment entries": ({}, {"env": {f"A{n}": "" for n in range(100)}}, "environment 10[0-9] of them: at most 100"),
    "environment value": ({}, {"env": {"A": "v" * 513}}, "environment .* has 513 characters: at most 512"),
    "environment name too long": ({}, {"env": {"A" * 513: "v"}}, "environment .* has 513 characters: at most 512"),
    "environment name": ({}, {"env": {"A-B": "v"}}, "environment 'A-B': does not have the form"),
    "argument": ({}, {"rendezvous_uri": f"s3://b/{'k' * 240}"}, r"argument .* has 2\d\d characters: at most 256"),
    "image": ({"image_uri": "i" * 256}, {}, "imageUri .* has 256 characters: at most 255"),
    "tags": ({"tags": MANY}, {}, r"tags 5\d of them: at most 50"),
    "tag's value": ({"tags": {"team": "a,b"}}, {}, "tag 'a,b': does not have the form"),
    "runtime": ({"max_runtime": 29 * 86_400}, {}, r"--max-runtime 2505600 s is above the 2419200 s \(28 days\)"),
    "runtime of nothing": ({"max_runtime": 0}, {}, "--max-runtime 0: at least 1"),
    "wait below runtime": ({"spot": True, "max_runtime": 90, "max_wait": 60}, {}, "--max-wait 60 s is below"),
    "wait without spot": ({"max_wait": 60}, {}, "--max-wait is for spot jobs"),
    "keep-alive": ({"keep_alive": 21_601}, {}, "--keep-alive 21601: at most 21600"),
    "warm spot": ({"spot": True, "keep_alive": 60}, {}, "--keep-alive does not go with --spot"),
    "volume": ({"volume_gb": 0}, {}, "--volume-gb 0: ml.m5.xlarge has no disk of its own"),
    "spelling": (
        {"instance_types": ("ml.g5.2xlrage",)},
        {},
        r"'ml.g5.2xlrage': is none .*did you mean ml.g5.2xlarge\?",
    ),
    "spelling of the second": (
        {"instance_types": ("ml.g5.xlarge", "ml.g6.xlrage"), "spot": True},
        {},
        r"did you mean ml.g6.xlarge\?",
    ),
    "several GPUs": (
        {"instance_types": ("ml.g5.12xlarge",)},
        {},
        "ml.g5.12xlarge has 4 GPUs, and the trainer uses one",
    ),
    "unknown GPUs": ({"instance_types": ("ml.g7.12xlarge",)}, {}, "has an unknown number of GPUs"),
    "Trainium": ({"instance_types": ("ml.trn1.2xlarge",)}, {}, "is Trainium"),
    "no type": ({"instance_types": ()}, {}, "no instance type"),
    "type twice": ({"instance_types": ("ml.m5.large", "ml.m5.large")}, {}, "names one twice"),
    "six types": (
        {"instance_types": (*(f"ml.m5.{size}xlarge" for size in ("", 2, 4, 12, 24)), "ml.m5.large")},
        {},
        "--instance-types 6 of them: at most 5",
    ),
    "role": ({"role_arn": "arn:aws:iam::123456789012:user/me"}, {}, "sagemakerRoleArn .*does not have the form"),
    "role of another account": ({"role_arn": "arn:aws:iam::999999999999:role/jobs"}, {}, "the role is of account 9999"),
    "image elsewhere": (
        {"image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/x:1"},
        {},
        "the image is in eu-west-1 and the jobs are in us-east-1",
    ),
    "token itself": ({"token_secret_arn": "hf_abcdef"}, {}, "must be the ARN of a Secrets Manager secret"),
    "token elsewhere": (
        {"token_secret_arn": SECRET.replace("us-east-1", "eu-west-1")},
        {},
        "the secret is in eu-west-1",
    ),
    "data": ({"data_uri": "texts/*.txt"}, {}, "--data texts/"),
    "half a VPC": ({"subnet_ids": ("subnet-1",)}, {}, "subnets without security groups"),
    "gpu": ({}, {"gpu": "A1000"}, "gpu A1000: known are T4, A10G"),
    "metrics never": ({"output_uri": "file:///out"}, {}, "outputUri .*does not have the form"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_limit_is_found_before_any_call(
    name: str, serve: Callable[..., SageMakerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, of_spec, expected = BAD[name]
    server = serve()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    executor = SageMakerExecutor(replace(GOOD, **changes))

    with pytest.raises(ConfigurationError, match=re.compile(expected, re.DOTALL)) as found:
        executor.launch_replicas([spec(**of_spec)])

    assert "\n" not in str(found.value)
    assert server.service.received == 0


REFUSED_BY_THE_SERVICE = {
    *("name too long", "name's pattern", "environment entries", "environment value", "environment name"),
    *("environment name too long", "argument"),
    *("image", "tags", "tag's value", "runtime", "runtime of nothing", "wait below runtime", "keep-alive", "warm spot"),
    *("volume", "spelling", "six types", "role", "type twice", "metrics never"),
}
"""The others are refused because they would fail later, or cost more than they give."""


@pytest.mark.parametrize("name", sorted(REFUSED_BY_THE_SERVICE))
def test_the_service_would_have_refused_it_too(name: str, tmp_path: Path) -> None:
    changes, of_spec, _ = BAD[name]
    settings = replace(GOOD, **changes)

    with pytest.raises(ApiError):
        Service(tmp_path).call("CreateTrainingJob", training_job(settings, spec(**of_spec), 1), "test")


def test_all_problems_are_in_one_message() -> None:
    settings = replace(GOOD, max_runtime=29 * 86_400, instance_types=("ml.p4d.24xlarge",), tags=MANY)

    with pytest.raises(
        ConfigurationError, match=r"3 problems: \(1\) tags .*\(2\) --max-runtime .*\(3\) --instance-type"
    ):
        limits.check(settings, [spec(rank) for rank in range(4)])


def test_a_trainer_that_uses_all_gpus_may_have_several() -> None:
    settings = replace(GOOD, instance_types=("ml.g5.12xlarge",), uses_all_gpus=True)

    assert list(limits.problems_of(settings, [spec()])) == []


def test_a_cost_can_only_be_watched_where_the_price_is_known() -> None:
    settings = replace(GOOD, instance_types=("ml.m5.xlarge", "ml.r5d.xlarge"))
    with pytest.raises(ConfigurationError, match=r"--max-cost 3: the price of ml\.r5d\.xlarge is not in the table"):
        SageMakerExecutor(settings, max_cost=3.0).check([spec(0)])
