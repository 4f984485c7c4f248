"""The policy pack's rules: each lets through what the program makes, and finds its own violating fixture."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.access import (
    Place,
    Storage,
    bucket_policy,
    key_policy,
    launcher_policy,
    pod_trust,
    sagemaker_role_policy,
    sagemaker_trust,
    service_trust,
    web_identity_trust,
)
from infra.policies import pack
from infra.policies.rules import COMPANIONS, RULES

PLACE = Place("us-west-2", "123456789012")
STORAGE = Storage("b-sagemaker", ("rendezvous", "output"))
JOBS = {"job_name_prefix": "diloco-dev", "repository_arn": "arn:aws:ecr:us-west-2:123456789012:repository/trainer"}


def policy(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def allow(action: Any, resource: Any = "arn:aws:s3:::b/*", **more: Any) -> dict[str, Any]:
    return {"Sid": "Some", "Effect": "Allow", "Action": action, "Resource": resource} | more


PUBLIC = {"blockPublicAcls": True, "blockPublicPolicy": True, "ignorePublicAcls": True, "restrictPublicBuckets": True}
ROLE_POLICY = json.dumps(sagemaker_role_policy(PLACE, STORAGE, **JOBS))  # type: ignore[arg-type]
LAUNCHER = json.dumps(
    launcher_policy(PLACE, STORAGE, role_arn="arn:aws:iam::123456789012:role/jobs", **JOBS)  # type: ignore[arg-type]
)
TRUST = json.dumps(sagemaker_trust(PLACE, "diloco-dev"))
PASS_ROLE = {"Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}}
ENCRYPTED = {"rules": [{"applyServerSideEncryptionByDefault": {"sseAlgorithm": "aws:kms"}}]}
LIFECYCLE = {"rules": [{"status": "Enabled", "abortIncompleteMultipartUpload": {"daysAfterInitiation": 1}}]}
LOGS = ["api", "audit", "authenticator", "controllerManager", "scheduler"]
EGRESS = {"description": "TLS", "cidrIpv4": "0.0.0.0/0", "ipProtocol": "tcp", "fromPort": 443, "toPort": 443}

# Of each rule: properties that it lets through, and some that it does not.
FIXTURES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "CKV_AWS_53": ([PUBLIC], [PUBLIC | {"blockPublicAcls": False}, {}]),
    "CKV_AWS_54": ([PUBLIC], [PUBLIC | {"blockPublicPolicy": False}, {}]),
    "CKV_AWS_55": ([PUBLIC], [PUBLIC | {"ignorePublicAcls": False}, {}]),
    "CKV_AWS_56": ([PUBLIC], [PUBLIC | {"restrictPublicBuckets": False}, {}]),
    "CKV2_AWS_65": (
        [{"rule": {"objectOwnership": "BucketOwnerEnforced"}}],
        [{"rule": {"objectOwnership": "ObjectWriter"}}, {}],
    ),
    "CKV_AWS_19": ([ENCRYPTED], [{"rules": [{"bucketKeyEnabled": True}]}, {}]),
    "CKV_AWS_300": (
        [LIFECYCLE],
        [{"rules": [LIFECYCLE["rules"][0] | {"status": "Disabled"}]}, {"rules": [{"status": "Enabled"}]}],
    ),
    "CKV_AWS_379": (
        [{"policy": json.dumps(bucket_policy(PLACE, "b-sagemaker"))}],
        [
            {"policy": policy()},
            {"policy": policy(allow("s3:*", Principal="*", Condition={"Bool": {"aws:SecureTransport": "false"}}))},
            {
                "policy": policy(
                    {
                        "Effect": "Deny",
                        "Principal": {"AWS": "arn:aws:iam::123456789012:root"},
                        "Action": "s3:*",
                        "Resource": "*",
                        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                    }
                )
            },
        ],
    ),
    "CKV_AWS_70": (
        [{"policy": json.dumps(bucket_policy(PLACE, "b-sagemaker"))}],
        [
            {"policy": policy(allow("s3:GetObject", Principal="*"))},
            {"policy": policy(allow("s3:*", Principal={"AWS": ["*"]}))},
        ],
    ),
    "CKV_AWS_7": ([{"enableKeyRotation": True}], [{"enableKeyRotation": False}, {}]),
    "CKV_AWS_33": (
        [{"policy": json.dumps(key_policy(PLACE))}],
        [{"policy": policy(allow("kms:*", "*", Principal={"AWS": "*"}))}],
    ),
    "CKV_AWS_51": ([{"imageTagMutability": "IMMUTABLE"}], [{"imageTagMutability": "MUTABLE"}, {}]),
    "CKV_AWS_163": (
        [{"imageScanningConfiguration": {"scanOnPush": True}}],
        [{"imageScanningConfiguration": {"scanOnPush": False}}, {}],
    ),
    "CKV_AWS_60": (
        [
            {"assumeRolePolicy": TRUST},
            {"assumeRolePolicy": json.dumps(service_trust("eks.amazonaws.com", account=PLACE.account))},
            {"assumeRolePolicy": json.dumps(service_trust("ec2.amazonaws.com"))},
            {"assumeRolePolicy": json.dumps(pod_trust(PLACE, "c", "n", "s"))},
            {"assumeRolePolicy": json.dumps(web_identity_trust("accounts.google.com", {"aud": "a", "sub": "s"}))},
        ],
        [
            {"assumeRolePolicy": policy(allow("sts:AssumeRole", Principal={"AWS": "*"}))},
            {"assumeRolePolicy": policy(allow("sts:AssumeRole", Principal={"Service": "sagemaker.amazonaws.com"}))},
            {
                "assumeRolePolicy": policy(
                    allow("sts:AssumeRole", Principal={"Service": ["ec2.amazonaws.com", "eks.amazonaws.com"]})
                )
            },
        ],
    ),
    "CKV_AWS_63": (
        [{"policy": ROLE_POLICY}, {"policy": LAUNCHER}],
        [{"policy": policy(allow("*"))}, {"policy": policy(allow(["s3:GetObject", "s3:*"]))}],
    ),
    "CKV_AWS_355": (
        [{"policy": ROLE_POLICY}, {"policy": LAUNCHER}],
        [
            {"policy": policy(allow("s3:GetObject", "*"))},
            {"policy": policy(allow(["ecr:GetAuthorizationToken", "iam:PassRole"], ["*"]))},
        ],
    ),
    "AVD-AWS-0342": (
        [{"policy": LAUNCHER}],
        [
            {"policy": policy(allow("iam:PassRole", "arn:aws:iam::123456789012:role/*", **PASS_ROLE))},
            {"policy": policy(allow("iam:PassRole", "arn:aws:iam::123456789012:role/jobs"))},
        ],
    ),
    "CKV_AWS_23": ([EGRESS], [EGRESS | {"description": ""}, EGRESS | {"description": "Managed by Pulumi"}]),
    "AVD-AWS-0107": (
        [{"referencedSecurityGroupId": "sg-1"}, {"cidrIpv4": "10.0.0.0/16"}],
        [{"cidrIpv4": "0.0.0.0/0"}, {"cidrIpv6": "::/0"}, {"ingress": [{"cidrBlocks": ["0.0.0.0/0"]}]}],
    ),
    "CKV_AWS_382": ([EGRESS], [EGRESS | {"ipProtocol": "-1"}]),
    "CKV_AWS_130": ([{"mapPublicIpOnLaunch": False}, {}], [{"mapPublicIpOnLaunch": True}]),
    "CKV_AWS_37": (
        [{"enabledClusterLogTypes": LOGS}],
        [*({"enabledClusterLogTypes": [log for log in LOGS if log != left]} for left in LOGS), {}],
    ),
    "CKV_AWS_38": (
        [
            {"vpcConfig": {"endpointPublicAccess": False}},
            {"vpcConfig": {"endpointPublicAccess": True, "publicAccessCidrs": ["203.0.113.0/24"]}},
        ],
        [
            {"vpcConfig": {"subnetIds": ["subnet-1"]}},
            {"vpcConfig": {"endpointPublicAccess": True}},
            {"vpcConfig": {"endpointPublicAccess": True, "publicAccessCidrs": []}},
            {"vpcConfig": {"publicAccessCidrs": ["203.0.113.0/24", "0.0.0.0/0"]}},
        ],
    ),
    "CKV_AWS_58": (
        [{"encryptionConfig": {"resources": ["secrets"], "provider": {"keyArn": "arn"}}}],
        [{"encryptionConfig": {"resources": []}}, {}],
    ),
    "eks-authentication-mode": (
        [{"accessConfig": {"authenticationMode": "API"}}],
        [
            {"accessConfig": {"authenticationMode": "API_AND_CONFIG_MAP"}},
            {"accessConfig": {"authenticationMode": "CONFIG_MAP"}},
            {},
        ],
    ),
}


def test_every_rule_has_its_fixture() -> None:
    names = [rule.name for rule in (*RULES, *COMPANIONS)]
    assert len(set(names)) == len(names)
    assert {rule.name for rule in RULES} == FIXTURES.keys()


def reports_of(name: str, kind: str, properties: dict[str, Any]) -> list[str]:
    """What the rule's policy, as the engine calls it, reports of a resource."""
    (rule,) = [rule for rule in RULES if rule.name == name]
    found: list[str] = []
    arguments = SimpleNamespace(resource_type=kind, props=properties, name="it", urn="urn")
    validate: Any = pack._of_rule(rule).validate
    validate(arguments, lambda message, _urn=None: found.append(message))
    return found


