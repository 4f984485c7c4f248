"""Least-privilege policy documents: who may do what, to which resource, under which condition.

Pure functions of names; `infra/` attaches what they return, `scripts/launch.py access` prints it for those who make
roles by other means. Every statement has a Sid that says what it is for. A resource is `*` only where the service
authorises the action on nothing narrower; :data:`UNSCOPED` lists those actions, each with the reason.

Actions, resources and condition keys: https://docs.aws.amazon.com/service-authorization/latest/reference/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Document = dict[str, Any]
Statement = dict[str, Any]

VERSION = "2012-10-17"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""Where SageMaker writes the logs of every training job of a region; its streams begin with the job's name."""
METRICS_NAMESPACE = "/aws/sagemaker/TrainingJobs"

OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
"""All that the exchange does to objects."""
LONGEST_KEEP_ALIVE = 3600
"""Seconds that SageMaker keeps a warm pool at most (KeepAlivePeriodInSeconds, 2026-11)."""

UNSCOPED = {
    "ecr:GetAuthorizationToken": "a token is for the account's whole registry; what it pulls is scoped",
    "cloudwatch:PutMetricData": "metrics have no ARN; the namespace is conditioned",
    "sagemaker:ListTrainingJobs": "lists are authorised for the account; needed for quota headroom",
    "servicequotas:GetServiceQuota": "reading quotas is authorised for the account",
    "servicequotas:ListServiceQuotas": "reading quotas is authorised for the account",
    "servicequotas:ListAWSDefaultServiceQuotas": "reading quotas is authorised for the account",
    "ec2:DescribeDhcpOptions": "EC2's descriptions are authorised for the account",
    "ec2:DescribeNetworkInterfaces": "EC2's descriptions are authorised for the account",
    "ec2:DescribeSecurityGroups": "EC2's descriptions are authorised for the account",
    "ec2:DescribeSubnets": "EC2's descriptions are authorised for the account",
    "ec2:DescribeVpcs": "EC2's descriptions are authorised for the account",
    "kms:*": "in a key's own policy, * is that key; the account's IAM policies decide from there",
}
"""Actions whose resource is `*`, and why."""


@dataclass(frozen=True)
class Place:
    """Where resources live."""

    region: str
    account: str
    partition: str = "aws"

    def arn(self, service: str, resource: str) -> str:
        """The ARN of a resource of this region and account."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    @property
    def domain(self) -> str:
        """Where the services' hosts are."""
        return "amazonaws.com.cn" if self.partition == "aws-cn" else "amazonaws.com"

    def bucket(self, name: str, keys: str = "") -> str:
        """The ARN of a bucket, or of keys in it."""
        return f"arn:{self.partition}:s3:::{name}" + (f"/{keys}" if keys else "")


@dataclass(frozen=True)
class Storage:
    """What runs use of a bucket."""

    bucket: str
    prefixes: tuple[str, ...]
    """Keys begin with one of these and a slash: runs, and their output."""
    kms_key_arn: str | None = None


@dataclass(frozen=True)
class Vpc:
    """Where jobs get their network interfaces."""

    subnet_ids: tuple[str, ...]
    security_group_ids: tuple[str, ...]


def _document(statements: Iterable[Statement]) -> Document:
    return {"Version": VERSION, "Statement": list(statements)}


def _allow(sid: str, actions: Sequence[str], resources: Sequence[str], **condition: dict[str, Any]) -> Statement:
    statement: Statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return statement | ({"Condition": condition} if condition else {})


def training_jobs(place: Place, job_name_prefix: str) -> str:
    """The ARN pattern of a stack's training jobs."""
    return place.arn("sagemaker", f"training-job/{job_name_prefix}-*")


# The jobs' role.


def sagemaker_trust(place: Place, job_name_prefix: str) -> Document:
    """Who may become the jobs' role: SageMaker, on behalf of this account's training jobs of that name only.

    Without the conditions another account's job could make the service use the role (the confused deputy:
    https://docs.aws.amazon.com/sagemaker/latest/dg/security-confused-deputy-prevention.html).
    """
    return _document(
        [
            {
                "Sid": "TrainingJobsOfThisStack",
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
                "Condition": {
                    "StringEquals": {"aws:SourceAccount": place.account},
                    "ArnLike": {"aws:SourceArn": training_jobs(place, job_name_prefix)},
                },
            }
        ]
    )


