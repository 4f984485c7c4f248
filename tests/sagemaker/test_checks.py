"""What a launcher asks AWS before it starts: quotas by name, the role, the bucket's region."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco import access
from diloco.errors import ConfigurationError
from diloco.executors.sagemaker_checks import LONGEST_RUN_QUOTA, Findings, check, usage_quota, warm_quota
from diloco.executors.sagemaker_clients import Clients
from diloco.executors.sagemaker_request import training_job
from tests.sagemaker.test_limits import GOOD, spec
from tests.support.iam_authority import Authority
from tests.support.quotas import QuotaServer
from tests.support.sagemaker.ministack import ministack
from tests.support.tls_proxy import FrontEnd

if TYPE_CHECKING:
    from diloco.executors.sagemaker_request import JobSettings
    from tests.support.sagemaker import SageMakerServer, Service

BUCKET = "sagemaker-checked"
URI = f"s3://{BUCKET}/rendezvous/run-1"
USAGE = usage_quota("ml.m5.xlarge")
WARM = warm_quota("ml.m5.xlarge")
ENOUGH = {USAGE: 10.0, WARM: 10.0, LONGEST_RUN_QUOTA: 432_000.0}

Ask = Callable[..., Findings]


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A bucket, and a role for it; the environment reaches them."""
    folder = tmp_path_factory.mktemp("checks")
    with (
        ministack(folder) as emulator,
        FrontEnd(emulator.endpoint_url, authority=Authority(emulator.client("iam"))) as front,
    ):
        emulator.client("s3").create_bucket(Bucket=BUCKET)
        place = access.Place("us-east-1", "123456789012")
        iam = emulator.client("iam")
        trust = json.dumps(access.sagemaker_trust(place, "diloco"))
        for name, bucket in (("diloco-jobs", BUCKET), ("diloco-short", "another-bucket")):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
            policy = access.sagemaker_role_policy(
                place, access.Storage(bucket, ("rendezvous",)), job_name_prefix="diloco", repository_arn=None
            )
            iam.put_role_policy(RoleName=name, PolicyName="jobs", PolicyDocument=json.dumps(policy))
        yield {
            "AWS_ENDPOINT_URL": front.endpoint_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "NO_PROXY": "127.0.0.1",
        }


@pytest.fixture
def service(serve: Callable[..., SageMakerServer]) -> Service:
    """The account's jobs, which do not really run."""
    return serve().service


@pytest.fixture
def ask(account: dict[str, str], monkeypatch: pytest.MonkeyPatch, service: Service) -> Iterator[Ask]:
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", service.url)
    with ExitStack() as stack:

        def asked(
            quotas: dict[str, float] | None = None, *, replicas: int = 4, uri: str = URI, **changes: Any
        ) -> Findings:
            found = stack.enter_context(QuotaServer(ENOUGH if quotas is None else quotas))
            monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", found.endpoint_url)
            settings: JobSettings = replace(GOOD, **changes)
            return check(Clients("us-east-1"), settings, replicas=replicas, rendezvous_uri=uri)

        yield asked


def test_where_all_is_well_nothing_is_said(ask: Ask) -> None:
    findings = ask(keep_alive=600)

    assert (findings.problems, findings.warnings) == ([], [])
    assert findings.quotas == ENOUGH
    findings.raise_problems()


@pytest.mark.parametrize(
    ("quotas", "changes", "problem"),
    [
        ({USAGE: 3.0}, {}, f"the quota {USAGE!r} is 3 and 4 are needed"),
        ({"ml.m5.xlarge for spot training job usage": 0.0}, {"spot": True}, "is 0 and 4 are needed"),
        ({WARM: 2.0}, {"keep_alive": 600}, f"--keep-alive: the quota {WARM!r} is 2 and 4 are needed"),
        ({LONGEST_RUN_QUOTA: 432_000.0}, {"max_runtime": 432_001}, "--max-runtime 432001 s is above the quota"),
    ],
)
def test_a_quota_that_is_too_low_ends_the_launch(
    ask: Ask, quotas: dict[str, float], changes: dict[str, Any], problem: str
) -> None:
    findings = ask(ENOUGH | quotas, **changes)

    assert len(findings.problems) == 1
    assert problem in findings.problems[0]
    with pytest.raises(ConfigurationError, match=r"raise it in Service Quotas|raise it, or use"):
        findings.raise_problems()