@pytest.mark.parametrize("name", FIXTURES)
def test_a_rule_lets_through_what_is_right(name: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    for properties in FIXTURES[name][0]:
        for kind in rule.types:
            assert reports_of(name, kind, properties) == []


@pytest.mark.parametrize("name", FIXTURES)
def test_a_rule_finds_what_is_wrong_and_names_the_resource(name: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    for properties in FIXTURES[name][1]:
        for kind in rule.types:
            (report, *_) = reports_of(name, kind, properties)
            assert report.startswith("it: ")
            assert reports_of(name, "aws:sns/topic:Topic", properties) == []


@pytest.mark.parametrize("rule", COMPANIONS, ids=lambda rule: rule.name)
def test_what_must_come_together_is_found_missing(rule: Any) -> None:
    def resource(urn: str, kind: str, *buckets: Any) -> Any:
        return SimpleNamespace(urn=urn, resource_type=kind, name=urn, property_dependencies={"bucket": list(buckets)})

    first, second = resource("first", rule.type), resource("second", rule.type)
    companion = resource("of the first", rule.companion, first)
    found: list[tuple[str, str]] = []
    validate: Any = pack._of_companion(rule).validate
    arguments = SimpleNamespace(resources=[first, second, companion])
    validate(arguments, lambda message, urn: found.append((message, urn)))
    assert found == [(f"second: {rule.problem}", "second")]
