"""Quotas by name, on the real engine's dynamic provider against a stand-in for Service Quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.quotas import QuotaServer, sagemaker_quotas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.infra.conftest import MakeStack

WARM = "ml.g5.xlarge for training warm pool usage"
JOB = "ml.g5.xlarge for training job usage"
WANTED = [{"instanceType": "ml.g5.xlarge", "training": 4, "warmPool": 8}]


@pytest.fixture
def service() -> Iterator[QuotaServer]:
    """Service Quotas of an account that may run 4 jobs, none of them warm."""
    with QuotaServer(sagemaker_quotas(ml_g5_xlarge_job=4)) as server:
        yield server


def test_a_quota_is_asked_for_once_and_only_where_it_is_too_low(
    make_stack: MakeStack, configured: Callable[..., dict[str, Any]], service: QuotaServer
) -> None:
    stack = make_stack(_config(service))
    stack.up().check()

    told = {quota["name"]: quota for quota in stack.outputs()["quotas"]}
    assert (told[JOB]["status"], told[JOB]["value"]) == ("enough", 4)
    assert (told[WARM]["value"], told[WARM]["wanted"]) == (0, 8)
    assert [(change.quota.name, change.desired) for change in service.changes] == [(WARM, 8)]
    assert told[WARM]["requestId"] == service.changes[0].id

    # Nobody has looked at it yet: found, reported, and not asked for again.
    stack.up().check()
    assert service.calls["RequestServiceQuotaIncrease"] == 1

    service.settle("APPROVED")
    stack.refresh().check()
    stack.up().check()
    told = {quota["name"]: quota for quota in stack.outputs()["quotas"]}
    assert (told[WARM]["status"], told[WARM]["value"]) == ("enough", 8)
    stack.preview("--expect-no-changes").check()

    # Never lowered: not by a smaller wish, not by destroy.
    stack.configure(configured(**_config(service, [{"instanceType": "ml.g5.xlarge", "warmPool": 2}])))
    stack.up().check()
    stack.destroy().check()
    assert service.quotas[WARM].value == 8
    assert service.calls["RequestServiceQuotaIncrease"] == 1


def test_a_request_of_somebody_else_is_found(make_stack: MakeStack, service: QuotaServer) -> None:
    service.decide = "CASE_OPENED"
    code = service.quotas[WARM].code
    service.answer(
        "RequestServiceQuotaIncrease", {"ServiceCode": "sagemaker", "QuotaCode": code, "DesiredValue": 16.0}, "other"
    )
    stack = make_stack(_config(service))

    stack.up().check()

    told = {quota["name"]: quota for quota in stack.outputs()["quotas"]}
    assert told[WARM]["status"] == "pending"
    assert told[WARM]["requestId"] == service.changes[0].id
    assert len(service.changes) == 1


def test_a_refused_request_fails_with_name_and_fix(make_stack: MakeStack, service: QuotaServer) -> None:
    service.decide = "DENIED"
    stack = make_stack(_config(service))

    refused = stack.up().failed()

    assert [part for part in ("diloco:quotas", WARM, "DENIED", "AWS Support") if part not in refused.errors] == []
    assert "Traceback" not in refused.text
    # The rest of the environment is up and known; what was refused is looked at again, not asked for again.
    assert any(one["type"] == "aws:s3/bucket:Bucket" for one in stack.resources())
    stack.up().failed()
    assert service.calls["RequestServiceQuotaIncrease"] == 1

    service.changes[0].status = "APPROVED"
    service.quotas[WARM].applied = 8
    stack.up().check()
    stack.destroy().check()


def test_an_instance_type_without_such_a_quota_is_named(make_stack: MakeStack, service: QuotaServer) -> None:
    stack = make_stack(_config(service, [{"instanceType": "ml.g5.7xlarge", "warmPool": 1}]))

    refused = stack.up().failed()

    wanted = ("diloco:quotas", "ml.g5.7xlarge for training warm pool usage", "us-east-1", "instanceType")
    assert [part for part in wanted if part not in refused.errors] == [], refused.errors
    assert "Traceback" not in refused.text
    assert service.changes == []
    stack.destroy().check()


def _config(service: QuotaServer, quotas: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"quotas": quotas or WANTED, "aws:endpoints": [{"servicequotas": service.endpoint_url}]}
