"""The components and the whole environment without an engine: which resources, with which inputs, in which order.

Every test looks into an Output that the program returned and that has been waited for (:func:`made`): one that only
hoped for an Output would assert nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulumi
import pytest
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks, set_all_config, set_mocks

from diloco.access import Place, bucket_policy, launcher_policy, sagemaker_role_policy, sagemaker_trust
from diloco.access import Storage as KnownStorage
from diloco.access import Vpc as KnownVpc
from diloco.stack import NAMES, parse
from infra.environment import environment, read_settings
from infra.identity import SageMakerRole, SageMakerRoleArgs, StorageInputs
from infra.image import SOURCES, TrainerImage, TrainerImageArgs, content_hash
from infra.network import Network, NetworkArgs
from infra.rendezvous import RendezvousBucket, RendezvousBucketArgs

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulumi_aws")  # its own old names, at import

ROOT = Path(__file__).parents[2]
PLACE = Place("us-west-2", "123456789012")
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/trainer@{DIGEST}"
BUCKET = "diloco-dev-sagemaker-1a2b3c4"


class Recorder(Mocks):
    """An engine that makes everything at once and remembers it. `answers` replace a function's."""

    def __init__(self, **answers: Any) -> None:
        self.made: list[MockResourceArgs] = []
        self.calls: list[MockCallArgs] = []
        self._answers = answers

    def new_resource(self, args: MockResourceArgs) -> tuple[str, dict[str, Any]]:
        self.made.append(args)
        suffixed = f"{args.name}-1a2b3c4"
        name = args.inputs.get("name") or args.inputs.get("bucket") or suffixed
        arns = {
            "aws:s3/bucket:Bucket": f"arn:aws:s3:::{name}",
            "aws:iam/role:Role": f"arn:aws:iam::123456789012:role/{suffixed}",
            "aws:iam/policy:Policy": f"arn:aws:iam::123456789012:policy/{suffixed}",
            "aws:kms/key:Key": "arn:aws:kms:us-west-2:123456789012:key/1234abcd",
            "aws:iam/openIdConnectProvider:OpenIdConnectProvider": (
                f"arn:aws:iam::123456789012:oidc-provider/{str(args.inputs.get('url')).removeprefix('https://')}"
            ),
            "aws:ecr/repository:Repository": f"arn:aws:ecr:us-west-2:123456789012:repository/{suffixed}",
        }
        outputs: dict[str, Any] = {"name": suffixed} if args.typ.startswith(("aws:iam", "aws:ecr")) else {}
        if args.typ in arns:
            outputs["arn"] = arns[args.typ]
        if args.typ == "aws:s3/bucket:Bucket":
            outputs["bucket"] = name
        elif args.typ == "aws:ecr/repository:Repository":
            outputs["repositoryUrl"] = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/{suffixed}"
            outputs["registryId"] = "123456789012"
        elif args.typ == "docker-build:index:Image":
            outputs["digest"] = DIGEST
        elif args.typ == "aws:ec2/vpcEndpoint:VpcEndpoint":
            outputs["prefixListId"] = "pl-1234"
        elif args.typ == "aws:kms/key:Key":
            outputs["keyId"] = "1234abcd"
        elif args.typ == "pulumi-python:dynamic/diloco:Quota":
            outputs |= {"value": 0, "status": "requested", "request_id": "r-1", "message": ""}
        elif args.typ == "aws:eks/cluster:Cluster":
            outputs |= {
                "name": suffixed,
                "endpoint": "https://eks.test",
                "certificateAuthority": {"data": "YXV0aG9yaXR5"},
                "identities": [{"oidcs": [{"issuer": "https://oidc.eks.test/id/NEW"}]}],
            }
        elif args.typ == "aws:eks/nodeGroup:NodeGroup":
            outputs["nodeGroupName"] = suffixed
        return suffixed, {**args.inputs, **outputs}

    def call(self, args: MockCallArgs) -> dict[str, Any]:  # type: ignore[override]
        self.calls.append(args)
        function = args.token.rpartition(":")[2]
        if function in self._answers:
            answer = self._answers[function]
            if isinstance(answer, Exception):
                raise answer
            return dict(answer(args.args) if callable(answer) else answer)
        answers: dict[str, dict[str, Any]] = {
            "getCallerIdentity": {"accountId": "123456789012"},
            "getRegion": {"region": "us-west-2"},
            "getPartition": {"partition": "aws"},
            "getAvailabilityZones": {"names": ["us-west-2a", "us-west-2b", "us-west-2c"]},
            "getAuthorizationToken": {"userName": "AWS", "password": "token"},
            "getImage": {"repositoryName": "trainer"},
            "getBucket": {"bucket": args.args.get("bucket"), "bucketRegion": "us-west-2"},
            "getRole": {
                "name": args.args.get("name"),
                "arn": f"arn:aws:iam::123456789012:role/{args.args.get('name')}",
                "assumeRolePolicy": json.dumps(sagemaker_trust(PLACE, "diloco-dev")),
            },
            "getPrincipalPolicySimulation": {
                "results": [{"actionName": a, "allowed": True} for a in args.args.get("actionNames", [])]
            },
            "getCluster": {
                "name": args.args.get("name"),
                "endpoint": "https://theirs.test",
                "certificateAuthorities": [{"data": "dGhlaXJz"}],
                "identities": [{"oidcs": [{"issuer": "https://oidc.eks.test/id/THEIRS"}]}],
            },
            "getKey": {"arn": args.args.get("keyId"), "enabled": True},
        }
        return answers[function]

    def of(self, kind: str) -> list[MockResourceArgs]:
        """Resources of a type, named without its package."""
        return [args for args in self.made if args.typ.rpartition(":")[2] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        """The inputs of the only resource of a type."""
        (args,) = self.of(kind)
        return dict(args.inputs)


def mocked(**answers: Any) -> Recorder:
    recorder = Recorder(**answers)
    set_mocks(recorder, project="diloco", stack="dev", preview=False)
    return recorder


def made(build: Callable[[], Any], **answers: Any) -> tuple[Recorder, Any]:
    """Build with nothing but mocks; returns what was made, and what `build` returned, all of it known.

    Only an Output that is returned is waited for; one that never comes fails the test.
    """
    recorder = mocked(**answers)
    known: list[Any] = []

    def program() -> pulumi.Output[None]:
        return pulumi.Output.from_input(build()).apply(known.append)

    pulumi.runtime.test(program)()  # type: ignore[no-untyped-call]
    (value,) = known
    return recorder, value


# The whole environment.


def run(monkeypatch: pytest.MonkeyPatch, **config: Any) -> dict[str, Any]:
    """Run the program with this configuration; returns what it exports."""
    exported: dict[str, Any] = {}
    monkeypatch.setattr(pulumi, "export", exported.__setitem__)
    set_all_config({f"diloco:{key}": v if isinstance(v, str) else json.dumps(v) for key, v in config.items()})
    environment()
    return exported


def test_every_output_is_one_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = made(
        lambda: run(
            monkeypatch,
            encryption={"key": "create"},
            network={"egress": "none"},
            quotas=[{"instanceType": "ml.g5.xlarge", "warmPool": 2}],
        )
    )
    kubernetes = {"clusterName", "namespace", "serviceAccount", "podRoleArn"}
    assert values.keys() == NAMES - kubernetes
    outputs = parse(json.loads(json.dumps(values)), "mocks")
    assert outputs.bucket == BUCKET
    assert outputs.image_uri == f"123456789012.dkr.ecr.us-west-2.amazonaws.com/diloco-dev-trainer-1a2b3c4@{DIGEST}"
    assert outputs.quotas[0].name == "ml.g5.xlarge for training warm pool usage"
    assert outputs.quotas[0].status == "requested"
    assert len(outputs.subnet_ids) == 2


def test_what_is_not_there_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = made(lambda: run(monkeypatch))
    assert not values.keys() & {"kmsKeyArn", "quotas", "subnetIds", "securityGroupIds"}
    assert parse(values, "mocks").kms_key_arn is None


def test_the_documents_are_those_of_access(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, values = made(
        lambda: run(
            monkeypatch,
            encryption={"key": "create"},
            network={"egress": "none"},
            dataUris=["s3://data/x"],
            launcher={"instanceTypes": ["ml.g5.*"], "maxKeepAliveSeconds": 60},
        )
    )
    storage = KnownStorage(BUCKET, ("rendezvous", "output"), values["kmsKeyArn"])
    repository = "arn:aws:ecr:us-west-2:123456789012:repository/diloco-dev-trainer-1a2b3c4"
    assert json.loads(recorder.one("Role")["assumeRolePolicy"]) == sagemaker_trust(PLACE, "diloco-dev")
    assert json.loads(recorder.one("RolePolicy")["policy"]) == sagemaker_role_policy(
        PLACE,
        storage,
        job_name_prefix="diloco-dev",
        repository_arn=repository,
        data_uris=["s3://data/x"],
        vpc=KnownVpc(tuple(values["subnetIds"]), tuple(values["securityGroupIds"])),
    )
    assert json.loads(recorder.one("Policy")["policy"]) == launcher_policy(
        PLACE,
        storage,
        job_name_prefix="diloco-dev",
        role_arn=values["sagemakerRoleArn"],
        repository_arn=repository,
        instance_types=["ml.g5.*"],
        max_keep_alive_seconds=60,
    )
    assert json.loads(recorder.one("BucketPolicy")["policy"]) == bucket_policy(PLACE, BUCKET)


def test_everything_that_takes_tags_has_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = made(
        lambda: run(monkeypatch, tags={"team": "a"}, encryption={"key": "create"}, network={"egress": "nat"})
    )
    untagged = {
        "Alias",
        "BucketLifecycleConfiguration",
        "BucketOwnershipControls",
        "BucketPolicy",
        "BucketPublicAccessBlock",
        "BucketServerSideEncryptionConfiguration",
        "BucketVersioning",
        "Image",
        "LifecyclePolicy",
        "RolePolicy",
        "Route",
        "RouteTableAssociation",
    }
    for args in recorder.made:
        kind = args.typ.rpartition(":")[2]
        if args.typ.startswith("aws:") and kind not in untagged:
            expected = {"team": "a", "diloco:stack": "dev"}
            assert expected.items() <= args.inputs.get("tags", {}).items(), args.name


def test_an_environment_of_adopted_parts_makes_only_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, values = made(
        lambda: run(
            monkeypatch,
            bucket={"adopt": "their-bucket"},
            role={"adopt": "their-role"},
            image={"uri": IMAGE},
            network={"subnetIds": ["subnet-1"], "securityGroupIds": ["sg-1"]},
        )
    )
    assert {args.typ for args in recorder.made if args.typ.startswith("aws:")} == {"aws:iam/policy:Policy"}
    assert values["sagemakerRoleArn"] == "arn:aws:iam::123456789012:role/their-role"
    assert values["rendezvousUri"] == "s3://their-bucket/rendezvous"
    assert values["imageUri"] == IMAGE


def test_the_launchers_policy_is_attached_to_whom_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    arns = [f"arn:aws:iam::123456789012:{kind}" for kind in ("user/path/ann", "group/ml", "role/ci")]
    recorder, values = made(lambda: run(monkeypatch, launcher={"attachTo": arns}))
    attached = {args.typ.rpartition(":")[2]: args.inputs for args in recorder.made if "Attachment" in args.typ}
    policy = values["launcherPolicyArn"]
    assert attached == {
        "UserPolicyAttachment": {"user": "ann", "policyArn": policy},
        "GroupPolicyAttachment": {"group": "ml", "policyArn": policy},
        "RolePolicyAttachment": {"role": "ci", "policyArn": policy},
    }


def test_wrong_configuration_ends_without_a_traceback() -> None:
    mocked()
    set_all_config({"diloco:bukket": "x", "diloco:dev": "perhaps", "aws:region": "us-west-2"})
    with pytest.raises(pulumi.RunError, match=r"2 problems in the configuration of stack dev:\n"):
        read_settings()


# RendezvousBucket.


def bucket_args(**changes: Any) -> RendezvousBucketArgs:
    return RendezvousBucketArgs(place=PLACE, **changes)


def test_a_bucket_is_private_encrypted_and_named_for_sagemaker() -> None:
    recorder, uri = made(lambda: RendezvousBucket("diloco-dev", bucket_args(prefix="team")).rendezvous_uri)
    assert "sagemaker" in recorder.of("Bucket")[0].name
    assert recorder.one("Bucket")["forceDestroy"] is False
    block = recorder.one("BucketPublicAccessBlock")
    flags = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    assert all(block[flag] is True for flag in flags)
    assert recorder.one("BucketOwnershipControls")["rule"] == {"objectOwnership": "BucketOwnerEnforced"}
    (rule,) = recorder.one("BucketServerSideEncryptionConfiguration")["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}
    assert uri == f"s3://{BUCKET}/team/rendezvous"


def test_no_current_object_ever_expires() -> None:
    recorder, _ = made(lambda: RendezvousBucket("diloco-dev", bucket_args()).bucket)
    rules = recorder.one("BucketLifecycleConfiguration")["rules"]
    assert all("transitions" not in rule for rule in rules)
    does = {name: rule[name] for rule in rules for name in rule.keys() - {"id", "status", "filter"}}
    assert does == {
        "abortIncompleteMultipartUpload": {"daysAfterInitiation": 1},
        "noncurrentVersionExpiration": {"noncurrentDays": 1},
        "expiration": {"expiredObjectDeleteMarker": True},  # of what is no object any more
    }
    assert all(rule["status"] == "Enabled" for rule in rules)


def test_versioning_and_access_logs_are_by_config() -> None:
    full = bucket_args(versioning=True, log_bucket="logs", name="mine")
    recorder, _ = made(lambda: [RendezvousBucket("plain", bucket_args()).bucket, RendezvousBucket("full", full).bucket])
    status = {args.name: args.inputs["versioningConfiguration"]["status"] for args in recorder.of("BucketVersioning")}
    assert status == {"full": "Enabled"}
    assert recorder.one("BucketLogging")["targetBucket"] == "logs"
    assert {args.inputs.get("bucket") for args in recorder.of("Bucket")} == {None, "mine"}


def test_a_bucket_that_cannot_be_adopted_is_named_with_the_fix() -> None:
    mocked(getBucket=Exception("NoSuchBucket"))
    with pytest.raises(
        pulumi.RunError, match=r"^diloco:bucket.adopt 'theirs': NoSuchBucket; name a bucket that exists"
    ):
        RendezvousBucket("x", bucket_args(adopt="theirs"))


def test_a_bucket_of_another_region_is_refused() -> None:
    mocked(getBucket={"bucketRegion": "eu-west-1"})
    with pytest.raises(pulumi.RunError, match="it is in eu-west-1 and the stack in us-west-2"):
        RendezvousBucket("x", bucket_args(adopt="theirs"))


# SageMakerRole.


def role_args(**changes: Any) -> SageMakerRoleArgs:
    arguments: dict[str, Any] = {
        "place": PLACE,
        "storage": StorageInputs("b-sagemaker", ("rendezvous", "output"), changes.pop("kms_key_arn", None)),
        "job_name_prefix": "diloco-dev",
        "repository_arn": None,
    }
    return SageMakerRoleArgs(**(arguments | changes))


def test_an_adopted_role_is_simulated_one_resource_a_call() -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/k"
    hugging_face = "arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbCdEf"
    more = {"data_uris": ["s3://data/x"], "secret_arns": [hugging_face]}
    recorder, arn = made(lambda: SageMakerRole("x", role_args(adopt="theirs", kms_key_arn=key, **more)).arn)
    assert arn.endswith(":role/theirs")
    calls = [call.args for call in recorder.calls if call.token.endswith(":getPrincipalPolicySimulation")]
    assert all(len(call["resourceArns"]) == 1 for call in calls)
    asked = {(call["resourceArns"][0], action) for call in calls for action in call["actionNames"]}
    objects = {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}
    for prefix in ("rendezvous", "output"):
        found = {action for resource, action in asked if resource == f"arn:aws:s3:::b-sagemaker/{prefix}/probe"}
        assert found == objects
    prefixes = {
        entry["values"][0] for call in calls for entry in call.get("contexts", []) if entry["key"] == "s3:prefix"
    }
    assert prefixes == {"rendezvous/", "output/"}
    assert (key, "kms:GenerateDataKey") in asked
    assert ("arn:aws:s3:::data/x/probe", "s3:GetObject") in asked
    assert (hugging_face, "secretsmanager:GetSecretValue") in asked
    assert [args.typ for args in recorder.made if args.typ.startswith("aws:")] == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Exception("NoSuchEntity: nobody"),
            "diloco:role.adopt 'theirs': NoSuchEntity: nobody; name a role that exists",
        ),
        (
            {"assumeRolePolicy": json.dumps({"Statement": [{"Principal": {"Service": "ec2.amazonaws.com"}}]})},
            "its trust policy does not name sagemaker.amazonaws.com",
        ),
    ],
    ids=["missing", "trust"],
)
def test_a_role_that_cannot_be_adopted_is_named_with_the_fix(answer: Any, said: str) -> None:
    mocked(getRole=answer)
    with pytest.raises(pulumi.RunError) as refused:
        SageMakerRole("x", role_args(adopt="theirs"))
    assert said in str(refused.value)


