"""A role, as the service that it trusts uses it: its trust is checked, and its permissions are those that it has.

MiniStack refuses AssumeRole on a trust with `aws:SourceArn`, which the service's own call would satisfy. So the trust
is evaluated here, and a twin with the same permission policies, trusted by the account, is assumed in the role's place.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from tests.support.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SERVICE = "sagemaker.amazonaws.com"
SESSION = "SageMaker"


class Roles:
    """Twins of roles that trust `service`. `client` makes a boto3 client of the emulator's root."""

    def __init__(self, client: Callable[[str], Any], account: str, region: str, service: str = SERVICE) -> None:
        self._client = client
        self._service = service
        self._account = account
        self._region = region
        self._lock = threading.Lock()

    def check_trust(
        self,
        role_arn: str,
        source_arn: str,
        *,
        action: str = "sts:AssumeRole",
        request: Mapping[str, str] | None = None,
    ) -> None:
        """Raise the service's error unless the role trusts it for this resource, conditions included. `request` are
        more keys that a condition may ask for.
        """
        from ministack.core.iam_evaluator import (  # type: ignore[import-untyped]
            EvalContext,
            evaluate_trust_policy,
        )

        refused = ApiError(
            "ValidationException",
            f"Could not assume role {role_arn}. Please ensure that the role exists and allows principal"
            f" '{self._service}' to assume the role.",
        )
        try:
            role = self._client("iam").get_role(RoleName=role_name(role_arn))["Role"]
        except ClientError:
            raise refused from None
        trust = _document(role["AssumeRolePolicyDocument"])
        context = EvalContext(
            principal_arn=self._service,
            principal_type="Service",
            principal_account=self._account,
            action=action,
            resource_arn=role_arn,
            region=self._region,
            service_context={
                "aws:sourcearn": source_arn,
                "aws:sourceaccount": self._account,
                **{name.lower(): value for name, value in (request or {}).items()},
            },
        )
        if role["Arn"] != role_arn or not _trusts(trust, self._service, context, evaluate_trust_policy):
            raise refused

    def credentials(self, role_arn: str, seconds: int = 3600) -> dict[str, str]:
        """Fresh credentials with the role's present permissions, as STS returns them."""
        with self._lock:
            twin = self._twin(role_name(role_arn))
        answer = self._client("sts").assume_role(RoleArn=twin, RoleSessionName=SESSION, DurationSeconds=seconds)
        credentials: dict[str, str] = answer["Credentials"]
        return credentials

    def _twin(self, name: str) -> str:
        """Make or renew the twin of a role; returns its ARN."""
        iam = self._client("iam")
        trust = {
            "Version": "2012-10-17",
            "Statement": {
                "Effect": "Allow",
                "Action": "sts:AssumeRole",
                "Principal": {"AWS": f"arn:aws:iam::{self._account}:root"},
            },
        }
        twin = f"{name[:50]}-standin-twin"
        try:
            arn = iam.get_role(RoleName=twin)["Role"]["Arn"]
        except ClientError:
            arn = iam.create_role(RoleName=twin, AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]
        # Jobs that run are using it: nothing may be missing for a moment.
        inline, old = _inline(iam, name), _inline(iam, twin)
        for policy, document in inline.items():
            if old.get(policy) != document:
                iam.put_role_policy(RoleName=twin, PolicyName=policy, PolicyDocument=json.dumps(document))
        for policy in old.keys() - inline.keys():
            iam.delete_role_policy(RoleName=twin, PolicyName=policy)
        wanted = _attached(iam, name)
        present = _attached(iam, twin)
        for policy in present - wanted:
            iam.detach_role_policy(RoleName=twin, PolicyArn=policy)
        for policy in wanted - present:
            iam.attach_role_policy(RoleName=twin, PolicyArn=policy)
        return str(arn)


def role_name(arn: str) -> str:
    """The last part of a role's ARN, without its path."""
    return arn.rsplit("/", 1)[-1]


def _inline(iam: Any, role: str) -> dict[str, dict[str, Any]]:
    names = iam.list_role_policies(RoleName=role)["PolicyNames"]
    return {name: _document(iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]) for name in names}


def _attached(iam: Any, role: str) -> set[str]:
    return {each["PolicyArn"] for each in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]}


def _document(policy: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(policy) if isinstance(policy, str) else policy
    return document


def _trusts(trust: dict[str, Any], service: str, context: Any, evaluate: Callable[..., bool]) -> bool:
    """Whether a trust policy lets the service in. The evaluator compares callers' ARNs, so statements that name the
    service are handed to it with the principal that it reads as anyone.
    """
    statements = trust["Statement"] if isinstance(trust["Statement"], list) else [trust["Statement"]]
    mine = []
    for statement in statements:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, dict) else []
        services = [services] if isinstance(services, str) else services
        if principal == "*" or service in services:
            mine.append({**statement, "Principal": "*"})
    return evaluate({"Statement": mine}, context.principal_arn, context)
