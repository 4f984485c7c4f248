"""The quotas' dynamic resource against a stand-in for Service Quotas, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pulumi
import pytest

from diloco.stack import QuotaOutput
from infra.quotas import QuotaProvider, _as_output, _refuse, wanted_quotas
from infra.settings import QuotaSettings
from tests.support.quotas import QuotaServer, sagemaker_quotas

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM = "ml.g5.2xlarge for training warm pool usage"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, _no_credentials_leak: None) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def quotas() -> Iterator[QuotaServer]:
    with QuotaServer(sagemaker_quotas(ml_g5_2xlarge_job=4)) as server:
        yield server


def props(quotas: QuotaServer, name: str = WARM, wanted: int = 8) -> dict[str, Any]:
    return {"name": name, "wanted": wanted, "region": "us-east-1", "profile": "", "endpoint_url": quotas.endpoint_url}


def created(quotas: QuotaServer, **changes: Any) -> dict[str, Any]:
    outs = QuotaProvider().create(props(quotas, **changes)).outs
    assert outs is not None
    return dict(outs)


def test_names_follow_instance_type_and_usage() -> None:
    settings = [QuotaSettings(instanceType="ml.g5.2xlarge", training=8, spot=4, warmPool=2)]
    assert wanted_quotas(settings) == [
        ("ml.g5.2xlarge for training job usage", 8),
        ("ml.g5.2xlarge for spot training job usage", 4),
        (WARM, 2),
    ]


def test_a_quota_that_is_enough_is_not_asked_for(quotas: QuotaServer) -> None:
    outs = created(quotas, name="ml.g5.2xlarge for training job usage", wanted=4)
    assert (outs["status"], outs["value"]) == ("enough", 4)
    assert quotas.changes == []


def test_a_quota_that_is_too_low_is_asked_for_once(quotas: QuotaServer) -> None:
    outs = created(quotas)
    assert (outs["status"], outs["value"]) == ("requested", 0)
    assert outs["request_id"] == quotas.changes[0].id
    again = created(quotas)
    assert (again["status"], again["request_id"]) == ("pending", outs["request_id"])
    assert len(quotas.changes) == 1


@pytest.mark.parametrize("status", ["PENDING", "CASE_OPENED"])
def test_a_request_of_somebody_else_is_found(quotas: QuotaServer, status: str) -> None:
    quotas.decide = status
    first = created(quotas, wanted=2)
    assert created(quotas, wanted=8)["request_id"] == first["request_id"]
    assert len(quotas.changes) == 1


def test_refresh_sees_what_was_granted(quotas: QuotaServer) -> None:
    outs = created(quotas)
    quotas.settle("APPROVED")
    read = QuotaProvider().read("id", outs).outs
    assert read is not None
    assert (read["status"], read["value"], read["request_id"]) == ("enough", 8, "")


@pytest.mark.parametrize("status", ["DENIED", "NOT_APPROVED", "INVALID_REQUEST", "CASE_CLOSED"])
def test_a_refusal_is_kept_and_not_asked_for_again(quotas: QuotaServer, status: str) -> None:
    quotas.decide = status
    outs = created(quotas)
    assert outs["status"] == "refused"
    provider = QuotaProvider()
    assert provider.diff("id", outs, props(quotas)).changes  # looked at again
    updated = provider.update("id", outs, props(quotas)).outs
    assert updated is not None
    assert updated["status"] == "refused"
    assert status in updated["message"]
    assert len(quotas.changes) == 1


def test_more_than_was_refused_or_less_is_another_question(quotas: QuotaServer) -> None:
    quotas.decide = "DENIED"
    outs = created(quotas, wanted=4)
    quotas.decide = "PENDING"
    updated = QuotaProvider().update("id", outs, props(quotas, wanted=8)).outs
    assert updated is not None
    assert updated["status"] == "requested"


def test_a_quota_that_aws_does_not_adjust_is_refused(quotas: QuotaServer) -> None:
    quotas.quotas[WARM].adjustable = False
    outs = created(quotas)
    assert (outs["status"], outs["message"]) == ("refused", "AWS does not adjust it")
    assert quotas.changes == []


def test_a_caller_who_may_not_ask_is_refused_with_the_services_words() -> None:
    def authorise(_key: str, action: str) -> str | None:
        return "you may not" if action == "servicequotas:RequestServiceQuotaIncrease" else None

    with QuotaServer(sagemaker_quotas(), authorise=authorise) as quotas:
        outs = created(quotas)
    assert outs["status"] == "refused"
    assert "you may not" in outs["message"]


def test_nothing_is_ever_lowered(quotas: QuotaServer) -> None:
    outs = created(quotas, name="ml.g5.2xlarge for training job usage", wanted=4)
    provider = QuotaProvider()
    provider.update("id", outs, props(quotas, name="ml.g5.2xlarge for training job usage", wanted=1))
    provider.delete("id", outs)
    assert quotas.changes == []
    assert quotas.quotas["ml.g5.2xlarge for training job usage"].value == 4


def test_an_unknown_name_fails_the_check_with_names_that_come_close(quotas: QuotaServer) -> None:
    failures = QuotaProvider().check({}, props(quotas, name="ml.g5.3xlarge for training warm pool usage")).failures
    (failure,) = failures or []
    assert "us-east-1 has no quota 'ml.g5.3xlarge for training warm pool usage'" in failure.reason
    assert "ml.g5.12xlarge for training warm pool usage" in failure.reason
    assert not QuotaProvider().check({}, props(quotas)).failures


def test_a_service_that_refuses_to_list_fails_the_check_in_one_line() -> None:
    with QuotaServer({}, authorise=lambda _key, _action: "not for you") as quotas:
        failures = QuotaProvider().check({}, props(quotas)).failures
    (failure,) = failures or []
    assert "not for you" in failure.reason
    assert "\n" not in failure.reason


def test_what_is_not_known_yet_is_not_checked(quotas: QuotaServer) -> None:
    unknown = props(quotas) | {"name": None}
    assert not QuotaProvider().check({}, unknown).failures
    assert not quotas.calls


def test_diff_replaces_for_another_quota_and_updates_for_another_wish(quotas: QuotaServer) -> None:
    provider, olds = QuotaProvider(), created(quotas)
    assert not provider.diff("id", olds, props(quotas)).changes
    more = provider.diff("id", olds, props(quotas, wanted=9))
    assert (more.changes, more.replaces) == (True, [])
    other = provider.diff("id", olds, props(quotas, name="ml.g5.xlarge for training warm pool usage"))
    assert (other.changes, other.replaces) == (True, ["name"])


def test_a_refusal_is_an_error_with_key_and_fix_and_an_output_all_the_same() -> None:
    refused = ["ml.x", 8, 0.0, "refused", "", "no"]
    assert QuotaOutput.model_validate(_as_output(refused)).status == "refused"
    with pytest.raises(pulumi.RunError, match=r"^diloco:quotas: ml.x is 0, and AWS refused 8: no; ask AWS Support"):
        _refuse(refused)


@pytest.mark.parametrize("status", ["enough", "requested", "pending", "low"])
def test_what_is_not_refused_is_an_output_only(status: str) -> None:
    known = ["ml.x", 8, 0.0, status, "r", "…"]
    assert QuotaOutput.model_validate(_as_output(known)).request_id == "r"
    assert "requestId" not in _as_output([*known[:4], "", ""])
    _refuse(known)
