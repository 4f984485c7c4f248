"""The life of a stack on the real engine: up, nothing more to do, changes, drift, and down to nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.conftest import inventory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.infra.conftest import MakeStack
    from tests.support.gate import Gate
    from tests.support.sagemaker.emulator import Emulator

LONG = 120.0
"""Seconds: a bound against hangs; the figures of an idle machine are in docs/infrastructure.md."""

WHOLE = {
    "bucket": {"versioning": True},
    "encryption": {"key": "create"},
    "network": {"egress": "endpoints"},
    "tags": {"team": "research"},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "least": {},
    "whole": WHOLE,
    "nat": {"network": {"egress": "nat"}},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_is_up_needs_nothing_more_and_down_leaves_nothing(
    configuration: str, make_stack: MakeStack, gate: Gate, aws: Emulator, record_property: Callable[[str, Any], None]
) -> None:
    before = inventory(aws)
    stack = make_stack(CONFIGURATIONS[configuration])

    first = stack.up().check()
    made = stack.resources()
    stack.preview("--refresh", "--expect-no-changes").check()
    gate.forget()
    second = stack.up("--expect-no-changes").check()

    figures = f"{len(made)} resources: up {first.seconds:.1f} s, again {second.seconds:.1f} s"
    print(f"{configuration}, {figures}")  # noqa: T201 - shown by `pytest -rP`
    record_property("figures", figures)
    assert first.seconds < LONG
    assert second.seconds < LONG
    assert gate.writes() == []
    assert _essence(stack.resources()) == _essence(made)

    stack.destroy().check()
    assert inventory(aws) == before
    assert stack.resources() == []


def test_a_change_of_configuration_updates_in_place_only_what_it_should(
    make_stack: MakeStack, configured: Callable[..., dict[str, Any]], aws: Emulator
) -> None:
    stack = make_stack({"encryption": {"key": "create"}})
    stack.up().check()
    outputs = stack.outputs()

    stack.configure(configured(encryption={"key": "create"}, bucket={"versioning": True}))
    versioned = stack.up().check()
    assert versioned.of("create") == {"BucketVersioning diloco-dev"}
    assert versioned.changes == {"create": 1}

    stack.configure(
        configured(encryption={"key": "create"}, bucket={"versioning": True}, launcher={"maxKeepAliveSeconds": 60})
    )
    limited = stack.up().check()
    assert limited.of("update") == {"Policy diloco-dev-launcher"}
    assert limited.changes == {"update": 1}

    stack.configure(configured(encryption={"key": "create"}, launcher={"maxKeepAliveSeconds": 60}))
    assert stack.up().check().changes == {"delete": 1}
    assert aws.client("s3").get_bucket_versioning(Bucket=outputs["bucket"])["Status"] == "Suspended"
    assert stack.outputs() == outputs


def test_a_change_of_tags_replaces_nothing(
    make_stack: MakeStack, configured: Callable[..., dict[str, Any]], aws: Emulator
) -> None:
    stack = make_stack({"network": {"egress": "none"}})
    stack.up().check()

    stack.configure(configured(network={"egress": "none"}, tags={"team": "research"}))
    tagged = stack.up().check()

    assert tagged.changes == {"update": len(tagged.of("update"))}
    assert {"Bucket diloco-dev-sagemaker", "Role diloco-dev-jobs", "Vpc diloco-dev"} <= tagged.of("update")
    told = aws.client("s3").get_bucket_tagging(Bucket=stack.outputs()["bucket"])["TagSet"]
    assert {"Key": "team", "Value": "research"} in told


def test_drift_is_found_by_refresh_and_repaired_by_up(make_stack: MakeStack, aws: Emulator) -> None:
    stack = make_stack(WHOLE)
    stack.up().check()
    outputs = stack.outputs()
    bucket, role = outputs["bucket"], outputs["sagemakerRoleArn"].rpartition("/")[2]
    s3, iam, ec2 = (aws.client(service) for service in ("s3", "iam", "ec2"))
    inline = iam.list_role_policies(RoleName=role)["PolicyNames"][0]
    granted = iam.get_role_policy(RoleName=role, PolicyName=inline)["PolicyDocument"]
    opened = {**granted, "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}

    s3.delete_public_access_block(Bucket=bucket)
    s3.delete_bucket_policy(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    s3.delete_bucket_tagging(Bucket=bucket)
    iam.put_role_policy(RoleName=role, PolicyName=inline, PolicyDocument=json.dumps(opened))
    ec2.revoke_security_group_egress(
        GroupId=outputs["securityGroupIds"][0],
        IpPermissions=ec2.describe_security_groups(GroupIds=outputs["securityGroupIds"])["SecurityGroups"][0][
            "IpPermissionsEgress"
        ],
    )

    refreshed = stack.refresh().check()
    assert {
        "BucketPublicAccessBlock diloco-dev": "delete",
        "BucketPolicy diloco-dev": "delete",
        "BucketVersioning diloco-dev": "update",
        "Bucket diloco-dev-sagemaker": "update",
        "RolePolicy diloco-dev-jobs": "update",
    }.items() <= refreshed.drift.items()
    assert any(name.startswith("SecurityGroupEgressRule") for name in refreshed.drift)

    repaired = stack.up().check()
    assert set(repaired.changes) == {"create", "update"}
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    assert "aws:SecureTransport" in s3.get_bucket_policy(Bucket=bucket)["Policy"]
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    assert iam.get_role_policy(RoleName=role, PolicyName=inline)["PolicyDocument"] == granted
    stack.preview("--refresh", "--expect-no-changes").check()
    assert stack.outputs() == outputs


def test_a_bucket_that_holds_objects_is_not_deleted(make_stack: MakeStack, aws: Emulator) -> None:
    stack = make_stack()
    stack.up().check()
    bucket = stack.outputs()["bucket"]
    s3 = aws.client("s3")
    s3.put_object(Bucket=bucket, Key="rendezvous/run/commits/00000001.json", Body=b"{}")

    refused = stack.destroy().failed()

    assert "BucketNotEmpty" in refused.errors
    assert bucket in refused.errors
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    # Nor is it left open by what was destroyed before it.
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    assert "aws:SecureTransport" in s3.get_bucket_policy(Bucket=bucket)["Policy"]

    s3.delete_object(Bucket=bucket, Key="rendezvous/run/commits/00000001.json")
    stack.destroy().check()
    assert stack.resources() == []


def test_outside_dev_what_holds_data_is_protected(
    make_stack: MakeStack, configured: Callable[..., dict[str, Any]], aws: Emulator
) -> None:
    stack = make_stack(name="prod")
    stack.up().check()
    bucket = stack.outputs()["bucket"]

    refused = stack.destroy().failed()
    assert "protect" in refused.errors
    aws.client("s3").head_bucket(Bucket=bucket)

    stack.configure(configured(protect=False))
    # The engine has destroyed what was not protected, and nothing of the bucket.
    assert not {change for change in stack.up().check().of("create") if change.startswith("Bucket")}
    stack.destroy().check()


def test_two_stacks_side_by_side_do_not_collide(make_stack: MakeStack, aws: Emulator) -> None:
    one, other = make_stack(WHOLE, name="dev"), make_stack(WHOLE, name="dev")
    running = [stack.start("up", "--yes", "--skip-preview") for stack in (one, other)]
    for command in running:
        command.wait().check()
    first, second = one.outputs(), other.outputs()
    shared = {"schemaVersion", "region", "account", "imageUri", "jobNamePrefix", "tags"}
    assert {key for key in first if first[key] == second[key]} == shared

    before = inventory(aws)
    one.destroy().check()

    other.preview("--refresh", "--expect-no-changes").check()
    assert second["bucket"] in inventory(aws)["buckets"]
    assert first["bucket"] not in inventory(aws)["buckets"]
    other.destroy().check()
    assert {kind: before[kind] - inventory(aws)[kind] for kind in ("buckets", "roles")} == {
        "buckets": {first["bucket"], second["bucket"]},
        "roles": {outputs["sagemakerRoleArn"].rpartition("/")[2] for outputs in (first, second)},
    }


def _essence(resources: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["urn"]: (one.get("id"), one.get("inputs"), one.get("outputs")) for one in resources}
