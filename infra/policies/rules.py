"""Rules about one resource's properties, and about resources that must come together.

Each is named after the rule that it stands for, and asks the same: of checkov (`CKV…`,
https://www.checkov.io/5.Policy%20Index/terraform.html) or of Trivy (`AVD…`, https://avd.aquasec.com/misconfig/aws/);
one that neither has is named in words.
What those scanners also ask, and this does not, is in `docs/infrastructure.md`, each with the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.access import UNSCOPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Properties = Mapping[str, Any]

_BUCKET = "aws:s3/bucket:Bucket"
_PUBLIC_ACCESS = "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock"
_OWNERSHIP = "aws:s3/bucketOwnershipControls:BucketOwnershipControls"
_ENCRYPTION = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
_LIFECYCLE = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
_BUCKET_POLICY = "aws:s3/bucketPolicy:BucketPolicy"
_KEY = "aws:kms/key:Key"
_REPOSITORY = "aws:ecr/repository:Repository"
_ROLE = "aws:iam/role:Role"
_PERMISSIONS = ("aws:iam/policy:Policy", "aws:iam/rolePolicy:RolePolicy")
_GROUP = "aws:ec2/securityGroup:SecurityGroup"
_INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
_EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
_SUBNET = "aws:ec2/subnet:Subnet"
_CLUSTER = "aws:eks/cluster:Cluster"
_CLUSTER_LOGS = {"api", "audit", "authenticator", "controllerManager", "scheduler"}
_WITHOUT_ACCOUNT = {"ec2.amazonaws.com"}
"""Services that assume roles without naming the account they do it for."""
_ANYWHERE = ("0.0.0.0/0", "::/0")


@dataclass(frozen=True)
class Rule:
    """What each resource of some types must be like; `check` yields what is wrong with its properties."""

    name: str
    description: str
    types: tuple[str, ...]
    check: Callable[[Properties], Iterator[str]]


@dataclass(frozen=True)
class Companion:
    """Which resource must come with each of a type."""

    name: str
    description: str
    type: str
    companion: str
    problem: str


def _is_true(key: str) -> Callable[[Properties], Iterator[str]]:
    def check(properties: Properties) -> Iterator[str]:
        if properties.get(key) is not True:
            yield f"{key} must be true"

    return check


def _statements(text: Any) -> list[dict[str, Any]]:
    document = json.loads(text) if isinstance(text, str) else text
    found = (document or {}).get("Statement", [])
    return [found] if isinstance(found, dict) else list(found)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _allows(text: Any) -> list[dict[str, Any]]:
    return [statement for statement in _statements(text) if statement.get("Effect") == "Allow"]


def _name(statement: Mapping[str, Any]) -> str:
    return str(statement.get("Sid", "a statement"))


def _is_anyone(principal: Any) -> bool:
    values = principal.values() if isinstance(principal, dict) else [principal]
    return any("*" in _as_list(value) for value in values)


def _owner_enforced(properties: Properties) -> Iterator[str]:
    if (properties.get("rule") or {}).get("objectOwnership") != "BucketOwnerEnforced":
        yield "rule.objectOwnership must be BucketOwnerEnforced, which disables ACLs"


def _encrypted(properties: Properties) -> Iterator[str]:
    for rule in properties.get("rules") or [{}]:
        default = rule.get("applyServerSideEncryptionByDefault") or {}
        if default.get("sseAlgorithm") not in ("AES256", "aws:kms", "aws:kms:dsse"):
            yield "a rule has no default encryption"


def _aborts_uploads(properties: Properties) -> Iterator[str]:
    rules = properties.get("rules") or []
    if not any(rule.get("status") == "Enabled" and rule.get("abortIncompleteMultipartUpload") for rule in rules):
        yield "no rule aborts incomplete multipart uploads"


def _tls_only(properties: Properties) -> Iterator[str]:
    for statement in _statements(properties.get("policy")):
        plain = (statement.get("Condition") or {}).get("Bool", {}).get("aws:SecureTransport")
        if statement.get("Effect") == "Deny" and _is_anyone(statement.get("Principal")) and str(plain) == "false":
            return
    yield "no statement denies everybody what does not come over TLS"


def _not_public(properties: Properties) -> Iterator[str]:
    for statement in _allows(properties.get("policy")):
        if _is_anyone(statement.get("Principal")):
            yield f"{_name(statement)} allows everybody"


def _trusts_named(properties: Properties) -> Iterator[str]:
    for statement in _allows(properties.get("assumeRolePolicy")):
        if _is_anyone(statement.get("Principal")):
            yield f"{_name(statement)} lets everybody assume the role"
        elif _services(statement) - _WITHOUT_ACCOUNT and not _names_account(statement):
            yield f"{_name(statement)} trusts a service on behalf of every account: condition aws:SourceAccount"


def _services(statement: Mapping[str, Any]) -> set[str]:
    return set(_as_list((statement.get("Principal") or {}).get("Service")))


def _names_account(statement: Mapping[str, Any]) -> bool:
    return "aws:SourceAccount" in json.dumps(statement.get("Condition") or {})


def _no_star_action(properties: Properties) -> Iterator[str]:
    for statement in _allows(properties.get("policy")):
        for action in _as_list(statement.get("Action")):
            if action == "*" or action.endswith(":*"):
                yield f"{_name(statement)} allows {action}"


def _no_star_resource(properties: Properties) -> Iterator[str]:
    for statement in _allows(properties.get("policy")):
        if "*" in _as_list(statement.get("Resource")):
            for action in _as_list(statement.get("Action")):
                if action not in UNSCOPED:
                    yield f"{_name(statement)} allows {action} on every resource"


def _passes_named_roles(properties: Properties) -> Iterator[str]:
    for statement in _allows(properties.get("policy")):
        if "iam:PassRole" in _as_list(statement.get("Action")):
            if any("*" in str(resource) for resource in _as_list(statement.get("Resource"))):
                yield f"{_name(statement)} passes more than one role"
            if "iam:PassedToService" not in json.dumps(statement.get("Condition") or {}):
                yield f"{_name(statement)} passes the role to any service"


def _immutable(properties: Properties) -> Iterator[str]:
    if properties.get("imageTagMutability") != "IMMUTABLE":
        yield "imageTagMutability must be IMMUTABLE"


def _scanned(properties: Properties) -> Iterator[str]:
    if (properties.get("imageScanningConfiguration") or {}).get("scanOnPush") is not True:
        yield "imageScanningConfiguration.scanOnPush must be true"


def _described(properties: Properties) -> Iterator[str]:
    if properties.get("description") in (None, "", "Managed by Pulumi"):
        yield "it needs a description"


def _no_public_ingress(properties: Properties) -> Iterator[str]:
    rules = [properties, *(properties.get("ingress") or [])]
    for rule in rules:
        blocks = [rule.get("cidrIpv4"), rule.get("cidrIpv6"), *_as_list(rule.get("cidrBlocks"))]
        if any(block in _ANYWHERE for block in blocks):
            yield "it lets the internet in"


def _narrow_egress(properties: Properties) -> Iterator[str]:
    blocks = (properties.get("cidrIpv4"), properties.get("cidrIpv6"))
    if any(block in _ANYWHERE for block in blocks) and str(properties.get("ipProtocol")) in ("-1", "all"):
        yield "it lets every protocol out to everywhere"


def _no_public_address(properties: Properties) -> Iterator[str]:
    if properties.get("mapPublicIpOnLaunch") is True:
        yield "mapPublicIpOnLaunch must be false"


def _cluster_is_logged(properties: Properties) -> Iterator[str]:
    missing = _CLUSTER_LOGS - set(properties.get("enabledClusterLogTypes") or ())
    if missing:
        yield f"enabledClusterLogTypes lacks {', '.join(sorted(missing))}"


def _cluster_for_named_ranges(properties: Properties) -> Iterator[str]:
    network = properties.get("vpcConfig") or {}
    if network.get("endpointPublicAccess") is False:
        return
    ranges = network.get("publicAccessCidrs") or _ANYWHERE
    if any(block in _ANYWHERE for block in ranges):
        yield "vpcConfig: its endpoint is open to the internet: name publicAccessCidrs, or no endpointPublicAccess"


def _secrets_encrypted(properties: Properties) -> Iterator[str]:
    if "secrets" not in ((properties.get("encryptionConfig") or {}).get("resources") or ()):
        yield "encryptionConfig.resources must have secrets"


def _access_by_entries(properties: Properties) -> Iterator[str]:
    if (properties.get("accessConfig") or {}).get("authenticationMode") != "API":
        yield "accessConfig.authenticationMode must be API: who is in the aws-auth ConfigMap is seen by no one in IAM"


RULES = (
    Rule("CKV_AWS_53", "A bucket blocks public ACLs", (_PUBLIC_ACCESS,), _is_true("blockPublicAcls")),
    Rule("CKV_AWS_54", "A bucket blocks public policies", (_PUBLIC_ACCESS,), _is_true("blockPublicPolicy")),
    Rule("CKV_AWS_55", "A bucket ignores public ACLs", (_PUBLIC_ACCESS,), _is_true("ignorePublicAcls")),
    Rule("CKV_AWS_56", "A bucket restricts public access", (_PUBLIC_ACCESS,), _is_true("restrictPublicBuckets")),
    Rule("CKV2_AWS_65", "A bucket has no ACLs", (_OWNERSHIP,), _owner_enforced),
    Rule("CKV_AWS_19", "A bucket's objects are encrypted", (_ENCRYPTION,), _encrypted),
    Rule("CKV_AWS_300", "Uploads that failed don't stay", (_LIFECYCLE,), _aborts_uploads),
    Rule("CKV_AWS_379", "A bucket takes TLS only", (_BUCKET_POLICY,), _tls_only),
    Rule("CKV_AWS_70", "A bucket's policy allows nobody in general", (_BUCKET_POLICY,), _not_public),
    Rule("CKV_AWS_7", "A key is rotated", (_KEY,), _is_true("enableKeyRotation")),
    Rule("CKV_AWS_33", "A key's policy allows nobody in general", (_KEY,), _not_public),
    Rule("CKV_AWS_51", "An image's tag does not move", (_REPOSITORY,), _immutable),
    Rule("CKV_AWS_163", "Images are scanned when they are pushed", (_REPOSITORY,), _scanned),
    Rule("CKV_AWS_60", "A role is assumed by whom it names, for this account", (_ROLE,), _trusts_named),
    Rule("CKV_AWS_63", "No policy allows all actions of a service", _PERMISSIONS, _no_star_action),
    Rule("CKV_AWS_355", "No policy allows what could be scoped on every resource", _PERMISSIONS, _no_star_resource),
    Rule("AVD-AWS-0342", "No policy passes any role, or to any service", _PERMISSIONS, _passes_named_roles),
    Rule("CKV_AWS_23", "Security groups and rules are described", (_GROUP, _INGRESS, _EGRESS), _described),
    Rule("AVD-AWS-0107", "The internet can't come in", (_GROUP, _INGRESS), _no_public_ingress),
    Rule("CKV_AWS_382", "Not everything may go out", (_EGRESS,), _narrow_egress),
    Rule("CKV_AWS_130", "Subnets give no public addresses", (_SUBNET,), _no_public_address),
    Rule("CKV_AWS_37", "A cluster's control plane is logged", (_CLUSTER,), _cluster_is_logged),
    Rule("CKV_AWS_38", "A cluster's endpoint is private or for named ranges", (_CLUSTER,), _cluster_for_named_ranges),
    Rule("CKV_AWS_58", "A cluster's secrets are encrypted", (_CLUSTER,), _secrets_encrypted),
    Rule("eks-authentication-mode", "A cluster's access is by entries", (_CLUSTER,), _access_by_entries),
)
COMPANIONS = (
    Companion(
        "CKV2_AWS_6", "A bucket has a public-access block", _BUCKET, _PUBLIC_ACCESS, "it has no public-access block"
    ),
    Companion("CKV2_AWS_61", "A bucket has a lifecycle", _BUCKET, _LIFECYCLE, "it has no lifecycle configuration"),
    Companion(
        "AVD-AWS-0088", "A bucket says how it is encrypted", _BUCKET, _ENCRYPTION, "it has no default encryption"
    ),
    Companion(
        "CKV_AWS_379-missing",
        "A bucket has a policy",
        _BUCKET,
        _BUCKET_POLICY,
        "it has no policy, so plain HTTP is allowed",
    ),
)
