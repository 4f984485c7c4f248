"""Stand-ins of aws.s3: a bucket and the resources that configure one, each named by its bucket."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from botocore.exceptions import ClientError

from tests.support.providers.resource import AutoName, RefusedError, Resource
from tests.support.providers.session import PARTITION, tag_list, tag_map

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

HOSTED_ZONE = "Z3AQBSTGFYJSTF"  # of us-east-1's website endpoints
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Bucket(Resource):
    """aws.s3.Bucket without the settings that have resources of their own."""

    urn_type = "aws:s3/bucket:Bucket"
    arguments = frozenset({"bucket", "forceDestroy", "objectLockEnabled"})
    replace_on = frozenset({"bucket", "objectLockEnabled"})
    computed = frozenset({"objectLockEnabled"})
    defaults: ClassVar[dict[str, Any]] = {"forceDestroy": False}
    auto_name = AutoName("bucket", 63, str.lower)
    tagged = True

    def check(self, logical: str, inputs: Plain, old: Plain, seed: bytes) -> tuple[Plain, dict[str, str]]:
        checked, problems = super().check(logical, inputs, old, seed)
        name = checked.get("bucket")
        if "bucket" not in problems and isinstance(name, str) and not _NAME.fullmatch(name) and len(name) != 36:
            problems["bucket"] = f"invalid S3 bucket name ({name}): 3-63 lowercase letters, digits, dots, hyphens"
        return checked, problems

    def create(self, inputs: Plain) -> str:
        name = str(inputs["bucket"])
        s3 = self.client("s3")
        if self._exists(
            name
        ):  # S3 in us-east-1 answers 200 to the owner's second CreateBucket; the provider asks first
            raise RefusedError(f"creating S3 Bucket ({name}): BucketAlreadyExists: the name is taken")
        options: Plain = {"ObjectLockEnabledForBucket": True} if inputs.get("objectLockEnabled") else {}
        if self.region != "us-east-1":
            options["CreateBucketConfiguration"] = {"LocationConstraint": self.region}
        s3.create_bucket(Bucket=name, **options)
        return name

    def complete(self, resource_id: str, inputs: Plain) -> None:
        if inputs["tagsAll"]:
            self.client("s3").put_bucket_tagging(Bucket=resource_id, Tagging={"TagSet": tag_list(inputs["tagsAll"])})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        s3 = self.client("s3")
        s3.head_bucket(Bucket=resource_id)
        tags = absent_as_none(s3.get_bucket_tagging, "NoSuchTagSet", Bucket=resource_id)
        lock = absent_as_none(
            s3.get_object_lock_configuration, "ObjectLockConfigurationNotFoundError", Bucket=resource_id
        )
        return bucket_names(resource_id, self.region) | {
            "bucket": resource_id,
            "objectLockEnabled": lock is not None,
            "tagsAll": tag_map(tags and tags["TagSet"]),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        if "tagsAll" not in changed:
            return
        if new["tagsAll"]:
            self.client("s3").put_bucket_tagging(Bucket=resource_id, Tagging={"TagSet": tag_list(new["tagsAll"])})
        else:
            self.client("s3").delete_bucket_tagging(Bucket=resource_id)

    def delete(self, resource_id: str, state: Plain) -> None:
        s3 = self.client("s3")
        if state.get("forceDestroy"):
            for page in s3.get_paginator("list_object_versions").paginate(Bucket=resource_id):
                for entry in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]:
                    s3.delete_object(Bucket=resource_id, Key=entry["Key"], VersionId=entry["VersionId"])
        s3.delete_bucket(Bucket=resource_id)

    def _exists(self, name: str) -> bool:
        try:
            self.client("s3").head_bucket(Bucket=name)
        except ClientError as problem:
            return problem.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        return True


class _OfBucket(Resource):
    """What configures one bucket: its id is the bucket's name, and another bucket needs another one."""

    replace_on = frozenset({"bucket"})

    def create(self, inputs: Plain) -> str:
        self.put(str(inputs["bucket"]), inputs)
        return str(inputs["bucket"])

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        self.put(resource_id, new)

    def put(self, bucket: str, inputs: Plain) -> None:
        """Write the whole configuration."""
        raise NotImplementedError