def storage_statements(place: Place, storage: Storage) -> list[Statement]:
    """Reading and writing runs: what a replica needs wherever it runs, and what a launcher does in the bucket."""
    objects = [place.bucket(storage.bucket, f"{prefix}/*") for prefix in storage.prefixes]
    listed = [f"{prefix}/*" for prefix in storage.prefixes]
    statements = [
        _allow("RunObjects", OBJECT_ACTIONS, objects),
        _allow("ListRuns", ["s3:ListBucket"], [place.bucket(storage.bucket)], StringLike={"s3:prefix": listed}),
    ]
    if storage.kms_key_arn is not None:
        statements.append(
            _allow(
                "BucketKey",
                ["kms:Decrypt", "kms:GenerateDataKey"],
                [storage.kms_key_arn],
                StringEquals={"kms:ViaService": f"s3.{place.region}.{place.domain}"},
            )
        )
    return statements


def data_statements(place: Place, data_uris: Sequence[str]) -> list[Statement]:
    """Reading training data, `s3://bucket/prefix` each. Raises ConfigurationError for a URI of another kind."""
    prefixes: dict[str, list[str]] = {}
    for uri in data_uris:
        bucket, prefix = parse_s3(uri)
        prefixes.setdefault(bucket, []).append(prefix)
    statements = []
    for number, (bucket, found) in enumerate(sorted(prefixes.items())):
        keys = sorted({pattern for prefix in found for pattern in _below(prefix)})
        objects = [place.bucket(bucket, key) for key in keys]
        statements.append(_allow(f"ReadData{number}", ["s3:GetObject"], objects))
        statements.append(
            _allow(f"ListData{number}", ["s3:ListBucket"], [place.bucket(bucket)], StringLike={"s3:prefix": keys})
        )
    return statements


def parse_s3(uri: str) -> tuple[str, str]:
    """Bucket and prefix (without a slash at its end) of `s3://bucket/prefix`; ConfigurationError for anything else."""
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc or any(sign in uri for sign in "*?$"):
        raise ConfigurationError(f"{uri!r} is no S3 URI: write s3://bucket/prefix, without wildcards")
    return parts.netloc, parts.path.strip("/")


def _below(prefix: str) -> list[str]:
    """The keys that a data URI means: the object of that name, and those in the folder of that name."""
    return [prefix, f"{prefix}/*"] if prefix else ["*"]


def secret_statements(secret_arns: Sequence[str]) -> list[Statement]:
    """Reading secrets, such as a Hugging Face token."""
    return [_allow("ReadSecrets", ["secretsmanager:GetSecretValue"], sorted(secret_arns))] if secret_arns else []