def test_a_role_that_does_not_reach_the_bucket_is_refused() -> None:
    def denied(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "results": [
                {
                    "actionName": action,
                    "allowed": action != "s3:PutObject",
                    "resourceArn": arguments["resourceArns"][0],
                }
                for action in arguments["actionNames"]
            ]
        }

    with pytest.raises(pulumi.RunError) as refused:
        made(lambda: SageMakerRole("x", role_args(adopt="theirs")).arn, getPrincipalPolicySimulation=denied)
    message = str(refused.value)
    assert "it may not s3:PutObject on arn:aws:s3:::b-sagemaker/rendezvous/probe" in message
    assert "s3:GetObject" not in message


# TrainerImage.


def test_the_image_is_pushed_under_its_contents_hash_and_named_by_digest() -> None:
    arguments = TrainerImageArgs(place=PLACE, base_image="base:1", force_delete=True)
    recorder, uri = made(lambda: TrainerImage("diloco-dev", arguments).uri)
    assert uri.endswith(f"/diloco-dev-trainer-1a2b3c4@{DIGEST}")
    image = recorder.one("Image")
    tag = content_hash(ROOT, {"BASE_IMAGE": "base:1"})
    assert image["tags"] == [f"{uri.partition('@')[0]}:{tag}"]
    assert image["buildArgs"] == {"BASE_IMAGE": "base:1"}
    assert image["platforms"] == ["linux/amd64"]
    assert image["exports"] == [{"registry": {"ociMediaTypes": False, "push": True}}], "SageMaker takes no OCI manifest"
    assert not image["push"], "it would add an export with BuildKit's default"
    repository = recorder.one("Repository")
    assert repository["imageTagMutability"] == "IMMUTABLE"
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}
    assert repository["forceDelete"] is True