class PublicAccessBlock(_OfBucket):
    """aws.s3.BucketPublicAccessBlock."""

    urn_type = "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock"
    switches = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    arguments = frozenset({"bucket", *switches})

    def put(self, bucket: str, inputs: Plain) -> None:
        self.client("s3").put_public_access_block(
            Bucket=bucket,
            PublicAccessBlockConfiguration={_capital(name): bool(inputs.get(name)) for name in self.switches},
        )

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_public_access_block(Bucket=resource_id)["PublicAccessBlockConfiguration"]
        return {"bucket": resource_id} | {name: found.get(_capital(name), False) for name in self.switches}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").delete_public_access_block(Bucket=resource_id)


class OwnershipControls(_OfBucket):
    """aws.s3.BucketOwnershipControls."""

    urn_type = "aws:s3/bucketOwnershipControls:BucketOwnershipControls"
    arguments = frozenset({"bucket", "rule"})

    def put(self, bucket: str, inputs: Plain) -> None:
        rule = {"ObjectOwnership": inputs["rule"]["objectOwnership"]}
        self.client("s3").put_bucket_ownership_controls(Bucket=bucket, OwnershipControls={"Rules": [rule]})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_bucket_ownership_controls(Bucket=resource_id)["OwnershipControls"]["Rules"]
        return {"bucket": resource_id, "rule": {"objectOwnership": found[0]["ObjectOwnership"]} if found else None}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").delete_bucket_ownership_controls(Bucket=resource_id)