def network_statements(place: Place, vpc: Vpc) -> list[Statement]:
    """What SageMaker does as the role to give a job its network interfaces in a VPC.

    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html#sagemaker-roles-createtrainingjob-perms
    """
    interfaces = place.arn("ec2", "network-interface/*")
    subnets = [place.arn("ec2", f"subnet/{name}") for name in vpc.subnet_ids]
    groups = [place.arn("ec2", f"security-group/{name}") for name in vpc.security_group_ids]
    return [
        _allow("CreateNetworkInterfaces", ["ec2:CreateNetworkInterface"], [interfaces, *subnets, *groups]),
        _allow(
            "UseNetworkInterfaces",
            [
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ],
            [interfaces],
            ArnEquals={"ec2:Subnet": subnets},
        ),
        _allow(
            "DescribeNetwork",
            [
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
            ["*"],
        ),
    ]


def sagemaker_role_policy(
    place: Place,
    storage: Storage,
    *,
    job_name_prefix: str,
    repository_arn: str | None,
    data_uris: Sequence[str] = (),
    secret_arns: Sequence[str] = (),
    vpc: Vpc | None = None,
) -> Document:
    """What a training job may do: its runs' objects, pull the one image, write its logs and metrics.

    `repository_arn` is None for an image that is in no ECR. The actions are those that SageMaker documents for
    CreateTrainingJob (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html), each as narrow as it goes.
    """
    group = place.arn("logs", f"log-group:{LOG_GROUP}")
    statements = storage_statements(place, storage)
    if repository_arn is not None:
        statements += [
            _allow("RegistryToken", ["ecr:GetAuthorizationToken"], ["*"]),
            _allow(
                "PullImage",
                ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
                [repository_arn],
            ),
        ]
    statements += [
        _allow("LogGroup", ["logs:CreateLogGroup", "logs:DescribeLogStreams"], [group, f"{group}:*"]),
        _allow("WriteLogs", ["logs:CreateLogStream", "logs:PutLogEvents"], [f"{group}:log-stream:{job_name_prefix}-*"]),
        _allow(
            "WriteMetrics",
            ["cloudwatch:PutMetricData"],
            ["*"],
            StringEquals={"cloudwatch:namespace": METRICS_NAMESPACE},
        ),
        *data_statements(place, data_uris),
        *secret_statements(secret_arns),
    ]
    if storage.kms_key_arn is not None:
        # What SageMaker asks for where a job's output or volume names a key, not through S3:
        # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_OutputDataConfig.html
        key = [storage.kms_key_arn]
        statements.append(_allow("OutputKey", ["kms:Encrypt"], key))
        statements.append(_allow("VolumeKey", ["kms:CreateGrant"], key, Bool={"kms:GrantIsForAWSResource": "true"}))
    if vpc is not None:
        statements += network_statements(place, vpc)
    return _document(statements)


def replica_policy(
    place: Place, storage: Storage, *, data_uris: Sequence[str] = (), secret_arns: Sequence[str] = ()
) -> Document:
    """What a replica may do anywhere but on SageMaker: pods, other clouds, machines of one's own."""
    return _document(
        [
            *storage_statements(place, storage),
            *data_statements(place, data_uris),
            *secret_statements(secret_arns),
        ]
    )


# The launcher.


def launcher_policy(
    place: Place,
    storage: Storage,
    *,
    job_name_prefix: str,
    role_arn: str,
    repository_arn: str | None,
    instance_types: Sequence[str] = (),
    max_keep_alive_seconds: int = LONGEST_KEEP_ALIVE,
) -> Document:
    """What `scripts/launch.py` does, and nothing else.

    `instance_types`, with `*` as wildcard, are those it may start (none: any); `max_keep_alive_seconds` is the longest
    warm pool (0: none).
    """
    jobs = training_jobs(place, job_name_prefix)
    group = place.arn("logs", f"log-group:{LOG_GROUP}")
    limits: dict[str, dict[str, Any]] = {
        "NumericLessThanEqualsIfExists": {"sagemaker:KeepAlivePeriod": str(max_keep_alive_seconds)}
    }
    if instance_types:
        limits["ForAllValues:StringLike"] = {"sagemaker:InstanceTypes": sorted(instance_types)}
    statements = [
        _allow("StartJobs", ["sagemaker:CreateTrainingJob", "sagemaker:UpdateTrainingJob"], [jobs], **limits),
        _allow(
            "ManageJobs",
            [
                "sagemaker:AddTags",
                "sagemaker:DeleteTrainingJob",
                "sagemaker:DescribeTrainingJob",
                "sagemaker:ListTags",
                "sagemaker:StopTrainingJob",
            ],
            [jobs],
        ),
        _allow(
            "PassRole", ["iam:PassRole"], [role_arn], StringEquals={"iam:PassedToService": "sagemaker.amazonaws.com"}
        ),
        _allow("CheckRole", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], [role_arn]),
        _allow(
            "ReadQuotas",
            [
                "sagemaker:ListTrainingJobs",
                "servicequotas:GetServiceQuota",
                "servicequotas:ListAWSDefaultServiceQuotas",
                "servicequotas:ListServiceQuotas",
            ],
            ["*"],
        ),
        _allow("FindLogs", ["logs:DescribeLogStreams"], [group, f"{group}:*"]),
        _allow("ReadLogs", ["logs:GetLogEvents"], [f"{group}:log-stream:{job_name_prefix}-*"]),
        *storage_statements(place, storage),
    ]
    if repository_arn is not None:
        statements.append(_allow("CheckImage", ["ecr:DescribeImages"], [repository_arn]))
    return _document(statements)


