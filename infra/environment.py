"""The whole environment: settings in, components, outputs out."""

from __future__ import annotations

from typing import Any

import pulumi
from pulumi.runtime.config import CONFIG, get_config_env

from diloco.errors import ConfigurationError
from diloco.stack import SCHEMA_VERSION
from infra.eks import EksCluster, EksClusterArgs
from infra.identity import (
    LauncherPolicy,
    LauncherPolicyArgs,
    SageMakerRole,
    SageMakerRoleArgs,
    StorageInputs,
    VpcInputs,
)
from infra.image import TrainerImage, TrainerImageArgs
from infra.indexed_job import IndexedJob, IndexedJobArgs, run_of
from infra.lookups import place
from infra.network import Network, NetworkArgs
from infra.quotas import WarmPoolQuota, WarmPoolQuotaArgs
from infra.rendezvous import EncryptionKey, EncryptionKeyArgs, RendezvousBucket, RendezvousBucketArgs
from infra.settings import PROJECT, Settings, slug


def read_settings() -> Settings:
    """The stack's settings. RunError, which the engine prints without a traceback, for what is wrong."""
    namespace = f"{pulumi.get_project()}:"
    config = {**get_config_env(), **CONFIG.get()}
    own = {key.removeprefix(namespace): value for key, value in config.items() if key.startswith(namespace)}
    try:
        return Settings.parse(own, pulumi.get_stack())
    except ConfigurationError as problem:
        raise pulumi.RunError(str(problem)) from None


def environment() -> None:
    """Compose the components and export their outputs (:class:`diloco.stack.StackOutputs`)."""
    settings = read_settings()
    here = place()
    name = f"{PROJECT}-{slug(pulumi.get_stack())}"
    tags = {"diloco:stack": pulumi.get_stack(), **settings.tags}

    encryption = settings.encryption
    key = (
        None
        if encryption.key == "s3"
        else EncryptionKey(
            name,
            EncryptionKeyArgs(place=here, adopt=encryption.adopted_key, protect=settings.protected, tags=tags),
        )
    )
    key_arn = None if key is None else key.arn
    bucket = RendezvousBucket(
        name,
        RendezvousBucketArgs(
            place=here,
            name=settings.bucket.name,
            adopt=settings.bucket.adopt,
            prefix=settings.bucket.prefix,
            key=key,
            versioning=settings.bucket.versioning,
            log_bucket=settings.bucket.log_bucket,
            log_prefix=settings.bucket.log_prefix,
            protect=settings.protected,
            tags=tags,
        ),
    )
    image = TrainerImage(
        name,
        TrainerImageArgs(
            place=here,
            uri=settings.image.uri,
            base_image=settings.image.base_image,
            keep=settings.image.keep,
            kms_key_arn=key_arn if encryption.repository else None,
            force_delete=settings.dev,
            tags=tags,
        ),
    )
    network = None
    if settings.network is not None:
        network = Network(
            name,
            NetworkArgs(
                place=here,
                subnet_ids=settings.network.subnet_ids,
                security_group_ids=settings.network.security_group_ids,
                egress=settings.network.egress or "none",
                cidr=settings.network.cidr,
                tags=tags,
            ),
        )
    storage = StorageInputs(bucket.bucket, bucket.prefixes, key_arn)
    role = SageMakerRole(
        name,
        SageMakerRoleArgs(
            place=here,
            storage=storage,
            job_name_prefix=settings.job_name_prefix,
            repository_arn=image.repository_arn,
            adopt=settings.role.adopt,
            data_uris=settings.data_uris,
            secret_arns=settings.secret_arns,
            vpc=None if network is None else VpcInputs(network.subnet_ids, network.security_group_ids),
            permissions_boundary=settings.role.permissions_boundary,
            tags=tags,
        ),
    )
    launcher = LauncherPolicy(
        name,
        LauncherPolicyArgs(
            place=here,
            storage=storage,
            job_name_prefix=settings.job_name_prefix,
            role_arn=role.arn,
            repository_arn=image.repository_arn,
            instance_types=settings.launcher.instance_types,
            max_keep_alive_seconds=settings.launcher.max_keep_alive_seconds,
            attach_to=settings.launcher.attach_to,
            tags=tags,
        ),
    )
    quotas = _quotas(name, settings, here.region)
    cluster = None
    if settings.eks is not None:
        cluster = EksCluster(
            name,
            EksClusterArgs(
                place=here,
                settings=settings.eks,
                storage=storage,
                subnet_ids=None if network is None else network.subnet_ids,
                key_arn=key_arn,
                data_uris=settings.data_uris,
                secret_arns=settings.secret_arns,
                protect=settings.protected,
                tags=tags,
            ),
        )
        if settings.job is not None:
            pods, run = run_of(settings.eks, settings.job, here.region)
            IndexedJob(
                name,
                IndexedJobArgs(
                    pods=pods,
                    run=run,
                    image_uri=image.uri,
                    rendezvous_uri=bucket.rendezvous_uri,
                    namespace=cluster.namespace,
                    provider=cluster.provider,
                ),
            )
    outputs: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "region": here.region,
        "account": here.account,
        "bucket": bucket.bucket,
        "rendezvousUri": bucket.rendezvous_uri,
        "outputUri": bucket.output_uri,
        "imageUri": image.uri,
        "sagemakerRoleArn": role.arn,
        "launcherPolicyArn": launcher.arn,
        "jobNamePrefix": settings.job_name_prefix,
        "kmsKeyArn": key_arn,
        "tags": tags,
        "quotas": None if quotas is None else quotas.quotas,
        "subnetIds": None if network is None else network.subnet_ids,
        "securityGroupIds": None if network is None else network.security_group_ids,
        "clusterName": None if cluster is None else cluster.cluster_name,
        "namespace": None if cluster is None else cluster.namespace,
        "serviceAccount": None if cluster is None else cluster.service_account,
        "podRoleArn": None if cluster is None else cluster.pod_role_arn,
    }
    for output, value in outputs.items():
        if value is not None:
            pulumi.export(output, value)


def _quotas(name: str, settings: Settings, region: str) -> WarmPoolQuota | None:
    if not settings.quotas:
        return None
    aws = pulumi.Config("aws")
    endpoints: list[dict[str, str]] = aws.get_object("endpoints") or []
    endpoint = next((entry["servicequotas"] for entry in endpoints if entry.get("servicequotas")), None)
    return WarmPoolQuota(
        name,
        WarmPoolQuotaArgs(region=region, quotas=settings.quotas, profile=aws.get("profile"), endpoint_url=endpoint),
    )
