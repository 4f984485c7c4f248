"""What each principal of a stack may do, and may not: real calls, against an IAM that enforces `diloco.access`.

MiniStack enforces what it serves; over TLS a call passes :class:`~tests.support.tls_proxy.FrontEnd`, over plain HTTP it
goes to MiniStack directly. What it does not serve (SageMaker, quotas), and what it authorises on another resource or
without a condition key (log streams, metrics), `test_iam_services.py` asks the authority.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from diloco import access
from diloco.embedded import environment
from diloco.errors import AccessDeniedError
from diloco.outer import make_diloco_outer_loop
from tests.support.iam_authority import Authority
from tests.support.replicas import all_well, run_replicas
from tests.support.sagemaker.ministack import ministack
from tests.support.sagemaker.role import Roles
from tests.support.tls_proxy import FrontEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from diloco.manager import ObjectStoreManager
    from tests.support.sagemaker import Emulator

PLACE = access.Place("us-east-1", "123456789012")
RUNS, OTHER, DATA = "diloco-sagemaker-runs", "somebody-elses", "training-data"
PREFIX = "diloco-dev"
GROUP = access.LOG_GROUP
STREAM, OTHER_STREAM = f"{PREFIX}-run-0/algo-1-1", "another-job/algo-1-1"
REPOSITORY, OTHER_REPOSITORY = "diloco-dev/trainer", "somebody/else"
ROLE, OTHER_ROLE = "diloco-dev-job", "administrator"
SECRET, OTHER_SECRET = "hugging-face", "database"
DENIED = {"AccessDenied", "AccessDeniedException", "403", "UnauthorizedOperation"}
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": 2,
            "digest": "sha256:" + "0" * 64,
        },
        "layers": [],
    }
)


@dataclass
class Client:
    """One principal over one transport."""

    emulator: Emulator
    credentials: Mapping[str, str] | None
    key: str
    """ARN of the stack's KMS key."""

    def __getattr__(self, service: str) -> Any:
        found = self.emulator.client(service, self.credentials)
        setattr(self, service, found)
        return found


@dataclass
class Stack:
    """A stack's resources, made as `pulumi up` makes them, and its principals."""

    plain: Emulator
    tls: Emulator
    key: str
    credentials: dict[str, Mapping[str, str] | None]
    _clients: dict[tuple[str, bool], Client] = field(default_factory=dict)

    def client(self, who: str, *, tls: bool = True) -> Client:
        if (who, tls) not in self._clients:
            self._clients[who, tls] = Client(self.tls if tls else self.plain, self.credentials[who], self.key)
        return self._clients[who, tls]


def arn(resource: str) -> str:
    return f"arn:aws:iam::{PLACE.account}:{resource}"


@contextmanager
def made(folder: Path) -> Iterator[Stack]:
    with (
        ministack(folder, auth=True) as plain,
        FrontEnd(plain.endpoint_url, folder, authority=Authority(plain.client("iam"))) as front,
    ):
        tls = replace(plain, endpoint_url=front.endpoint_url, ca_bundle=front.ca_bundle)
        key = tls.client("kms").create_key(Policy=json.dumps(access.key_policy(PLACE)))["KeyMetadata"]["Arn"]
        _resources(tls)
        yield Stack(plain, tls, key, {"root": None} | _principals(tls, key))


def _resources(root: Emulator) -> None:
    s3, logs, ecr = root.client("s3"), root.client("logs"), root.client("ecr")
    for bucket in (RUNS, OTHER, DATA):
        s3.create_bucket(Bucket=bucket)
        s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(access.bucket_policy(PLACE, bucket)))
        for name in ("rendezvous/run/a", "output/run/a", "rendezvous-of-others/a", "private/a", "texts/a", "texts-2/a"):
            s3.put_object(Bucket=bucket, Key=name, Body=b"data")
    logs.create_log_group(logGroupName=GROUP)
    logs.create_log_group(logGroupName="/another/group")
    for stream in (STREAM, OTHER_STREAM):
        logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
    for repository in (REPOSITORY, OTHER_REPOSITORY):
        ecr.create_repository(repositoryName=repository)
        ecr.put_image(repositoryName=repository, imageManifest=MANIFEST, imageTag="a")
    for secret in (SECRET, OTHER_SECRET):
        root.client("secretsmanager").create_secret(Name=secret, SecretString="x")