# Resources' own policies.


def bucket_policy(place: Place, bucket: str) -> Document:
    """Deny every call that is not over TLS 1.2 or newer, whoever makes it."""
    resources = [place.bucket(bucket), place.bucket(bucket, "*")]

    def deny(sid: str, **condition: dict[str, Any]) -> Statement:
        return {
            "Sid": sid,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": resources,
            "Condition": condition,
        }

    return _document(
        [
            deny("DenyPlainHttp", Bool={"aws:SecureTransport": "false"}),
            deny("DenyOldTls", NumericLessThan={"s3:TlsVersion": "1.2"}),
        ]
    )


def key_policy(place: Place) -> Document:
    """The account's IAM policies decide who uses the key; no principal outside it, and no service by itself."""
    return _document(
        [
            {
                "Sid": "AccountDecides",
                "Effect": "Allow",
                "Principal": {"AWS": f"arn:{place.partition}:iam::{place.account}:root"},
                "Action": "kms:*",
                "Resource": "*",
            }
        ]
    )


# Replicas that run elsewhere.


def service_trust(service: str, *, account: str | None = None, tag_session: bool = False) -> Document:
    """Trust in one of AWS's services: on behalf of one account, for services that name it when they assume a role;
    `tag_session` for those that tag what they become (EKS Auto Mode).

    https://docs.aws.amazon.com/eks/latest/userguide/cross-service-confused-deputy-prevention.html
    """
    condition = {} if account is None else {"Condition": {"StringEquals": {"aws:SourceAccount": account}}}
    return _document(
        [
            {
                "Sid": "Service",
                "Effect": "Allow",
                "Principal": {"Service": service},
                "Action": ["sts:AssumeRole", *(["sts:TagSession"] if tag_session else [])],
                **condition,
            }
        ]
    )


def pod_trust(place: Place, cluster: str, namespace: str, service_account: str) -> Document:
    """Who may become the pods' role: EKS Pod Identity, for one service account of one cluster.

    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html
    """
    tags = {
        "aws:RequestTag/kubernetes-namespace": namespace,
        "aws:RequestTag/kubernetes-service-account": service_account,
    }
    return _document(
        [
            {
                "Sid": "PodIdentity",
                "Effect": "Allow",
                "Principal": {"Service": "pods.eks.amazonaws.com"},
                "Action": ["sts:AssumeRole", "sts:TagSession"],
                "Condition": {
                    "StringEquals": {"aws:SourceAccount": place.account} | tags,
                    "ArnEquals": {"aws:SourceArn": place.arn("eks", f"cluster/{cluster}")},
                },
            }
        ]
    )


def web_identity_trust(provider: str, claims: dict[str, str]) -> Document:
    """Who may become a role by an OpenID Connect token: the holder of one with exactly these claims.

    `provider` is the principal: an IAM OIDC provider's ARN, or `accounts.google.com`, which IAM knows by itself
    (https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_create_for-idp_oidc.html).
    """
    issuer = provider.partition(":oidc-provider/")[2] or provider
    return _document(
        [
            {
                "Sid": "WebIdentity",
                "Effect": "Allow",
                "Principal": {"Federated": provider},
                "Action": "sts:AssumeRoleWithWebIdentity",
                "Condition": {"StringEquals": {f"{issuer}:{name}": value for name, value in sorted(claims.items())}},
            }
        ]
    )


def google_trust(service_account_id: str, audience: str) -> Document:
    """Trust in one Google service account (its numeric unique id), by the tokens that GCP's metadata server issues."""
    return web_identity_trust(
        "accounts.google.com", {"aud": service_account_id, "oaud": audience, "sub": service_account_id}
    )


def entra_trust(place: Place, tenant: str, object_id: str, audience: str) -> Document:
    """Trust in one Azure managed identity (its object id), by the tokens that Entra ID issues for `audience`."""
    provider = f"arn:{place.partition}:iam::{place.account}:oidc-provider/sts.windows.net/{tenant}/"
    return web_identity_trust(provider, {"aud": audience, "sub": object_id})