class BucketPolicy(_OfBucket):
    """aws.s3.BucketPolicy."""

    urn_type = "aws:s3/bucketPolicy:BucketPolicy"
    arguments = frozenset({"bucket", "policy"})
    documents = frozenset({"policy"})

    def put(self, bucket: str, inputs: Plain) -> None:
        self.client("s3").put_bucket_policy(Bucket=bucket, Policy=inputs["policy"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        return {"bucket": resource_id, "policy": self.client("s3").get_bucket_policy(Bucket=resource_id)["Policy"]}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").delete_bucket_policy(Bucket=resource_id)


class Encryption(_OfBucket):
    """aws.s3.BucketServerSideEncryptionConfiguration."""

    urn_type = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    arguments = frozenset({"bucket", "rules"})

    def put(self, bucket: str, inputs: Plain) -> None:
        rules = []
        for rule in inputs["rules"]:
            default = rule.get("applyServerSideEncryptionByDefault", {})
            entry: Plain = {"BucketKeyEnabled": bool(rule.get("bucketKeyEnabled"))}
            if default:
                by_default = {"SSEAlgorithm": default["sseAlgorithm"], "KMSMasterKeyID": default.get("kmsMasterKeyId")}
                entry["ApplyServerSideEncryptionByDefault"] = _given(by_default)
            rules.append(entry)
        self.client("s3").put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": rules})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_bucket_encryption(Bucket=resource_id)["ServerSideEncryptionConfiguration"]
        rules = []
        for rule in found["Rules"]:
            default = rule.get("ApplyServerSideEncryptionByDefault", {})
            by_default = {"sseAlgorithm": default.get("SSEAlgorithm"), "kmsMasterKeyId": default.get("KMSMasterKeyID")}
            rules.append(
                {
                    "applyServerSideEncryptionByDefault": _given(by_default),
                    "bucketKeyEnabled": rule.get("BucketKeyEnabled", False),
                }
            )
        return {"bucket": resource_id, "rules": rules}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").delete_bucket_encryption(Bucket=resource_id)


class Versioning(_OfBucket):
    """aws.s3.BucketVersioning. Deleting it suspends versioning, which can't be undone altogether."""

    urn_type = "aws:s3/bucketVersioning:BucketVersioning"
    arguments = frozenset({"bucket", "versioningConfiguration"})

    def put(self, bucket: str, inputs: Plain) -> None:
        status = inputs["versioningConfiguration"]["status"]
        if status not in {"Enabled", "Suspended", "Disabled"}:
            raise RefusedError(f"versioningConfiguration.status is Enabled, Suspended or Disabled, not {status!r}")
        if status != "Disabled":
            self.client("s3").put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_bucket_versioning(Bucket=resource_id)
        return {"bucket": resource_id, "versioningConfiguration": {"status": found.get("Status") or "Disabled"}}

    def delete(self, resource_id: str, state: Plain) -> None:
        if state["versioningConfiguration"]["status"] == "Enabled":
            self.put(resource_id, {"versioningConfiguration": {"status": "Suspended"}})


class Logging(_OfBucket):
    """aws.s3.BucketLogging."""

    urn_type = "aws:s3/bucketLogging:BucketLogging"
    arguments = frozenset({"bucket", "targetBucket", "targetPrefix"})

    def put(self, bucket: str, inputs: Plain) -> None:
        enabled = {"TargetBucket": inputs["targetBucket"], "TargetPrefix": inputs["targetPrefix"]}
        self.client("s3").put_bucket_logging(Bucket=bucket, BucketLoggingStatus={"LoggingEnabled": enabled})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_bucket_logging(Bucket=resource_id).get("LoggingEnabled")
        if not found:
            return None
        return {
            "bucket": resource_id,
            "targetBucket": found["TargetBucket"],
            "targetPrefix": found.get("TargetPrefix", ""),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").put_bucket_logging(Bucket=resource_id, BucketLoggingStatus={})


class Lifecycle(_OfBucket):
    """aws.s3.BucketLifecycleConfiguration: rules that abort uploads and expire objects or noncurrent versions."""

    urn_type = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
    arguments = frozenset({"bucket", "rules"})

    def put(self, bucket: str, inputs: Plain) -> None:
        rules = [_rule_to_aws(rule) for rule in inputs["rules"]]
        self.client("s3").put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("s3").get_bucket_lifecycle_configuration(Bucket=resource_id)
        return {"bucket": resource_id, "rules": [_rule_from_aws(rule) for rule in found["Rules"]]}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("s3").delete_bucket_lifecycle(Bucket=resource_id)


# The parts of a lifecycle rule that are implemented: wire name → API name → their fields.
_PARTS = {
    "abortIncompleteMultipartUpload": ("AbortIncompleteMultipartUpload", ("daysAfterInitiation",)),
    "expiration": ("Expiration", ("days", "expiredObjectDeleteMarker")),
    "noncurrentVersionExpiration": (
        "NoncurrentVersionExpiration",
        ("noncurrentDays", "newerNoncurrentVersions"),
    ),
}


def _rule_to_aws(rule: Plain) -> Plain:
    if extra := rule.keys() - {"id", "status", "filter", *_PARTS}:
        raise RefusedError(f"the stand-in implements no {', '.join(sorted(extra))} in a lifecycle rule")
    if not rule.keys() & _PARTS.keys():
        raise RefusedError(
            f"lifecycle rule {rule.get('id')} does nothing: at least one of {', '.join(_PARTS)} is needed"
        )
    made: Plain = {"ID": rule["id"], "Status": rule["status"], "Filter": {}}
    if extra := rule.get("filter", {}).keys() - {"prefix"}:
        raise RefusedError(f"the stand-in implements no {', '.join(sorted(extra))} in a lifecycle filter")
    made["Filter"] = {"Prefix": rule.get("filter", {}).get("prefix", "")}
    for name, (api_name, fields) in _PARTS.items():
        if part := rule.get(name):
            made[api_name] = {_capital(field): part[field] for field in fields if part.get(field)}
    return made


def _rule_from_aws(rule: Plain) -> Plain:
    told: Plain = {"id": rule.get("ID"), "status": rule.get("Status")}
    told["filter"] = {"prefix": rule.get("Filter", {}).get("Prefix") or rule.get("Prefix", "")}
    for name, (api_name, fields) in _PARTS.items():
        if part := rule.get(api_name):
            told[name] = {field: part[_capital(field)] for field in fields if part.get(_capital(field))}
    return told


def bucket_names(name: str, region: str) -> Plain:
    """What follows from a bucket's name and region."""
    return {
        "arn": f"arn:{PARTITION}:s3:::{name}",
        "bucketDomainName": f"{name}.s3.amazonaws.com",
        "bucketRegion": region,
        "bucketRegionalDomainName": f"{name}.s3.{region}.amazonaws.com",
        "hostedZoneId": HOSTED_ZONE,
    }


def absent_as_none(call: Any, *codes: str, **arguments: Any) -> Any:
    """Call an API; None if it answers with one of these error codes."""
    try:
        return call(**arguments)
    except ClientError as problem:
        if problem.response["Error"]["Code"] in codes:
            return None
        raise


def _capital(name: str) -> str:
    return name[0].upper() + name[1:]


def _given(fields: Plain) -> Plain:
    return {name: value for name, value in fields.items() if value}


RESOURCES: tuple[type[Resource], ...] = (
    Bucket,
    PublicAccessBlock,
    OwnershipControls,
    BucketPolicy,
    Encryption,
    Versioning,
    Logging,
    Lifecycle,
)
