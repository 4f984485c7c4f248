"""Whether the policies that an emulator stores let a principal do something: for services that the emulator lacks.

The policies are read through the IAM API at each question, and evaluated by MiniStack's own engine, conditions
included. What counts: inline and attached policies of users, their groups and roles, permissions boundaries, and the
principal's tags. Session policies, resource policies and organisations do not.

    authority = Authority(emulator.client("iam"))
    decision = authority.authorise(arn, "sagemaker:CreateTrainingJob", job_arn, {"sagemaker:KeepAlivePeriod": "600"})
    if not decision:
        raise ApiError("AccessDeniedException", decision.reason)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mypy_boto3_iam import IAMClient

    Context = Mapping[str, str | Sequence[str]]
    """Condition keys of a request, in any case: `aws:SecureTransport`, `sagemaker:InstanceTypes`, …"""

DECISIONS = {"Allow": "allowed", "Deny": "explicitDeny", "ImplicitDeny": "implicitDeny"}


@dataclass(frozen=True)
class Decision:
    """True if the call is allowed."""

    kind: str
    """`allowed`, `explicitDeny` or `implicitDeny`, as IAM's simulation says it."""
    reason: str
    """A sentence that names principal, action and resource, as an AccessDenied says it."""

    def __bool__(self) -> bool:
        return self.kind == "allowed"


@dataclass(frozen=True)
class _Principal:
    arn: str
    type: str
    account: str
    policies: list[Any]
    boundary: list[Any] | None
    keys: dict[str, str]


class Authority:
    """Decides by what `iam`, a client with the right to read all of IAM, finds stored."""

    def __init__(self, iam: IAMClient, *, region: str = "us-east-1") -> None:
        self._iam = iam
        self._region = region

    def authorise(self, principal_arn: str, action: str, resource: str, context: Context | None = None) -> Decision:
        """Decide for a user, a role, a session of one (`…:assumed-role/name/session`), or the account's root.

        `context` holds the request's condition keys; what is absent there is absent in the request, but for
        `aws:SecureTransport`, which is then true (empty: absent). A principal that does not exist may do nothing.
        Raises ValueError for an ARN of another kind.
        """
        from ministack.core.iam_evaluator import EvalContext, evaluate  # type: ignore[import-untyped]

        if principal_arn.endswith(":root"):
            return Decision("allowed", f"{principal_arn} is the account's root")
        principal = self._principal(principal_arn)
        keys = {name.lower(): value for name, value in (context or {}).items()}
        # The engine takes these from the connection, not from the context.
        connection = {
            "secure_transport": keys.pop("aws:securetransport", "true"),
            "source_ip": str(keys.pop("aws:sourceip", "127.0.0.1")),
            "region": str(keys.pop("aws:requestedregion", self._region)),
        }
        asked = EvalContext(
            principal_arn=principal.arn,
            principal_type=principal.type,
            principal_account=principal.account,
            action=action,
            resource_arn=resource,
            principal_keys=principal.keys,
            # A request that names no tags has no aws:TagKeys.
            service_context={"aws:tagkeys": None}
            | {name: value if isinstance(value, str) else list(value) for name, value in keys.items()},
            **connection,
        )
        limits = [] if principal.boundary is None else [principal.boundary]
        kind = DECISIONS[evaluate(asked, principal.policies, *limits).decision]
        return Decision(kind, _sentence(kind, principal_arn, action, resource))

    def _principal(self, arn: str) -> _Principal:
        kind, _, path = arn.split(":", 5)[5].partition("/")
        account = arn.split(":")[4]
        if kind == "user":
            name = path.rpartition("/")[2]
            return _Principal(arn, "User", account, *self._of_user(name))
        if kind in ("role", "assumed-role"):
            name = path.partition("/")[0] if kind == "assumed-role" else path.rpartition("/")[2]
            return _Principal(arn, "AssumedRole", account, *self._of_role(name))
        raise ValueError(f"{arn} is neither a user, nor a role, nor a role's session")

    def _of_user(self, name: str) -> tuple[list[Any], list[Any] | None, dict[str, str]]:
        iam = self._iam
        try:
            user = iam.get_user(UserName=name)["User"]
        except iam.exceptions.NoSuchEntityException:
            return [], None, {}
        inline = iam.list_user_policies(UserName=name)["PolicyNames"]
        documents: list[Any] = [
            iam.get_user_policy(UserName=name, PolicyName=policy)["PolicyDocument"] for policy in inline
        ]
        attached = [*iam.list_attached_user_policies(UserName=name)["AttachedPolicies"]]
        for group in (entry["GroupName"] for entry in iam.list_groups_for_user(UserName=name)["Groups"]):
            inline = iam.list_group_policies(GroupName=group)["PolicyNames"]
            documents += [
                iam.get_group_policy(GroupName=group, PolicyName=policy)["PolicyDocument"] for policy in inline
            ]
            attached += iam.list_attached_group_policies(GroupName=group)["AttachedPolicies"]
        documents += [self._managed(policy["PolicyArn"]) for policy in attached]
        keys = {"aws:username": name} | _tag_keys(user)
        return list(_parsed(documents)), self._boundary(user), keys

    def _of_role(self, name: str) -> tuple[list[Any], list[Any] | None, dict[str, str]]:
        iam = self._iam
        try:
            role = iam.get_role(RoleName=name)["Role"]
        except iam.exceptions.NoSuchEntityException:
            return [], None, {}
        inline = iam.list_role_policies(RoleName=name)["PolicyNames"]
        documents: list[Any] = [
            iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"] for policy in inline
        ]
        attached = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        documents += [self._managed(policy["PolicyArn"]) for policy in attached]
        return list(_parsed(documents)), self._boundary(role), _tag_keys(role)

    def _boundary(self, entity: Mapping[str, Any]) -> list[Any] | None:
        arn = entity.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
        return None if arn is None else list(_parsed([self._managed(arn)]))

    def _managed(self, arn: str) -> Any:
        version = self._iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        return self._iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]


def _parsed(documents: Sequence[Any]) -> Iterator[Any]:
    from ministack.core.iam_evaluator import parse_policy_document

    for document in documents:
        yield parse_policy_document(json.loads(document) if isinstance(document, str) else document)


def _tag_keys(entity: Mapping[str, Any]) -> dict[str, str]:
    return {f"aws:principaltag/{tag['Key'].lower()}": tag["Value"] for tag in entity.get("Tags", ())}


def _sentence(kind: str, principal: str, action: str, resource: str) -> str:
    if kind == "allowed":
        return f"{principal} may perform {action} on {resource}"
    because = "with an explicit deny" if kind == "explicitDeny" else f"because no policy allows the {action} action"
    return f"User: {principal} is not authorized to perform: {action} on resource: {resource} {because}"