def _principals(root: Emulator, key: str) -> dict[str, Mapping[str, str]]:
    iam = root.client("iam")
    storage = access.Storage(RUNS, ("rendezvous", "output"), key)
    repository = PLACE.arn("ecr", f"repository/{REPOSITORY}")
    secret = root.client("secretsmanager").describe_secret(SecretId=SECRET)["ARN"]
    iam.create_role(RoleName=OTHER_ROLE, AssumeRolePolicyDocument=_trust_of_the_account())
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(access.sagemaker_trust(PLACE, PREFIX)))
    job = access.sagemaker_role_policy(
        PLACE,
        storage,
        job_name_prefix=PREFIX,
        repository_arn=repository,
        data_uris=[f"s3://{DATA}/texts"],
        secret_arns=[secret],
    )
    iam.put_role_policy(RoleName=ROLE, PolicyName="job", PolicyDocument=json.dumps(job))
    launcher = access.launcher_policy(
        PLACE, storage, job_name_prefix=PREFIX, role_arn=arn(f"role/{ROLE}"), repository_arn=repository
    )
    everything = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
    users: dict[str, access.Document | None] = {"launcher": launcher, "administrator": everything, "stranger": None}
    found: dict[str, Mapping[str, str]] = {
        "job": Roles(root.client, PLACE.account, PLACE.region).credentials(arn(f"role/{ROLE}"))
    }
    for name, document in users.items():
        iam.create_user(UserName=name)
        if document is not None:
            policy = iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(document))["Policy"]["Arn"]
            iam.attach_user_policy(UserName=name, PolicyArn=policy)
        found[name] = iam.create_access_key(UserName=name)["AccessKey"]
    return found


