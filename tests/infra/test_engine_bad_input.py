"""What bad input gets: an error that names key and fix, no traceback, and nothing that is half made and unmanaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.conftest import inventory

if TYPE_CHECKING:
    from tests.infra.conftest import MakeStack
    from tests.support.gate import Gate
    from tests.support.sagemaker.emulator import Emulator

WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bucket-name": ({"bucket": {"name": "Not_A_Bucket"}}, ("diloco:bucket.name", "'Not_A_Bucket'", "3 to 63")),
    "tag-instead-of-digest": (
        {"image": {"uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:latest"}},
        ("diloco:image.uri", "trainer:latest", "@sha256:"),
    ),
    "type": ({"bucket": {"versioning": "perhaps"}}, ("diloco:bucket.versioning", "'perhaps'", "true")),
    "unknown-key": ({"buckets": "x"}, ("diloco:buckets", "bucket")),
    "unknown-nested-key": ({"bucket": {"nmae": "x"}}, ("diloco:bucket.nmae", "name")),
    "no-way-out": (
        {"network": {"egress": "none", "huggingFace": True}},
        ("diloco:network.egress", "'none'", "nat"),
    ),
    "two-at-once": (
        {"jobNamePrefix": "-", "launcher": {"maxKeepAliveSeconds": 7200}},
        ("2 problems", "diloco:jobNamePrefix", "diloco:launcher.maxKeepAliveSeconds", "3600"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configuration_touches_nothing(case: str, make_stack: MakeStack, gate: Gate) -> None:
    config, named = WRONG[case]
    stack = make_stack(config)

    refused = stack.up().failed()

    assert [part for part in named if part not in refused.errors] == [], refused.errors
    assert "Traceback" not in refused.text
    assert gate.writes() == []
    assert {one["type"] for one in stack.resources()} <= {"pulumi:pulumi:Stack"}


def test_a_bucket_name_that_is_taken_leaves_nothing_unmanaged(make_stack: MakeStack, aws: Emulator) -> None:
    aws.client("s3").create_bucket(Bucket="taken-sagemaker")
    before = inventory(aws)
    stack = make_stack({"bucket": {"name": "taken-sagemaker"}})

    refused = stack.up().failed()

    named = ("diloco:bucket.name", "'taken-sagemaker'", "choose another", "bucket.adopt")
    assert [part for part in named if part not in refused.errors] == [], refused.errors
    assert "Traceback" not in refused.text
    known = {str(one.get("id")) for one in stack.resources()}
    made = {name for kind, names in inventory(aws).items() for name in names - before[kind]}
    assert {name for name in made if not any(name in one for one in known)} == set()
    stack.destroy().check()
    assert inventory(aws) == before
    aws.client("s3").delete_bucket(Bucket="taken-sagemaker")


def test_without_a_region_the_key_is_named(make_stack: MakeStack) -> None:
    stack = make_stack({"aws:region": None})
    refused = stack.up().failed()
    assert "aws:region" in refused.errors
    assert "Traceback" not in refused.text