def test_one_of_several_types_is_enough(ask: Ask) -> None:
    findings = ask(ENOUGH | {usage_quota("ml.g5.xlarge"): 0.0}, instance_types=("ml.g5.xlarge", "ml.m5.xlarge"))

    assert findings.problems == []
    assert "ml.g5.xlarge" in findings.warnings[0]


def test_a_quota_that_is_not_known_is_a_warning(ask: Ask) -> None:
    findings = ask({LONGEST_RUN_QUOTA: 432_000.0})

    assert findings.problems == []
    assert f"the quota {USAGE!r} is not known" in findings.warnings[0]


def occupy(service: Service, *, count: int, **changes: Any) -> None:
    """Let jobs of another run run."""
    for rank in range(count):
        made = training_job(replace(GOOD, **{"run_id": "run-2"} | changes), spec(rank), 1)
        service.call("CreateTrainingJob", made, "test")


def test_instances_of_other_running_jobs_count_against_the_quota(ask: Ask, service: Service) -> None:
    occupy(service, count=3)
    occupy(service, count=3, run_id="run-3", spot=True)  # another quota's
    occupy(service, count=3, run_id="run-4", instance_types=("ml.c5.xlarge",))
    occupy(service, count=3, run_id="run-1")  # this run's own: they are adopted
    occupy(service, count=1, run_id="run-5")
    service.job("diloco-run-5-r0-s1").enter("Completed", "Completed", "")
    assert ask(ENOUGH | {USAGE: 7.0}).in_use == {USAGE: 3}
    assert ask(ENOUGH | {USAGE: 7.0}).problems == []

    findings = ask(ENOUGH | {USAGE: 6.0})

    [problem] = findings.problems
    assert f"the quota {USAGE!r} is 6, other running jobs use 3 of it, and 4 are needed: wait for them" in problem


def test_a_type_that_is_used_up_is_a_warning_if_another_has_room(ask: Ask, service: Service) -> None:
    occupy(service, count=3)
    types = ("ml.m5.xlarge", "ml.c5.xlarge")

    findings = ask(ENOUGH | {USAGE: 6.0, usage_quota("ml.c5.xlarge"): 6.0}, instance_types=types)

    assert findings.problems == []
    assert f"the quota {USAGE!r} is 6, other running jobs use 3" in findings.warnings[0]


def test_jobs_that_can_not_be_listed_are_a_warning(ask: Ask, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.executors.sagemaker_clients.ATTEMPTS", 1)
    service.faults.rates["ListTrainingJobs"], service.faults.burst = 0.01, 0

    findings = ask()

    assert findings.problems == []
    assert "running jobs could not be listed" in findings.warnings[0]
    assert findings.in_use == {}


def test_quotas_that_can_not_be_read_are_a_warning(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", "http://127.0.0.1:9")
    monkeypatch.setattr("diloco.executors.sagemaker_clients.ATTEMPTS", 1)

    findings = check(Clients("us-east-1"), GOOD, replicas=4, rendezvous_uri=URI)

    assert findings.problems == []
    assert "quotas could not be read" in findings.warnings[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"role_arn": "arn:aws:iam::123456789012:role/nobody"}, "role/nobody does not exist"),
        (
            {"role_arn": "arn:aws:iam::123456789012:role/diloco-short"},
            "diloco-short may not s3:GetObject, s3:Put",
        ),
        ({"uri": "s3://nowhere-at-all/rendezvous/run-1"}, "the bucket nowhere-at-all does not exist"),
    ],
)
def test_a_role_or_bucket_that_can_not_work_ends_the_launch(ask: Ask, changes: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in ask(**changes).problems)


def test_a_bucket_of_another_region_ends_the_launch(ask: Ask) -> None:
    findings = ask(region="eu-west-1")

    assert any("is in us-east-1 and the jobs are in eu-west-1" in problem for problem in findings.problems)