def _trust_of_the_account() -> str:
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"AWS": arn("root")}}
    return json.dumps({"Version": "2012-10-17", "Statement": statement})


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with made(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


Call = Callable[[Client], object]


def get(bucket: str, key: str) -> Call:
    return lambda c: c.s3.get_object(Bucket=bucket, Key=key)


def put(bucket: str, key: str) -> Call:
    return lambda c: c.s3.put_object(Bucket=bucket, Key=key, Body=b"new")


def delete(bucket: str, key: str) -> Call:
    return lambda c: c.s3.delete_object(Bucket=bucket, Key=key)


def listing(bucket: str, prefix: str | None) -> Call:
    return lambda c: c.s3.list_objects_v2(Bucket=bucket, **({} if prefix is None else {"Prefix": prefix}))


def upload(key: str) -> Call:
    def call(c: Client) -> None:
        upload = c.s3.create_multipart_upload(Bucket=RUNS, Key=key)["UploadId"]
        part = c.s3.upload_part(Bucket=RUNS, Key=key, UploadId=upload, PartNumber=1, Body=b"part")["ETag"]
        parts = {"Parts": [{"ETag": part, "PartNumber": 1}]}
        c.s3.complete_multipart_upload(Bucket=RUNS, Key=key, UploadId=upload, MultipartUpload=parts)
        upload = c.s3.create_multipart_upload(Bucket=RUNS, Key=key)["UploadId"]
        c.s3.abort_multipart_upload(Bucket=RUNS, Key=key, UploadId=upload)

    return call


def stream(name: str, group: str = GROUP) -> Call:
    return lambda c: c.logs.create_log_stream(logGroupName=group, logStreamName=name)


def events(name: str) -> Call:
    return lambda c: c.logs.get_log_events(logGroupName=GROUP, logStreamName=name)


def write(name: str) -> Call:
    event = {"timestamp": 1_790_000_000_000, "message": "hello"}
    return lambda c: c.logs.put_log_events(logGroupName=GROUP, logStreamName=name, logEvents=[event])


def metric(namespace: str) -> Call:
    return lambda c: c.cloudwatch.put_metric_data(Namespace=namespace, MetricData=[{"MetricName": "loss", "Value": 1}])


def image(repository: str) -> Call:
    return lambda c: c.ecr.batch_get_image(repositoryName=repository, imageIds=[{"imageTag": "a"}])


def images(repository: str) -> Call:
    return lambda c: c.ecr.describe_images(repositoryName=repository)


def push(repository: str) -> Call:
    return lambda c: c.ecr.put_image(repositoryName=repository, imageManifest=MANIFEST + " ", imageTag="b")


def secret(name: str) -> Call:
    return lambda c: c.secretsmanager.get_secret_value(SecretId=name)


def role(name: str) -> Call:
    return lambda c: c.iam.get_role(RoleName=name)


def simulation(name: str) -> Call:
    return lambda c: c.iam.simulate_principal_policy(PolicySourceArn=arn(f"role/{name}"), ActionNames=["s3:GetObject"])


def assume(name: str) -> Call:
    return lambda c: c.sts.assume_role(RoleArn=arn(f"role/{name}"), RoleSessionName="test")


def attach(name: str) -> Call:
    administrator = "arn:aws:iam::aws:policy/AdministratorAccess"
    return lambda c: c.iam.attach_role_policy(RoleName=name, PolicyArn=administrator)


STORAGE_ALLOWED: dict[str, Call] = {
    "look at a run's object": lambda c: c.s3.head_object(Bucket=RUNS, Key="rendezvous/run/a"),
    "read a run's object": get(RUNS, "rendezvous/run/a"),
    "read an output": get(RUNS, "output/run/a"),
    "write a run's object": put(RUNS, "rendezvous/run/new"),
    "upload in parts, and abort": upload("rendezvous/run/parts"),
    "delete a run's object": delete(RUNS, "rendezvous/run/new"),
    "list a run": listing(RUNS, "rendezvous/run/"),
    "list all runs": listing(RUNS, "rendezvous/"),
}
STORAGE_DENIED: dict[str, Call] = {
    "read another prefix": get(RUNS, "private/a"),
    "read a prefix that begins alike": get(RUNS, "rendezvous-of-others/a"),
    "write another prefix": put(RUNS, "private/new"),
    "write at the top": put(RUNS, "new"),
    "delete in another prefix": delete(RUNS, "private/a"),
    "upload in parts to another prefix": upload("private/parts"),
    "list another prefix": listing(RUNS, "private/"),
    "list the whole bucket": listing(RUNS, None),
    "list all beginning alike": listing(RUNS, "rendezvous"),
    "read another bucket": get(OTHER, "rendezvous/run/a"),
    "write another bucket": put(OTHER, "rendezvous/run/new"),
    "list another bucket": listing(OTHER, "rendezvous/"),
    "list all buckets": lambda c: c.s3.list_buckets(),
    "read an old version": lambda c: c.s3.get_object(Bucket=RUNS, Key="rendezvous/run/a", VersionId="null"),
    "change an object's ACL": lambda c: c.s3.put_object_acl(Bucket=RUNS, Key="rendezvous/run/a", ACL="private"),
    "delete the bucket": lambda c: c.s3.delete_bucket(Bucket=RUNS),
    "drop the bucket's policy": lambda c: c.s3.delete_bucket_policy(Bucket=RUNS),
    "open the bucket": lambda c: c.s3.delete_public_access_block(Bucket=RUNS),
    "drop the lifecycle": lambda c: c.s3.delete_bucket_lifecycle(Bucket=RUNS),
    "use the key directly": lambda c: c.kms.generate_data_key(KeyId=c.key, KeySpec="AES_256"),
    "delete the key": lambda c: c.kms.schedule_key_deletion(KeyId=c.key, PendingWindowInDays=7),
    "become an administrator": assume(OTHER_ROLE),
    "make the job's role an administrator": attach(ROLE),
    "push an image": push(REPOSITORY),
    "delete the repository": lambda c: c.ecr.delete_repository(repositoryName=REPOSITORY, force=True),
    "describe another repository": images(OTHER_REPOSITORY),
    "delete the log group": lambda c: c.logs.delete_log_group(logGroupName=GROUP),
    "read another job's log": events(OTHER_STREAM),
    "read another secret": secret(OTHER_SECRET),
}
ALLOWED: dict[str, dict[str, Call]] = {
    "job": {
        **STORAGE_ALLOWED,
        "read the data": get(DATA, "texts/a"),
        "list the data": listing(DATA, "texts/"),
        "get a registry token": lambda c: c.ecr.get_authorization_token(),
        "pull the image": image(REPOSITORY),
        "read its secret": secret(SECRET),
    },
    "launcher": {
        **STORAGE_ALLOWED,
        "describe the image": images(REPOSITORY),
        "find the logs": lambda c: c.logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=PREFIX),
        "read the job's role": role(ROLE),
        "simulate the job's role": simulation(ROLE),
    },
    "stranger": {},
}
DENIED_TO: dict[str, dict[str, Call]] = {
    "job": {
        **STORAGE_DENIED,
        "write the data": put(DATA, "texts/new"),
        "read data that begins alike": get(DATA, "texts-2/a"),
        "list all data": listing(DATA, None),
        "pull another image": image(OTHER_REPOSITORY),
        "make another job's log stream": stream("another-job/algo-1-2"),
        "make a log stream in another group": stream(f"{PREFIX}-run-1/algo-1-1", "/another/group"),
        "write another job's log": write(OTHER_STREAM),
        "write another namespace's metrics": metric("AWS/Billing"),
        "read its own role": role(ROLE),
    },
    "launcher": {
        **STORAGE_DENIED,
        "read the data": get(DATA, "texts/a"),
        "pull the image": image(REPOSITORY),
        "write a job's log": write(STREAM),
        "read another role": role(OTHER_ROLE),
        "simulate another role": simulation(OTHER_ROLE),
        "become the job's role": assume(ROLE),
        "read the secret": secret(SECRET),
        "make a user": lambda c: c.iam.create_user(UserName="mallory"),
    },
    "stranger": {
        **STORAGE_ALLOWED,
        **STORAGE_DENIED,
        "pull the image": image(REPOSITORY),
        "get a registry token": lambda c: c.ecr.get_authorization_token(),
        "read the job's role": role(ROLE),
        "become the job's role": assume(ROLE),
        "read a job's log": events(STREAM),
        "read the secret": secret(SECRET),
    },
}


