"""The stack's configuration: what is read, and the one error that lists all that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic.alias_generators import to_camel

from diloco.errors import ConfigurationError
from diloco.stack import NAMES
from infra.settings import Settings, slug

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/trainer@{DIGEST}"
KEY = "arn:aws:kms:us-west-2:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


def parse(stack: str = "prod", **values: Any) -> Settings:
    """As the engine hands values over: text as it is, all else as JSON."""
    return Settings.parse({key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()}, stack)


def refusal(stack: str = "prod", **values: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        parse(stack, **values)
    head, *lines = str(refused.value).splitlines()
    assert head.startswith(f"{len(lines)} problem")
    assert head.endswith(f"in the configuration of stack {stack}:")
    return [line.removeprefix("  diloco:") for line in lines]


def test_nothing_needs_to_be_set() -> None:
    settings = parse()
    assert settings.job_name_prefix == "diloco-prod"
    assert settings.protected
    assert not settings.dev
    assert settings.network is None
    assert settings.quotas == []


@pytest.mark.parametrize("stack", ["dev", "local"])
def test_a_stack_that_may_be_thrown_away_is_known_by_its_name(stack: str) -> None:
    settings = parse(stack)
    assert settings.dev
    assert not settings.protected
    assert parse(stack, protect=True).protected
    assert not parse(stack, dev=False).dev
    assert parse("prod", dev=True).dev


def test_a_stacks_name_becomes_part_of_names() -> None:
    assert slug("My_Stack.2") == "my-stack-2"
    assert parse("My_Stack").job_name_prefix == "diloco-my-stack"
    (line,) = refusal("a-very-long-name-of-a-stack")
    assert line == "jobNamePrefix 'diloco-a-very-long-name-of-a-stack': allowed: at most 24 characters"
    assert parse("a-very-long-name-of-a-stack", jobNamePrefix="short").job_name_prefix == "short"


def test_everything_can_be_set() -> None:
    settings = parse(
        dev=False,
        protect=False,
        jobNamePrefix="team-a",
        tags={"team": "a"},
        bucket={"name": "a-bucket", "prefix": "x/y", "versioning": True, "logBucket": "logs", "logPrefix": ""},
        encryption={"key": KEY, "repository": True},
        role={"permissionsBoundary": "arn:aws:iam::123456789012:policy/boundary"},
        launcher={
            "instanceTypes": ["ml.g5.*"],
            "maxKeepAliveSeconds": 0,
            "attachTo": ["arn:aws:iam::123456789012:user/a"],
        },
        image={"baseImage": "registry/base:1", "keep": 3},
        quotas=[{"instanceType": "ml.g5.2xlarge", "training": 8, "spot": 4, "warmPool": 2}],
        network={"egress": "nat", "cidr": "10.1.0.0/20", "huggingFace": True},
        dataUris=["s3://data/x"],
        secretArns=["arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbCdEf"],
    )
    assert settings.encryption.adopted_key == KEY
    assert settings.quotas[0].warm_pool == 2
    assert not settings.protected


# One value of each key that can't be, and what is said of it.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dev": "perhaps"}, "dev 'perhaps': allowed: true or false"),
    ({"protect": "perhaps"}, "protect 'perhaps': allowed: true or false"),
    ({"jobNamePrefix": "Diloco"}, "jobNamePrefix 'Diloco': allowed: a-z, 0-9 and single hyphens, not at the ends"),
    ({"jobNamePrefix": "a--b"}, "jobNamePrefix 'a--b': allowed: a-z, 0-9"),
    ({"tags": "x"}, "tags 'x': allowed: an object of keys and values"),
    ({"tags": {"aws:x": "y"}}, "tags.aws:x: allowed: keys that don't begin with aws:"),
    ({"tags": {"x": 1}}, "tags.x 1: allowed: text"),
    ({"bucket": "b"}, "bucket 'b': allowed: an object"),
    ({"bucket": [1]}, "bucket [1]: allowed: an object"),
    ({"bucket": {"name": "Upper"}}, "bucket.name 'Upper': allowed: 3 to 63 of a-z, 0-9, hyphen and dot"),
    ({"bucket": {"name": "10.0.0.1"}}, "bucket.name '10.0.0.1': allowed: 3 to 63"),
    ({"bucket": {"name": "a..b"}}, "bucket.name 'a..b': allowed: 3 to 63"),
    ({"bucket": {"name": "x" * 64}}, "allowed: 3 to 63"),
    ({"bucket": {"name": "abc-s3alias"}}, "bucket.name 'abc-s3alias': allowed: 3 to 63"),
    ({"bucket": {"adopt": "s3://b"}}, "bucket.adopt 's3://b': allowed: 3 to 63"),
    ({"bucket": {"adopt": "abc", "name": "abd"}}, "bucket.name: an adopted bucket is left as it is"),
    ({"bucket": {"adopt": "abc", "versioning": True}}, "bucket.versioning: an adopted bucket is left as it is"),
    ({"bucket": {"adopt": "abc", "logBucket": "log"}}, "bucket.logBucket: an adopted bucket is left as it is"),
    ({"bucket": {"prefix": "/a"}}, "bucket.prefix '/a': allowed: folders"),
    ({"bucket": {"prefix": "a*"}}, "bucket.prefix 'a*': allowed: folders"),
    ({"bucket": {"versioning": "maybe"}}, "bucket.versioning 'maybe': allowed: true or false"),
    ({"encryption": {"key": "kms"}}, "encryption.key 'kms': allowed: s3 (Amazon S3's own keys), create, or a KMS"),
    ({"encryption": {"key": "alias/x"}}, "encryption.key 'alias/x': allowed: s3"),
    ({"encryption": {"repository": True}}, "encryption.repository true: there is no key"),
    ({"role": {"adopt": "arn:aws:iam::123456789012:role/x"}}, "allowed: a role's name (not its ARN)"),
    (
        {"role": {"adopt": "x", "permissionsBoundary": "arn:aws:iam::123456789012:policy/b"}},
        "role.permissionsBoundary:",
    ),
    (
        {"launcher": {"instanceTypes": ["g5.xlarge"]}},
        "launcher.instanceTypes[0] 'g5.xlarge': allowed: an instance type or",
    ),
    ({"launcher": {"maxKeepAliveSeconds": 3601}}, "launcher.maxKeepAliveSeconds 3601: allowed: at most 3600"),
    ({"launcher": {"maxKeepAliveSeconds": -1}}, "launcher.maxKeepAliveSeconds -1: allowed: at least 0"),
    ({"launcher": {"maxKeepAliveSeconds": "ten"}}, "launcher.maxKeepAliveSeconds 'ten': allowed: a whole number"),
    ({"launcher": {"attachTo": ["somebody"]}}, "launcher.attachTo[0] 'somebody': allowed: the ARN of an IAM user"),
    ({"image": {"uri": "trainer:latest"}}, "image.uri 'trainer:latest': allowed: registry/repository@sha256:…"),
    ({"image": {"uri": IMAGE[:-1]}}, "allowed: registry/repository@sha256:…"),
    ({"image": {"uri": IMAGE, "baseImage": "x"}}, "image.baseImage: nothing is built"),
    ({"image": {"keep": 0}}, "image.keep 0: allowed: at least 1"),
    ({"quotas": {"a": 1}}, "quotas {'a': 1}: allowed: a list"),
    ({"quotas": [{"training": 1}]}, "quotas[0].instanceType: missing"),
    (
        {"quotas": [{"instanceType": "g5.2xlarge", "training": 1}]},
        "quotas[0].instanceType 'g5.2xlarge': allowed: an instance",
    ),
    ({"quotas": [{"instanceType": "ml.g5.2xlarge"}]}, "quotas: ml.g5.2xlarge wants nothing"),
    ({"quotas": [{"instanceType": "ml.g5.2xlarge", "spot": 0}]}, "quotas[0].spot 0: allowed: at least 1"),
    ({"quotas": [{"instanceType": "ml.g5.2xlarge", "training": 1}] * 2}, "quotas: ml.g5.2xlarge is there twice"),
    ({"network": {}}, "network: allowed: network.egress none, endpoints or nat"),
    ({"network": {"egress": "all"}}, "network.egress 'all': allowed: none, endpoints or nat"),
    ({"network": {"subnetIds": ["subnet-1"]}}, "network: an adopted VPC needs both"),
    (
        {"network": {"subnetIds": ["x"], "securityGroupIds": ["sg-1"]}},
        "network.subnetIds[0] 'x': allowed: a subnet's id",
    ),
    (
        {"network": {"subnetIds": ["subnet-1"], "securityGroupIds": ["sg-1"], "egress": "nat"}},
        "network.egress: an adopted VPC is left as it is",
    ),
    ({"network": {"egress": "none", "huggingFace": True}}, "network.egress 'none': Hugging Face is on the internet"),
    ({"network": {"egress": "endpoints", "huggingFace": True}}, "network.egress 'endpoints': Hugging Face"),
    ({"network": {"egress": "nat", "cidr": "8.8.8.0/24"}}, "network.cidr '8.8.8.0/24': allowed: a private range"),
    ({"network": {"egress": "nat", "cidr": "172.1.0.0/16"}}, "network.cidr '172.1.0.0/16': allowed: a private range"),
    ({"network": {"egress": "nat", "cidr": "10.0.1.0/16"}}, "network.cidr '10.0.1.0/16': allowed: a private range"),
    ({"dataUris": ["gs://x"]}, "dataUris[0] 'gs://x': allowed: s3://bucket/prefix, without wildcards"),
    ({"dataUris": "s3://x"}, "dataUris 's3://x': allowed: a list"),
    ({"secretArns": ["hf-token"]}, "secretArns[0] 'hf-token': allowed: the ARN of a secret"),
    ({"bukket": "b"}, "bukket: unknown; allowed: bucket, dataUris, dev, eks, encryption, image, job,"),
    ({"bucket": {"nmae": "b"}}, "bucket.nmae: unknown; allowed in bucket: adopt, logBucket, logPrefix, name, prefix"),
    (
        {"quotas": [{"instanceType": "ml.g5.xlarge", "warm": 1}]},
        "quotas[0].warm: unknown; allowed in quotas[0]: instanceType",
    ),
    ({"network": {"egress": "nat", "x": 1}}, "network.x: unknown; allowed in network: cidr, egress, huggingFace,"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_is_wrong_is_told_with_key_value_and_what_is_allowed(values: dict[str, Any], said: str) -> None:
    (line,) = refusal(**values)
    assert said in line


CLUSTER_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"eks": {}}, "eks.admins: missing"),
    ({"eks": {}}, "network: a cluster needs subnets"),
    ({"eks": {"admins": ["arn:aws:iam::123456789012:role/x"]}}, "eks.publicAccessCidrs: missing"),
    ({"eks": {"adopt": "c", "mode": "auto"}}, "eks.mode: an adopted cluster is left as it is"),
    ({"eks": {"adopt": "c", "oidcProviderArn": "arn:aws:iam::123456789012:oidc-provider/x"}}, "with eks.identity irsa"),
    ({"eks": {"identity": "irsa"}}, "eks.identity 'irsa': a cluster that is created has Pod Identity"),
    (
        {"eks": {"nodes": {"instanceTypes": ["g5.xlarge"]}}},
        "would have no nvidia.com/gpu; allowed: AL2023_x86_64_NVIDIA, BOTTLEROCKET_x86_64_NVIDIA",
    ),
    ({"eks": {"nodes": {"amiType": "AL2023_x86_64_NVIDIA"}}}, "eks.nodes.devicePlugin: allowed with"),
    ({"eks": {"nodes": {"amiType": "BOTTLEROCKET_x86_64_NVIDIA", "devicePlugin": "r/p:v1"}}}, "and needed there"),
    ({"eks": {"nodes": {"devicePlugin": "r/plugin:latest"}}}, "eks.nodes.devicePlugin 'r/plugin:latest': allowed: an"),
    (
        {"eks": {"nodes": {"devicePlugin": "r:5000/plugin"}}},
        "eks.nodes.devicePlugin 'r:5000/plugin': allowed: an image",
    ),
    ({"eks": {"nodes": {"min": 3}}}, "eks.nodes.desired 2: allowed: from eks.nodes.min to eks.nodes.max"),
    ({"eks": {"adopt": "c", "namespace": "No"}}, "eks.namespace 'No': allowed: a-z, 0-9 and hyphens"),
    ({"job": {"runId": "r", "replicas": 2, "steps": 4, "syncEvery": 2}}, "job: there is no cluster"),
    ({"eks": {"adopt": "c"}, "job": {"runId": "r"}}, "job.replicas: missing"),
]


@pytest.mark.parametrize(("values", "said"), CLUSTER_WRONG, ids=[said[:38] for _, said in CLUSTER_WRONG])
def test_what_is_wrong_with_a_cluster_or_its_job_is_told_too(values: dict[str, Any], said: str) -> None:
    assert any(said in line for line in refusal(**values))


def test_all_problems_are_told_at_once() -> None:
    values: dict[str, Any] = {}
    for wrong, _ in WRONG:
        for key, value in wrong.items():
            values.setdefault(key, value)
    lines = refusal(**values)
    for key in values.keys() - {
        "network"
    }:  # its first wrong value is one only beside others, which come once types are right
        assert any(line.startswith(key) for line in lines), key


def test_secrets_need_a_way_to_secrets_manager() -> None:
    secrets = ["arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbCdEf"]
    (line,) = refusal(network={"egress": "none"}, secretArns=secrets)
    assert line.startswith("network.egress 'none': jobs could not reach Secrets Manager")
    parse(network={"egress": "endpoints"}, secretArns=secrets)


@pytest.mark.parametrize("stack", ["dev", "local"])
def test_the_committed_stack_files_are_valid(stack: str) -> None:
    text = (ROOT / f"Pulumi.{stack}.yaml").read_text()
    document = yaml.safe_load(text)["config"]
    own = {key.removeprefix("diloco:"): value for key, value in document.items() if key.startswith("diloco:")}
    assert own
    parse(stack, **own)


def test_what_the_example_comments_out_is_valid_too() -> None:
    text = (ROOT / "Pulumi.dev.yaml").read_text().replace("sha256:…", DIGEST)
    shown = re.sub(r"^  # (?=(?:diloco|aws):|  )", "  ", text, flags=re.MULTILINE)
    document = re.split(r"(?m)^  (?=\S)", shown)
    sections = [yaml.safe_load(section) for section in document if section.startswith("diloco:")]
    assert {key for section in sections for key in section} >= {"diloco:quotas", "diloco:network", "diloco:role"}
    for section in sections:
        parse("dev", **{key.removeprefix("diloco:"): value for key, value in section.items()})


def test_every_key_and_output_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "infrastructure.md").read_text()
    for name in (*_keys(Settings), *NAMES):
        assert f"`{name}`" in text, name


def _keys(model: Any, above: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        key = above + to_camel(name)
        kinds = (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if hasattr(kind, "model_fields")]
        many = get_origin(field.annotation) is list
        found += _keys(inner[0], f"{key}[]." if many else f"{key}.") if inner else [key]
    return found
