"""The stand-in for Service Quotas answers as the API's own model says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.quotas import CLOSED, QuotaServer, sagemaker_quotas

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "ml.p5.48xlarge for training warm pool usage"


@pytest.fixture
def server() -> Iterator[QuotaServer]:
    with QuotaServer(sagemaker_quotas(ml_p5_48xlarge_warm=2)) as running:
        yield running


@pytest.fixture
def client(server: QuotaServer) -> Any:
    return _client(server)


def _client(server: QuotaServer, key: str = "test") -> Any:
    session: Any = boto3.Session(key, "test", region_name="us-east-1")
    # Malformed requests are to reach the server.
    config = Config(proxies={}, parameter_validation=False, retries={"total_max_attempts": 1})
    return session.client("service-quotas", endpoint_url=server.endpoint_url, config=config)


def test_a_quota_is_found_by_its_name_on_a_later_page(client: Any) -> None:
    pages = list(client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"))
    assert len(pages) > 2
    (found,) = (quota for page in pages for quota in page["Quotas"] if quota["QuotaName"] == NAME)
    assert found["Value"] == 2
    asked = client.get_service_quota(ServiceCode="sagemaker", QuotaCode=found["QuotaCode"])["Quota"]
    assert asked == found


@pytest.mark.parametrize("decision", CLOSED)
def test_a_request_is_open_until_it_is_decided(decision: str, client: Any, server: QuotaServer) -> None:
    code = {"ServiceCode": "sagemaker", "QuotaCode": server.quotas[NAME].code}
    asked = client.request_service_quota_increase(**code, DesiredValue=8)["RequestedQuota"]
    assert (asked["Status"], asked["DesiredValue"]) == ("PENDING", 8)
    with pytest.raises(client.exceptions.ResourceAlreadyExistsException):
        client.request_service_quota_increase(**code, DesiredValue=9)

    server.settle(decision)
    history = client.list_requested_service_quota_change_history_by_quota(**code)["RequestedQuotas"]
    assert [(one["Id"], one["Status"]) for one in history] == [(asked["Id"], decision)]
    value = client.get_service_quota(**code)["Quota"]["Value"]
    assert value == (8 if decision == "APPROVED" else 2)
    assert client.get_aws_default_service_quota(**code)["Quota"]["Value"] == 2


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"QuotaCode": "L-00000000", "DesiredValue": 8}, "NoSuchResourceException"),
        ({"DesiredValue": 1}, "IllegalArgumentException"),
        ({"DesiredValue": 8, "QuotaCode": ""}, "IllegalArgumentException"),
        ({"DesiredValue": 8, "ServiceCode": "ec2"}, "NoSuchResourceException"),
    ],
)
def test_what_the_api_would_refuse_is_refused(
    request_: dict[str, Any], error: str, client: Any, server: QuotaServer
) -> None:
    whole = {"ServiceCode": "sagemaker", "QuotaCode": server.quotas[NAME].code} | request_
    with pytest.raises(ClientError) as refused:
        client.request_service_quota_increase(**whole)
    assert refused.value.response["Error"]["Code"] == error
    assert server.changes == []


def test_a_caller_may_do_what_its_policies_say() -> None:
    def authorise(key: str, action: str) -> str | None:
        return None if key == "reader" and action.startswith("servicequotas:List") else f"{key} may not {action}"

    with QuotaServer(sagemaker_quotas(), authorise=authorise) as server:
        assert _client(server, "reader").list_service_quotas(ServiceCode="sagemaker")["Quotas"]
        with pytest.raises(ClientError, match="stranger may not servicequotas:ListServiceQuotas"):
            _client(server, "stranger").list_service_quotas(ServiceCode="sagemaker")
