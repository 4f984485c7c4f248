"""What exists already: used, checked, and left alone; what does not is an error that names key and fix."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.conftest import inventory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.infra.conftest import MakeStack
    from tests.support.gate import Gate
    from tests.support.sagemaker.emulator import Emulator

TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


@pytest.fixture
def bucket(aws: Emulator) -> Iterator[str]:
    """A bucket of somebody else's making, with an object in it."""
    name = f"ours-sagemaker-{secrets.token_hex(4)}"
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="rendezvous/old/run.json", Body=b"{}")
    yield name
    s3.delete_object(Bucket=name, Key="rendezvous/old/run.json")
    s3.delete_bucket(Bucket=name)


@pytest.fixture
def role(aws: Emulator, bucket: str) -> Iterator[str]:
    """A role of somebody else's making that may use that bucket."""
    name = f"ours-{secrets.token_hex(4)}"
    iam = aws.client("iam")
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))
    _grant(aws, name, f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*")
    yield name
    iam.delete_role_policy(RoleName=name, PolicyName="bucket")
    iam.delete_role(RoleName=name)


def test_what_was_adopted_is_left_alone(
    make_stack: MakeStack, gate: Gate, aws: Emulator, bucket: str, role: str, adopted_image: str
) -> None:
    before, told = inventory(aws), _told(aws, bucket, role)
    stack = make_stack({"bucket": {"adopt": bucket}, "role": {"adopt": role}})

    stack.up().check()
    outputs = stack.outputs()
    assert outputs["bucket"] == bucket
    assert outputs["sagemakerRoleArn"] == f"arn:aws:iam::123456789012:role/{role}"
    assert outputs["imageUri"] == adopted_image
    stack.preview("--refresh", "--expect-no-changes").check()
    assert {call.service for call in gate.writes() if call.operation != "GetCallerIdentity"} <= {"iam"}

    stack.destroy().check()
    assert inventory(aws) == before
    assert _told(aws, bucket, role) == told


def test_an_adopted_role_that_cannot_reach_the_bucket_is_an_error(
    make_stack: MakeStack, aws: Emulator, bucket: str, role: str
) -> None:
    before = inventory(aws)
    _grant(aws, role, "arn:aws:s3:::another", "arn:aws:s3:::another/*")
    stack = make_stack({"bucket": {"adopt": bucket}, "role": {"adopt": role}})

    refused = stack.up().failed()

    assert "diloco:role.adopt" in refused.errors
    assert role in refused.errors
    assert "Traceback" not in refused.text
    stack.destroy().check()
    assert inventory(aws) == before


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"bucket": {"adopt": "no-such-bucket-sagemaker"}},
            ("diloco:bucket.adopt 'no-such-bucket-sagemaker'", "create"),
        ),
        ({"role": {"adopt": "no-such-role"}}, ("diloco:role.adopt 'no-such-role'", "leave it out")),
        (
            {"image": {"uri": f"123456789012.dkr.ecr.us-east-1.amazonaws.com/shared/none@sha256:{'1' * 64}"}},
            ("diloco:image.uri", "shared/none", "leave it out"),
        ),
        (
            {"encryption": {"key": "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"}},
            ("diloco:encryption.key", "11111111-2222-3333-4444-555555555555"),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_exist_is_named_with_key_and_fix(
    config: dict[str, Any], named: tuple[str, ...], make_stack: MakeStack, aws: Emulator
) -> None:
    before = inventory(aws)
    stack = make_stack(config)

    refused = stack.up().failed()

    assert [part for part in named if part not in refused.errors] == [], refused.errors
    assert "Traceback" not in refused.text
    # What was made before the look-up failed is in the state.
    stack.destroy().check()
    assert inventory(aws) == before


def _grant(aws: Emulator, role: str, *resources: str) -> None:
    actions = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListBucket"]
    statement = {"Effect": "Allow", "Action": actions, "Resource": list(resources)}
    aws.client("iam").put_role_policy(
        RoleName=role,
        PolicyName="bucket",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [statement]}),
    )


def _told(aws: Emulator, bucket: str, role: str) -> dict[str, Any]:
    """All of the two that a stack could have changed."""
    s3, iam = aws.client("s3"), aws.client("iam")
    found = iam.get_role(RoleName=role)["Role"]
    return {
        "objects": [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]],
        "versioning": s3.get_bucket_versioning(Bucket=bucket).get("Status"),
        "encryption": s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"],
        "trust": found["AssumeRolePolicyDocument"],
        "tags": found.get("Tags"),
        "inline": iam.list_role_policies(RoleName=role)["PolicyNames"],
        "attached": iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"],
    }
