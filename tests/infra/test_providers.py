"""The stand-in providers are as strict as the real ones: arguments, names, what replaces, what is read back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from pulumi.provider.experimental import provider as api

from tests.infra.conftest import ACCOUNT, REGION
from tests.support.providers import declared
from tests.support.providers.aws import RESOURCES
from tests.support.providers.aws_functions import FUNCTIONS
from tests.support.providers.docker_build import Image, context_hash
from tests.support.providers.dropped import DROPPED
from tests.support.providers.provider import StandInProvider
from tests.support.providers.session import AwsSession
from tests.support.providers.values import plain_map, same_document, wire_map

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sagemaker.emulator import Emulator

# Looking a class up imports its whole module, deprecated classes too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SEED = b"seed"
STATEMENT = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::x/*"}
DOCUMENT = json.dumps({"Version": "2012-10-17", "Statement": [STATEMENT]})


def token(name: str) -> str:
    """The type token of a resource class's name."""
    (found,) = (str(one) for one in RESOURCES if one.endswith(f":{name}"))
    return found


@pytest.fixture
def session(aws: Emulator, monkeypatch: pytest.MonkeyPatch) -> AwsSession:
    """The provider's AWS, with a default tag."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    services = ("s3", "iam", "kms", "ecr", "ec2", "eks", "sts")
    return AwsSession(
        {
            "region": REGION,
            "accessKey": "test",
            "secretKey": "test",
            "s3UsePathStyle": True,
            "endpoints": json.dumps([dict.fromkeys(services, aws.endpoint_url)]),
            "defaultTags": json.dumps({"tags": {"owner": "everyone"}}),
        }
    )


@pytest.fixture
def provider(session: AwsSession) -> StandInProvider:
    """The whole provider, called as the engine does."""
    made = StandInProvider("aws", RESOURCES, FUNCTIONS, lambda _: session)
    asyncio.run(made.configure(api.ConfigureRequest({}, {}, accept_secrets=True, accept_resources=True)))
    return made


def urn(name: str, logical: str = "it") -> str:
    return f"urn:pulumi:dev::p::a:b:Parent${token(name)}::{logical}"


def check(provider: StandInProvider, name: str, inputs: dict[str, Any], old: dict[str, Any] | None = None) -> Any:
    request = api.CheckRequest(urn(name), wire_map(old or {}), wire_map(inputs), SEED)
    return asyncio.run(provider.check(request))


def checked(provider: StandInProvider, name: str, inputs: dict[str, Any], old: Any = None) -> dict[str, Any]:
    found = check(provider, name, inputs, old)
    assert not found.failures, [(one.property, one.reason) for one in found.failures]
    return plain_map(found.inputs)


def create(provider: StandInProvider, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    properties = wire_map(checked(provider, name, inputs))
    made = asyncio.run(provider.create(api.CreateRequest(urn(name), properties, 0, preview=False)))
    assert made.resource_id
    return made.resource_id, plain_map(made.properties)


def diff(provider: StandInProvider, name: str, state: dict[str, Any], inputs: dict[str, Any]) -> Any:
    news = wire_map(checked(provider, name, inputs, state))
    return asyncio.run(provider.diff(api.DiffRequest(urn(name), "id", wire_map(state), news, [])))


def delete(provider: StandInProvider, name: str, resource_id: str, state: dict[str, Any]) -> None:
    asyncio.run(provider.delete(api.DeleteRequest(urn(name), resource_id, wire_map(state), 0)))


@pytest.mark.parametrize("resource_token", RESOURCES)
def test_what_is_implemented_is_what_the_real_class_declares(resource_token: str) -> None:
    cls, real = RESOURCES[resource_token], declared.resource(resource_token)
    assert cls.accepted() <= real.arguments.keys()
    assert cls.replace_on | cls.computed | cls.documents | cls.defaults.keys() <= cls.accepted()
    # Whatever a program must give, it can give.
    assert real.required <= cls.accepted()


@pytest.mark.parametrize(
    ("name", "inputs", "wrong", "reason"),
    [
        ("Bucket", {"buckt": "x"}, "buckt", "no such argument; there are accelerationStatus, acl, bucket"),
        ("Bucket", {"forceDestroy": "yes"}, "forceDestroy", "a value of type bool is expected, not 'yes'"),
        ("Bucket", {"bucket": "Not_A_Bucket"}, "bucket", "invalid S3 bucket name"),
        ("Bucket", {"acl": "private"}, "acl", "does not implement"),
        ("BucketPolicy", {"bucket": "x"}, "policy", "is required"),
        ("BucketVersioning", {"bucket": "x", "versioningConfiguration": {}}, "versioningConfiguration", "is required"),
        ("Subnet", {"vpcId": "vpc-1", "tags": {"a": 1}}, "tags", "a value of type str is expected, not 1"),
        ("BucketLifecycleConfiguration", {"bucket": "x", "rules": [{"nmae": "x"}]}, "rules", "rules[0].nmae"),
    ],
)
def test_what_the_real_class_does_not_declare_is_refused(
    name: str, inputs: dict[str, Any], wrong: str, reason: str, provider: StandInProvider
) -> None:
    (failure,) = check(provider, name, inputs).failures
    assert failure.property == wrong
    assert reason in failure.reason


def test_names_are_made_as_the_real_provider_makes_them(provider: StandInProvider) -> None:
    first = checked(provider, "Bucket", {})
    assert first["bucket"].startswith("it-")
    assert len(first["bucket"]) == len("it-") + 7
    assert checked(provider, "Bucket", {}, first)["bucket"] == first["bucket"]
    given = checked(provider, "Bucket", {"bucket": "given"}, first)
    assert given["bucket"] == "given"
    assert checked(provider, "Bucket", {}, given)["bucket"] != "given"

    long = api.CheckRequest(urn("Role", "r" * 60), {}, wire_map({"assumeRolePolicy": "{}"}), SEED)
    (failure,) = asyncio.run(provider.check(long)).failures or []
    assert "longer than maximum length 64" in failure.reason


def test_what_replaces_and_what_does_not(provider: StandInProvider) -> None:
    role = {"assumeRolePolicy": DOCUMENT}
    _, state = create(provider, "Role", role)
    assert not diff(provider, "Role", state, role).changes
    same = json.dumps({"Statement": {**STATEMENT, "Action": ["s3:GetObject"]}, "Version": "2012-10-17"})
    assert not diff(provider, "Role", state, {"assumeRolePolicy": same}).changes

    described = diff(provider, "Role", state, role | {"description": "d"})
    assert (described.changes, described.replaces, described.diffs) == (True, [], ["description"])
    moved = diff(provider, "Role", state, role | {"path": "/elsewhere/"})
    assert (moved.replaces, moved.delete_before_replace) == (["path"], False)
    # A name that the program gives can't be there twice.
    named = diff(provider, "Role", state | {"name": "n"}, role | {"name": "n", "path": "/elsewhere/"})
    assert named.delete_before_replace
    delete(provider, "Role", state["name"], state)

    lifecycle = diff(
        provider, "LifecyclePolicy", {"repository": "r", "policy": "{}"}, {"repository": "r", "policy": "[1]"}
    )
    assert lifecycle.replaces == ["policy"]


def test_tags_of_all_resources_are_in_tags_all_only(provider: StandInProvider, aws: Emulator) -> None:
    resource_id, state = create(provider, "Bucket", {"tags": {"team": "research"}})
    assert state["tags"] == {"team": "research"}
    assert state["tagsAll"] == {"team": "research", "owner": "everyone"}
    assert diff(provider, "Bucket", state, {"tags": {}}).diffs == ["tags", "tagsAll"]
    aws.client("s3").delete_bucket_tagging(Bucket=resource_id)
    read = asyncio.run(provider.read(api.ReadRequest(urn("Bucket"), resource_id, wire_map(state), {})))
    assert diff(provider, "Bucket", plain_map(read.properties), {"tags": {"team": "research"}}).diffs == [
        "tags",
        "tagsAll",
    ]
    delete(provider, "Bucket", resource_id, state)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("Bucket", {"tags": {"a": "b"}}),
        ("Role", {"assumeRolePolicy": DOCUMENT, "maxSessionDuration": 7200, "description": "d"}),
        ("Policy", {"policy": DOCUMENT}),
        ("Key", {"description": "d", "enableKeyRotation": True, "deletionWindowInDays": 7}),
        ("Repository", {"imageTagMutability": "IMMUTABLE", "imageScanningConfiguration": {"scanOnPush": True}}),
        ("Vpc", {"cidrBlock": "10.9.0.0/16", "enableDnsHostnames": True}),
        ("InternetGateway", {}),
        ("Eip", {"domain": "vpc"}),
    ],
)
def test_what_is_imported_by_its_id_is_as_if_it_had_been_made(
    name: str, inputs: dict[str, Any], provider: StandInProvider
) -> None:
    resource_id, state = create(provider, name, inputs)
    read = asyncio.run(provider.read(api.ReadRequest(urn(name), resource_id, {}, {})))
    assert read.resource_id == resource_id
    imported = plain_map(read.properties)
    untold = {
        "__defaults",
        "forceDestroy",
        "forceDetachPolicies",
        "deletionWindowInDays",
        "bypassPolicyLockoutSafetyCheck",
    }
    assert {key: value for key, value in state.items() if key not in untold} == imported
    assert plain_map(read.inputs).keys() <= RESOURCES[token(name)].accepted()
    delete(provider, name, resource_id, state)
    gone = asyncio.run(provider.read(api.ReadRequest(urn(name), resource_id, wire_map(state), {})))
    assert not gone.resource_id
    delete(provider, name, resource_id, state)  # as the real one: no error


@pytest.fixture
def vpc(provider: StandInProvider) -> Iterator[dict[str, str]]:
    """Ids of a VPC with a subnet, a route table, a security group and an address."""
    vpc_id, vpc_state = create(provider, "Vpc", {"cidrBlock": "10.8.0.0/16"})
    made = [("Vpc", vpc_id, vpc_state)]
    ids = {"Vpc": vpc_id}
    for name, inputs in (
        ("Subnet", {"vpcId": vpc_id, "cidrBlock": "10.8.0.0/24"}),
        ("RouteTable", {"vpcId": vpc_id}),
        ("SecurityGroup", {"vpcId": vpc_id}),
        ("Eip", {"domain": "vpc"}),
    ):
        ids[name], state = create(provider, name, inputs)
        made.append((name, ids[name], state))
    yield ids
    for name, resource_id, state in reversed(made):
        delete(provider, name, resource_id, state)


def test_every_dropped_field_is_still_dropped(
    provider: StandInProvider, vpc: dict[str, str], session: AwsSession
) -> None:
    s3_list = session.client("ec2").describe_prefix_lists()["PrefixLists"][0]["PrefixListId"]
    place = {"vpcId": vpc["Vpc"], "policy": DOCUMENT}
    cases: dict[str, dict[str, Any]] = {
        "VpcEndpoint": place
        | {"serviceName": f"com.amazonaws.{REGION}.sts", "vpcEndpointType": "Interface", "privateDnsEnabled": True}
        | {"subnetIds": [vpc["Subnet"]], "securityGroupIds": [vpc["SecurityGroup"]]},
        "NatGateway": {"subnetId": vpc["Subnet"], "allocationId": vpc["Eip"]},
        "SecurityGroupEgressRule": {
            "securityGroupId": vpc["SecurityGroup"],
            "ipProtocol": "tcp",
            "fromPort": 443,
            "toPort": 443,
            "prefixListId": s3_list,
            "description": "d",
        },
    }
    assert {token(name) for name in cases} == DROPPED.keys()
    for name, inputs in cases.items():
        resource_id, state = create(provider, name, inputs)
        told = RESOURCES[token(name)](session).read(resource_id, {})
        assert told is not None
        assert [field for field in DROPPED[token(name)] if told.get(field)] == [], f"{name}: drop it from dropped.py"
        assert not diff(provider, name, state, inputs).changes
        delete(provider, name, resource_id, state)


def test_functions_tell_what_the_real_ones_do(provider: StandInProvider, aws: Emulator, adopted_image: str) -> None:
    aws.client("iam").create_role(RoleName="asked", AssumeRolePolicyDocument=DOCUMENT)
    aws.client("s3").create_bucket(Bucket="asked-for")
    key = aws.client("kms").create_key()["KeyMetadata"]["KeyId"]
    aws.client("eks").create_cluster(
        name="asked", roleArn=f"arn:aws:iam::{ACCOUNT}:role/asked", resourcesVpcConfig={"subnetIds": []}
    )
    asked: dict[str, dict[str, Any]] = {
        "getRole": {"name": "asked"},
        "getBucket": {"bucket": "asked-for"},
        "getKey": {"keyId": key},
        "getCluster": {"name": "asked"},
        "getRepository": {"name": "shared/trainer"},
        "getImage": {"repositoryName": "shared/trainer", "imageDigest": adopted_image.partition("@")[2]},
        "getPrincipalPolicySimulation": {
            "policySourceArn": f"arn:aws:iam::{ACCOUNT}:role/asked",
            "actionNames": ["s3:GetObject"],
            "resourceArns": ["arn:aws:s3:::x/y"],
        },
    }
    for function in FUNCTIONS:
        args = asked.get(function.rpartition(":")[2], {})
        told = asyncio.run(provider.invoke(api.InvokeRequest(function, wire_map(args))))
        assert not told.failures, [one.reason for one in told.failures]
        assert told.return_value
    assert asked.keys() <= {function.rpartition(":")[2] for function in FUNCTIONS}

    missing = asyncio.run(provider.invoke(api.InvokeRequest("aws:iam/getRole:getRole", wire_map({"name": "nobody"}))))
    assert "NoSuchEntity" in missing.failures[0].reason
    aws.client("eks").delete_cluster(name="asked")
    aws.client("iam").delete_role(RoleName="asked")
    aws.client("s3").delete_bucket(Bucket="asked-for")


def test_policies_are_compared_by_meaning() -> None:
    one = json.dumps({"Statement": [{"Action": ["b", "a"], "Resource": "x"}]})
    assert same_document(one, json.dumps({"Statement": {"Resource": ["x"], "Action": ["a", "b"]}}))
    assert not same_document(one, json.dumps({"Statement": {"Resource": ["x"], "Action": ["a"]}}))
    assert not same_document(one, None)


def test_an_image_is_built_again_when_a_file_of_its_context_changes(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*\n!kept\n**/__pycache__\n")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY kept /\n")
    (tmp_path / "kept" / "__pycache__").mkdir(parents=True)
    (tmp_path / "kept" / "file").write_text("1")
    exports = [{"registry": {"ociMediaTypes": False, "push": True}}]
    inputs = {"context": {"location": str(tmp_path)}, "exports": exports, "tags": [], "buildArgs": {"A": "1"}}
    state = inputs | {"contextHash": context_hash(inputs), "registries": [{"address": "r", "password": "old"}]}
    new = inputs | {"registries": [{"address": "r", "password": "new"}]}

    def changes(**more: Any) -> set[str]:
        return set(Image(None, "r").diff(state, new | more, frozenset(), {}))

    (tmp_path / "left-out").write_text("x")
    (tmp_path / "kept" / "__pycache__" / "file.pyc").write_text("x")
    assert changes() == set()
    assert changes(buildArgs={"A": "2"}) == {"buildArgs"}
    (tmp_path / "kept" / "file").write_text("2")
    assert changes() == {"contextHash"}