def cases(table: dict[str, dict[str, Call]]) -> list[Any]:
    return [
        pytest.param(who, call, id=f"{who}: {name}") for who, calls in table.items() for name, call in calls.items()
    ]


def code(problem: ClientError) -> str:
    return str(problem.response["Error"]["Code"])


@pytest.mark.parametrize(("who", "call"), cases(ALLOWED))
def test_allowed(stack: Stack, who: str, call: Callable[[Client], object]) -> None:
    call(stack.client(who))


@pytest.mark.parametrize(("who", "call"), cases(DENIED_TO))
def test_denied(stack: Stack, who: str, call: Callable[[Client], object]) -> None:
    with pytest.raises(ClientError) as caught:
        call(stack.client(who))
    assert code(caught.value) in DENIED


@pytest.mark.parametrize("who", ["job", "launcher", "administrator"])
@pytest.mark.parametrize(("name", "call"), STORAGE_ALLOWED.items(), ids=STORAGE_ALLOWED)
def test_plain_http_is_denied_to_everybody(stack: Stack, who: str, name: str, call: Callable[[Client], object]) -> None:
    """Whatever else a principal may do: the bucket's own policy says no."""
    with pytest.raises(ClientError) as caught:
        call(stack.client(who, tls=False))
    assert code(caught.value) in DENIED


@pytest.mark.parametrize(("name", "call"), STORAGE_ALLOWED.items(), ids=STORAGE_ALLOWED)
def test_tls_is_enough_for_whom_iam_allows(stack: Stack, name: str, call: Callable[[Client], object]) -> None:
    call(stack.client("administrator"))