def test_an_adopted_image_builds_nothing_and_keeps_its_repository() -> None:
    def adopt() -> list[Any]:
        image = TrainerImage("x", TrainerImageArgs(place=PLACE, uri=IMAGE))
        return [image.uri, image.repository_arn]

    recorder, known = made(adopt)
    assert known == [IMAGE, "arn:aws:ecr:us-west-2:123456789012:repository/trainer"]
    assert [args.typ for args in recorder.made if args.typ.startswith(("aws:", "docker"))] == []
    (call,) = recorder.calls
    assert call.args == {"repositoryName": "trainer", "imageDigest": DIGEST, "registryId": "123456789012"}


@pytest.mark.parametrize(
    ("uri", "answers", "said"),
    [
        (IMAGE, {"getImage": Exception("ImageNotFound")}, "ImageNotFound; name an image that exists"),
        (IMAGE.replace("us-west-2", "eu-west-1"), {}, "it is in eu-west-1, and SageMaker pulls only from"),
    ],
    ids=["missing", "region"],
)
def test_an_image_that_cannot_be_adopted(uri: str, answers: dict[str, Any], said: str) -> None:
    mocked(**answers)
    with pytest.raises(pulumi.RunError) as refused:
        TrainerImage("x", TrainerImageArgs(place=PLACE, uri=uri))
    assert str(refused.value).startswith("diloco:image.uri ")
    assert said in str(refused.value)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in SOURCES:
        path = tmp_path / name
        if (ROOT / name).is_dir():
            path.mkdir()
            (path / "module.py").write_text("x = 1\n")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
    return tmp_path


