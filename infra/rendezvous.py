"""The bucket in which replicas meet, and the key that encrypts it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pulumi
import pulumi_aws as aws

from diloco.access import Place, bucket_policy, key_policy
from infra.lookups import found

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNS = "rendezvous"
OUTPUT = "output"


@dataclass(frozen=True)
class EncryptionKeyArgs:
    """Arguments of :class:`EncryptionKey`."""

    place: Place
    adopt: str | None = None
    """ARN of a key that exists; nothing is created."""
    protect: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)


class EncryptionKey(pulumi.ComponentResource):
    """A KMS key with yearly rotation, or one that exists."""

    arn: pulumi.Output[str]

    def __init__(self, name: str, args: EncryptionKeyArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:EncryptionKey", name, None, opts)
        if args.adopt is not None:
            adopt = args.adopt
            key = found(
                "encryption.key",
                adopt,
                "allowed: s3, create, or the ARN of an enabled key of this region",
                lambda: aws.kms.get_key(key_id=adopt),
            )
            if not key.enabled:
                raise pulumi.RunError(f"diloco:encryption.key {adopt!r}: the key is {key.key_state}; enable it first")
            self.arn = pulumi.Output.from_input(key.arn)
        else:
            created = aws.kms.Key(
                name,
                description="Objects of DiLoCo runs",
                deletion_window_in_days=7,
                enable_key_rotation=True,
                policy=json.dumps(key_policy(args.place)),
                tags=args.tags,
                opts=pulumi.ResourceOptions(parent=self, protect=args.protect),
            )
            aws.kms.Alias(
                name,
                name_prefix=f"alias/{name}-",
                target_key_id=created.key_id,
                opts=pulumi.ResourceOptions(parent=created),
            )
            self.arn = created.arn
        self.register_outputs({"arn": self.arn})


@dataclass(frozen=True)
class RendezvousBucketArgs:
    """Arguments of :class:`RendezvousBucket`."""

    place: Place
    name: str | None = None
    """Of the bucket to create; None: generated."""
    adopt: str | None = None
    """Name of a bucket that exists; nothing is created, and nothing of it changed."""
    prefix: str = ""
    key: EncryptionKey | None = None
    """Encrypts the objects; None: Amazon S3's own key does."""
    versioning: bool = False
    log_bucket: pulumi.Input[str] | None = None
    log_prefix: str = "access-logs"
    protect: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)