def test_what_is_denied_is_denied_by_policy_alone(tmp_path: Path) -> None:
    """By the root of a stack of its own each of those calls is let through: none is denied for how it is made."""
    calls = {name: call for table in DENIED_TO.values() for name, call in table.items()}
    codes = {}
    with made(tmp_path) as stack:
        root = stack.client("root")
        for name in sorted(calls, key=lambda name: name.startswith("delete the ")):
            try:
                calls[name](root)
            except ClientError as problem:
                codes[name] = code(problem)
    assert codes == {
        "become the job's role": "AccessDenied",  # trusted by the service alone
        "change an object's ACL": "AccessControlListNotSupported",
        "delete the bucket": "BucketNotEmpty",
    }


def test_the_job_role_trusts_this_stacks_jobs_only(stack: Stack) -> None:
    roles = Roles(stack.tls.client, PLACE.account, PLACE.region)
    roles.check_trust(arn(f"role/{ROLE}"), PLACE.arn("sagemaker", f"training-job/{PREFIX}-run-0"))
    for job in (
        PLACE.arn("sagemaker", "training-job/another"),
        PLACE.arn("sagemaker", f"processing-job/{PREFIX}-run-0"),
        PLACE.arn("sagemaker", f"training-job/{PREFIX}-run-0").replace(PLACE.account, "999999999999"),
    ):
        with pytest.raises(Exception, match="Could not assume role"):
            roles.check_trust(arn(f"role/{ROLE}"), job)


def train(uri: str, stack: Stack, who: str, *, tls: bool = True) -> list[BaseException | None]:
    """A whole run of two replicas, as they run anywhere: only credentials and endpoint are given."""
    emulator, credentials = (stack.tls if tls else stack.plain), stack.credentials[who] or {}
    changes = {
        "AWS_ENDPOINT_URL": emulator.endpoint_url,
        "AWS_CA_BUNDLE": emulator.ca_bundle,
        "AWS_ACCESS_KEY_ID": credentials["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": credentials["SecretAccessKey"],
        "AWS_SESSION_TOKEN": credentials.get("SessionToken"),
        "AWS_REGION": PLACE.region,
    }

    def replica(manager: ObjectStoreManager, rank: int) -> None:
        import torch

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def save(folder: Path) -> None:
            torch.save(model.state_dict(), folder / "weights")

        with make_diloco_outer_loop(manager, [model], optimizer, steps=8, sync_every=2, save=save) as outer:
            for _ in outer.steps():
                optimizer.zero_grad()
                (model(torch.ones(1, 2)).sum() - rank).square().backward()
                optimizer.step()
        outer.finish()
        manager.check_finished()

    with environment(changes):
        return run_replicas(uri, 2, replica)


def test_a_whole_run_needs_no_more_than_the_jobs_role(stack: Stack) -> None:
    uri = f"s3://{RUNS}/rendezvous/whole"
    all_well(train(uri, stack, "job"))
    held = stack.client("administrator").s3.list_objects_v2(Bucket=RUNS, Prefix="rendezvous/whole/final/")
    assert {"rendezvous/whole/final/result.json"} <= {entry["Key"] for entry in held["Contents"]}


@pytest.mark.parametrize(
    ("who", "prefix", "tls"),
    [
        pytest.param("job", "private", True, id="a job in another prefix"),
        pytest.param("stranger", "rendezvous", True, id="a stranger"),
        pytest.param("job", "rendezvous", False, id="a job over plain HTTP"),
    ],
)
def test_a_run_that_may_not_ends_at_once_and_says_so(stack: Stack, who: str, prefix: str, tls: bool) -> None:
    for outcome in train(f"s3://{RUNS}/{prefix}/denied", stack, who, tls=tls):
        assert isinstance(outcome, AccessDeniedError)
        assert f"s3://{RUNS}/{prefix}/denied/" in str(outcome)
        assert "s3:" in str(outcome).replace("s3://", "")