def test_the_hash_follows_every_source_and_argument(sources: Path) -> None:
    seen = {content_hash(sources, {}), content_hash(sources, {"BASE_IMAGE": "x"})}
    for number, name in enumerate(SOURCES, 3):
        path = sources / name
        (path / "module.py" if path.is_dir() else path).write_text("changed")
        seen.add(content_hash(sources, {}))
        assert len(seen) == number, name
    (sources / "diloco" / "module.py").rename(sources / "diloco" / "renamed.py")
    seen.add(content_hash(sources, {}))
    assert len(seen) == len(SOURCES) + 3


def test_the_hash_ignores_what_is_not_in_the_image(sources: Path) -> None:
    before = content_hash(sources, {})
    cache = sources / "diloco" / "__pycache__"
    cache.mkdir()
    (cache / "module.pyc").write_bytes(b"x")
    (sources / "tests").mkdir()
    copy = sources.with_name("elsewhere")
    shutil.copytree(sources, copy)
    assert content_hash(sources, {}) == before == content_hash(copy, {})


def test_the_hash_covers_what_the_build_sees() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == set(SOURCES)


# Network.


@pytest.mark.parametrize("egress", ["none", "endpoints", "nat"])
def test_a_network_lets_nothing_in_and_reaches_s3_directly(egress: Any) -> None:
    def build() -> list[Any]:
        network = Network("net", NetworkArgs(place=PLACE, egress=egress, cidr="10.42.0.0/16"))
        return [network.subnet_ids, network.security_group_ids]

    recorder, known = made(build)
    subnets, groups = known
    assert subnets == ["net-private-0-1a2b3c4", "net-private-1-1a2b3c4"]
    assert groups == ["net-jobs-1a2b3c4"]
    inputs_of = {args.name: args.inputs for args in recorder.of("Subnet")}
    zones = {inputs_of[f"net-private-{number}"]["availabilityZone"] for number in (0, 1)}
    assert zones == {"us-west-2a", "us-west-2b"}
    assert len({inputs["cidrBlock"] for inputs in inputs_of.values()}) == len(inputs_of)
    endpoints = {args.inputs["serviceName"]: args.inputs for args in recorder.of("VpcEndpoint")}
    gateway = endpoints.pop("com.amazonaws.us-west-2.s3")
    assert (gateway["vpcEndpointType"], gateway["routeTableIds"]) == ("Gateway", ["net-private-1a2b3c4"])
    assert bool(endpoints) == (egress == "endpoints")
    ingress = [args.inputs["securityGroupId"] for args in recorder.of("SecurityGroupIngressRule")]
    assert "net-jobs-1a2b3c4" not in ingress
    assert len(recorder.of("NatGateway")) == (egress == "nat")
    rules = [args.inputs for args in recorder.of("SecurityGroupEgressRule")]
    assert all((rule["fromPort"], rule["toPort"], rule["ipProtocol"]) == (443, 443, "tcp") for rule in rules)
    anywhere = [rule for rule in rules if rule.get("cidrIpv4") == "0.0.0.0/0"]
    assert len(anywhere) == (egress == "nat")


def test_the_internet_is_reached_from_private_subnets_through_the_gateway_only() -> None:
    recorder, _ = made(lambda: Network("net", NetworkArgs(place=PLACE, egress="nat")).subnet_ids)
    routes = {args.name: args.inputs for args in recorder.of("Route")}
    assert routes["net-private"]["natGatewayId"] == "net-1a2b3c4"
    assert "gatewayId" not in routes["net-private"]
    assert routes["net-public"]["gatewayId"] == "net-1a2b3c4"
    assert all(args.inputs["mapPublicIpOnLaunch"] is False for args in recorder.of("Subnet"))
