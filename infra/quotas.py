"""Quotas of training instances: looked up by name, raised when they are too low, never lowered.

`pulumi_aws` has a resource for a quota, but it wants the quota's code, which is documented nowhere, and makes a second
request where one is pending already. So this is a dynamic resource over boto3. It sees nothing of `aws:*`: region,
profile and endpoint are its inputs.

A quota is asked for once: a request that is open, or that AWS has refused, is found and reported. A refusal is kept in
the state, fails the update with its reason, and is looked at again by the next one. Deleting the resource leaves the
quota as it is.

API: https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pulumi
from pulumi.dynamic import (
    CheckFailure,
    CheckResult,
    CreateResult,
    DiffResult,
    ReadResult,
    Resource,
    ResourceProvider,
    UpdateResult,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from mypy_boto3_service_quotas import ServiceQuotasClient

    from infra.settings import QuotaSettings

SERVICE = "sagemaker"
USAGES = {
    "training": "{} for training job usage",
    "spot": "{} for spot training job usage",
    "warm_pool": "{} for training warm pool usage",
}
"""How Service Quotas names them."""
_OPEN = ("PENDING", "CASE_OPENED")
_GRANTED = ("APPROVED",)
"""It takes minutes until the value is in force."""
_REFUSED = ("DENIED", "NOT_APPROVED", "INVALID_REQUEST", "CASE_CLOSED")


def wanted_quotas(settings: Sequence[QuotaSettings]) -> list[tuple[str, int]]:
    """Name and least value of each quota that config wants."""
    return [
        (name.format(quota.instance_type), value)
        for quota in settings
        for usage, name in USAGES.items()
        if (value := getattr(quota, usage)) is not None
    ]


class QuotaProvider(ResourceProvider):
    """Keeps one quota at least as high as wanted."""

    serialize_as_secret_always = False  # it holds no secret, and every state would look as if it did

    def check(self, _olds: Mapping[str, Any], news: dict[str, Any]) -> CheckResult:
        """Whether a quota of that name exists in the region, which the region's list decides."""
        failures = []
        if all(isinstance(news.get(key), str) for key in ("name", "region")):
            try:
                _find(_client(news), news["name"])
            except LookupError as problem:
                failures.append(CheckFailure("name", f"diloco:quotas: {problem}"))
            except Exception as problem:  # noqa: BLE001 - any failure of the API is the user's to read in one line
                failures.append(CheckFailure("name", f"diloco:quotas: {news['name']}: {_one_line(problem)}"))
        return CheckResult(news, failures)

    def diff(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> DiffResult:
        """Another quota replaces; one that was refused, or lost its request, is looked at again."""
        replaces = [key for key in ("name", "region") if olds.get(key) != news.get(key)]
        again = olds.get("status") in ("refused", "low") or any(
            olds.get(key) != news.get(key) for key in ("wanted", "profile", "endpoint_url")
        )
        return DiffResult(changes=bool(replaces) or again, replaces=replaces, delete_before_replace=False)

    def create(self, props: dict[str, Any]) -> CreateResult:
        """Ask for the quota if it is too low and nobody has."""
        return CreateResult(f"{props['region']}/{props['name']}", {**props, **_ensure(_client(props), props)})

    def update(self, _id: str, _olds: dict[str, Any], news: dict[str, Any]) -> UpdateResult:
        """As create: a quota is never lowered."""
        return UpdateResult({**news, **_ensure(_client(news), news)})

    def read(self, id_: str, props: dict[str, Any]) -> ReadResult:
        """The value now in force, and what became of a request."""
        client = _client(props)
        quota = _find(client, props["name"])
        return ReadResult(id_, {**props, **_state(client, quota, props["wanted"])})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """A quota that was raised stays."""


def _client(props: Mapping[str, Any]) -> ServiceQuotasClient:
    import boto3
    from botocore.config import Config

    session = boto3.Session(profile_name=props.get("profile") or None, region_name=props["region"])
    config = Config(retries={"mode": "adaptive", "max_attempts": 8})
    return session.client("service-quotas", endpoint_url=props.get("endpoint_url") or None, config=config)


def _find(client: ServiceQuotasClient, name: str) -> dict[str, Any]:
    """The quota of that name: as applied to the account, else AWS's default. LookupError with names that come close."""
    names = []
    for operation in ("list_service_quotas", "list_aws_default_service_quotas"):
        for page in client.get_paginator(operation).paginate(ServiceCode=SERVICE):
            for quota in page["Quotas"]:
                if quota["QuotaName"] == name:
                    return dict(quota)
                names.append(quota["QuotaName"])
    usage = name.partition(" for ")[2]
    family = name.rpartition(".")[0]
    near = sorted({other for other in names if other.startswith(f"{family}.") and other.endswith(f" for {usage}")})
    hint = f"; there are {', '.join(near[:5])}" if near else ""
    raise LookupError(f"{client.meta.region_name} has no quota {name!r}: check instanceType and aws:region{hint}")


def _newest_request(client: ServiceQuotasClient, code: str) -> dict[str, Any] | None:
    pages = client.get_paginator("list_requested_service_quota_change_history_by_quota").paginate(
        ServiceCode=SERVICE, QuotaCode=code
    )
    requests = [dict(request) for page in pages for request in page["RequestedQuotas"]]
    return max(requests, key=lambda request: cast("datetime", request["Created"]), default=None)


def _state(client: ServiceQuotasClient, quota: Mapping[str, Any], wanted: float) -> dict[str, Any]:
    """Value, and whether it is enough, asked for (`pending`), refused, or none of these (`low`).

    While a request is open AWS takes no second one, whatever it asks for. One that is closed counts only if it asked
    for as much as is wanted now.
    """
    value = quota["Value"]
    request = None if value >= wanted else _newest_request(client, quota["QuotaCode"])
    state = {"value": value, "status": "enough" if value >= wanted else "low", "request_id": "", "message": ""}
    if request is None:
        return state
    status, asked = request["Status"], f"request {request['Id']} for {request['DesiredValue']:g} is {request['Status']}"
    if status in _OPEN or (status in _GRANTED and request["DesiredValue"] >= wanted):
        return state | {"status": "pending", "request_id": request["Id"], "message": asked}
    if status in _REFUSED and request["DesiredValue"] >= wanted:
        return state | {"status": "refused", "request_id": request["Id"], "message": asked}
    return state


def _ensure(client: ServiceQuotasClient, props: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for the quota unless it is enough or asked for, and say how it stands."""
    from botocore.exceptions import ClientError

    wanted = float(props["wanted"])
    quota = _find(client, props["name"])
    state = _state(client, quota, wanted)
    if state["status"] != "low":
        return state
    if not quota.get("Adjustable", True):
        return state | {"status": "refused", "message": "AWS does not adjust it"}
    try:
        request = client.request_service_quota_increase(
            ServiceCode=SERVICE, QuotaCode=quota["QuotaCode"], DesiredValue=wanted
        )["RequestedQuota"]
    except ClientError as problem:
        if problem.response["Error"]["Code"] == "ResourceAlreadyExistsException":  # somebody else's, just now
            return _state(client, quota, wanted)
        return state | {"status": "refused", "message": _one_line(problem)}
    if request["Status"] in _REFUSED:
        return state | {"status": "refused", "request_id": request["Id"], "message": f"it is {request['Status']}"}
    return state | {"status": "requested", "request_id": request["Id"], "message": ""}


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())


class _Quota(Resource, module="diloco", name="Quota"):
    """One quota; its outputs beyond the inputs are set by the provider."""

    value: pulumi.Output[float]
    status: pulumi.Output[str]
    request_id: pulumi.Output[str]
    message: pulumi.Output[str]

    def __init__(self, name: str, props: Mapping[str, Any], opts: pulumi.ResourceOptions) -> None:
        outputs = dict.fromkeys(("value", "status", "request_id", "message"))
        super().__init__(QuotaProvider(), name, {**outputs, **props}, opts)


@dataclass(frozen=True)
class WarmPoolQuotaArgs:
    """Arguments of :class:`WarmPoolQuota`."""

    region: str
    quotas: Sequence[QuotaSettings]
    profile: str | None = None
    endpoint_url: str | None = None


class WarmPoolQuota(pulumi.ComponentResource):
    """The quotas that jobs of some instance types need: training, spot, and warm pools, whose default is 0."""

    quotas: pulumi.Output[Sequence[Mapping[str, Any]]]
    """As :class:`diloco.stack.QuotaOutput` reads them. One that AWS has refused ends the update with an error."""

    def __init__(self, name: str, args: WarmPoolQuotaArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:WarmPoolQuota", name, None, opts)
        found = []
        for quota, wanted in wanted_quotas(args.quotas):
            resource = _Quota(
                quota.replace(" ", "-"),
                {
                    "name": quota,
                    "wanted": wanted,
                    "region": args.region,
                    "profile": args.profile or "",
                    "endpoint_url": args.endpoint_url or "",
                },
                pulumi.ResourceOptions(parent=self, retain_on_delete=False),
            )
            known = pulumi.Output.all(
                quota, wanted, resource.value, resource.status, resource.request_id, resource.message
            )
            found.append(known.apply(_as_output))
            # Apart from the outputs: an error in what is exported would keep all of them from being exported.
            known.apply(_refuse)
        self.quotas = pulumi.Output.all(*found)
        self.register_outputs({"quotas": self.quotas})


def _as_output(known: Sequence[Any]) -> dict[str, Any]:
    name, wanted, value, status, request_id, _ = known
    output = {"name": name, "value": value, "wanted": wanted, "status": status}
    return output | ({"requestId": request_id} if request_id else {})


def _refuse(known: Sequence[Any]) -> None:
    """RunError for a quota that AWS has refused."""
    name, wanted, value, status, _, message = known
    if status == "refused":
        raise pulumi.RunError(
            f"diloco:quotas: {name} is {value:g}, and AWS refused {wanted}: {message}; ask AWS Support, or lower what "
            "quotas wants"
        )