class RendezvousBucket(pulumi.ComponentResource):
    """A private bucket for runs, or one that exists.

    Objects below the prefix never expire: a commit must outlive its run, or a slow replica could make a second one.
    `scripts/launch.py prune` deletes finished runs. A bucket that holds objects is never deleted (no `force_destroy`).
    """

    bucket: pulumi.Output[str]
    """Its name."""
    arn: pulumi.Output[str]
    rendezvous_uri: pulumi.Output[str]
    output_uri: pulumi.Output[str]
    prefixes: tuple[str, str]
    """Of the keys that runs and their output have."""

    def __init__(self, name: str, args: RendezvousBucketArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:RendezvousBucket", name, None, opts)
        above = f"{args.prefix}/" if args.prefix else ""
        self.prefixes = (above + RUNS, above + OUTPUT)
        if args.adopt is not None:
            adopt = args.adopt
            existing = found(
                "bucket.adopt",
                adopt,
                "name a bucket that exists and that you may read, or leave it out to create one",
                lambda: aws.s3.get_bucket(bucket=adopt),
            )
            if existing.bucket_region and existing.bucket_region != args.place.region:
                raise pulumi.RunError(
                    f"diloco:bucket.adopt {adopt!r}: it is in {existing.bucket_region} and the stack in "
                    f"{args.place.region}; jobs need a bucket of their own region"
                )
            self.bucket = pulumi.Output.from_input(adopt)
            self.arn = pulumi.Output.from_input(args.place.bucket(adopt))
        else:
            self._create(name, args)
        self.rendezvous_uri = pulumi.Output.concat("s3://", self.bucket, "/", self.prefixes[0])
        self.output_uri = pulumi.Output.concat("s3://", self.bucket, "/", self.prefixes[1])
        self.register_outputs(
            {"bucket": self.bucket, "rendezvousUri": self.rendezvous_uri, "outputUri": self.output_uri}
        )

    def _create(self, name: str, args: RendezvousBucketArgs) -> None:
        # The execution policies that AWS makes for SageMaker grant only buckets with "sagemaker" in their names.
        bucket = aws.s3.Bucket(
            f"{name}-sagemaker",
            bucket=args.name,
            force_destroy=False,
            tags=args.tags,
            opts=pulumi.ResourceOptions(
                parent=self,
                protect=args.protect,
                # A key is deleted only after the bucket: one whose deletion was refused must stay readable.
                depends_on=[] if args.key is None else [args.key],
                hooks=pulumi.ResourceHookBinding(on_error=[_explain_bucket(name, args.name)]),
            ),
        )
        self.bucket, self.arn = bucket.bucket, bucket.arn
        # Settings go with their bucket: one whose deletion was refused stays private and encrypted.
        child = pulumi.ResourceOptions(parent=bucket, deleted_with=bucket)
        blocked = aws.s3.BucketPublicAccessBlock(
            name,
            bucket=bucket.bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=child,
        )
        aws.s3.BucketOwnershipControls(
            name, bucket=bucket.bucket, rule={"object_ownership": "BucketOwnerEnforced"}, opts=child
        )
        aws.s3.BucketServerSideEncryptionConfiguration(
            name,
            bucket=bucket.bucket,
            rules=[
                {
                    "apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}
                    if args.key is None
                    else {"sse_algorithm": "aws:kms", "kms_master_key_id": args.key.arn},
                    "bucket_key_enabled": args.key is not None,
                }
            ],
            opts=child,
        )
        # Not even "Suspended" otherwise, under which each deleted object leaves a marker. Deleting this suspends it.
        versioning = (
            [
                aws.s3.BucketVersioning(
                    name, bucket=bucket.bucket, versioning_configuration={"status": "Enabled"}, opts=child
                )
            ]
            if args.versioning
            else []
        )
        aws.s3.BucketLifecycleConfiguration(
            name,
            bucket=bucket.bucket,
            rules=[
                {
                    "id": "abort-uploads",
                    "status": "Enabled",
                    "filter": {},
                    "abort_incomplete_multipart_upload": {"days_after_initiation": 1},
                },
                {
                    "id": "expire-noncurrent-versions",
                    "status": "Enabled",
                    "filter": {},
                    "noncurrent_version_expiration": {"noncurrent_days": 1},
                    "expiration": {"expired_object_delete_marker": True},
                },
            ],
            opts=pulumi.ResourceOptions(parent=bucket, deleted_with=bucket, depends_on=versioning),
        )
        # A policy and a public-access block that are written at the same moment can conflict.
        aws.s3.BucketPolicy(
            name,
            bucket=bucket.bucket,
            policy=bucket.bucket.apply(lambda found_name: json.dumps(bucket_policy(args.place, found_name))),
            opts=pulumi.ResourceOptions(parent=bucket, deleted_with=bucket, depends_on=[blocked]),
        )
        if args.log_bucket is not None:
            aws.s3.BucketLogging(
                name,
                bucket=bucket.bucket,
                target_bucket=args.log_bucket,
                target_prefix=f"{args.log_prefix}/" if args.log_prefix else "",
                opts=child,
            )


def _explain_bucket(name: str, wanted: str | None) -> pulumi.ErrorHook:
    """Adds key and fix to what Amazon S3 says of a bucket that could not be made."""

    def explain(failure: pulumi.ErrorHookArgs) -> bool:
        if failure.failed_operation == "create" and wanted is not None:
            pulumi.log.error(
                f"diloco:bucket.name {wanted!r}: the bucket could not be made; all accounts share one space of names: "
                "choose another, leave it out to have one generated, or adopt yours with bucket.adopt"
            )
        return False  # trying again would change nothing

    return pulumi.ErrorHook(f"{name}-bucket", explain)
