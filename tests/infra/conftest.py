"""What tests on the real Pulumi engine share: one MiniStack, and stacks of their own in front of it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import pytest

from tests.support.engine import require
from tests.support.gate import Gate
from tests.support.pulumi_stack import REAL_AWS_PLUGIN, PulumiStack
from tests.support.sagemaker.ministack import ministack, put_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.sagemaker.emulator import Emulator

REGION = "us-east-1"
ACCOUNT = "123456789012"


class MakeStack(Protocol):
    """Makes a stack whose AWS is the emulator behind the gate; keywords are keys of the project's configuration."""

    def __call__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        name: str = "dev",
        main: Path | None = None,
    ) -> PulumiStack: ...


@pytest.fixture(autouse=True)
def _loop_of_this_thread() -> Iterator[None]:
    """Pulumi's mocks take the thread's event loop, which an earlier `asyncio.run` has taken away."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """One MiniStack for all tests of this folder: what a test makes, it tells from others' by name."""
    with ministack(tmp_path_factory.mktemp("ministack"), region=REGION) as emulator:
        yield emulator


@pytest.fixture
def gate(aws: Emulator) -> Iterator[Gate]:
    """What stands between this test's stacks and the emulator."""
    with Gate(aws.endpoint_url) as gate:
        yield gate


@pytest.fixture
def make_stack(tmp_path: Path, aws: Emulator, gate: Gate, adopted_image: str) -> Iterator[MakeStack]:
    """Stacks of this test. Their image is one that exists, unless their configuration says otherwise."""
    require("pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python")
    with ExitStack() as stacks:

        def make(
            config: Mapping[str, Any] | None = None,
            *,
            name: str = "dev",
            main: Path | None = None,
        ) -> PulumiStack:
            folder = tmp_path / f"stack-{len(made)}"
            folder.mkdir()
            made.append(folder)
            return stacks.enter_context(
                PulumiStack(
                    folder,
                    name=name,
                    environment=environment(aws, gate),
                    config=full_config(adopted_image, config or {}),
                    main=main,
                )
            )

        made: list[Path] = []
        yield make


@pytest.fixture
def configured(adopted_image: str) -> Callable[..., dict[str, Any]]:
    """The whole configuration that `make_stack` would give to a stack, for `PulumiStack.configure`."""

    def configuration(**config: Any) -> dict[str, Any]:
        return full_config(adopted_image, config)

    return configuration


@pytest.fixture(scope="session")
def adopted_image(aws: Emulator) -> str:
    """An image in a repository that no stack made, by digest."""
    return put_image(aws)


def environment(aws: Emulator, gate: Gate) -> dict[str, str]:
    """What reaches the emulator and nothing else."""
    return {
        "AWS_ENDPOINT_URL": gate.endpoint_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        # Images are pushed to the emulator itself: they come in chunks of unknown length.
        "DILOCO_TEST_REGISTRY": urlsplit(aws.endpoint_url).netloc,
        **LOOPBACK,
    }


LOOPBACK = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def full_config(image: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without a namespace are the project's; None takes a key out."""
    keys: dict[str, Any] = {"aws:region": REGION, "diloco:image": {"uri": image}}
    if REAL_AWS_PLUGIN:
        keys |= {f"aws:{name}": True for name in ("skipMetadataApiCheck", "skipRegionValidation", "s3UsePathStyle")}
    keys |= {key if ":" in key else f"diloco:{key}": value for key, value in config.items()}
    return {key: value for key, value in keys.items() if value is not None}


def inventory(aws: Emulator) -> dict[str, set[str]]:
    """Everything in the emulator that a stack can make, by kind."""
    s3, iam, kms, ecr, ec2 = (aws.client(service) for service in ("s3", "iam", "kms", "ecr", "ec2"))
    keys = [kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"] for key in kms.list_keys()["Keys"]]
    return {
        "buckets": {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]},
        "roles": {role["RoleName"] for role in iam.list_roles()["Roles"]},
        "policies": {policy["PolicyName"] for policy in iam.list_policies(Scope="Local")["Policies"]},
        # KMS keeps a deleted key for its window.
        "keys": {key["KeyId"] for key in keys if key["KeyState"] != "PendingDeletion" and key["Description"]},
        "aliases": {alias["AliasName"] for alias in kms.list_aliases()["Aliases"]},
        "repositories": {one["repositoryName"] for one in ecr.describe_repositories()["repositories"]},
        "vpcs": {vpc["VpcId"] for vpc in ec2.describe_vpcs()["Vpcs"]},
        "subnets": {subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"]},
        "route tables": {table["RouteTableId"] for table in ec2.describe_route_tables()["RouteTables"]},
        "security groups": {group["GroupId"] for group in ec2.describe_security_groups()["SecurityGroups"]},
        "internet gateways": {one["InternetGatewayId"] for one in ec2.describe_internet_gateways()["InternetGateways"]},
        "addresses": {one["AllocationId"] for one in ec2.describe_addresses()["Addresses"]},
        "NAT gateways": {
            one["NatGatewayId"] for one in ec2.describe_nat_gateways()["NatGateways"] if one["State"] != "deleted"
        },
        "endpoints": {
            one["VpcEndpointId"] for one in ec2.describe_vpc_endpoints()["VpcEndpoints"] if one["State"] != "deleted"
        },
    }
