"""Stand-ins of aws.kms and aws.ecr."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from botocore.exceptions import ClientError

from tests.support.providers.resource import AutoName, RefusedError, Resource
from tests.support.providers.session import PARTITION, tag_list, tag_map

if TYPE_CHECKING:
    from tests.support.providers.values import Plain


class Key(Resource):
    """aws.kms.Key. Deleting one schedules it: KMS keeps it for the window."""

    urn_type = "aws:kms/key:Key"
    arguments = frozenset(
        {
            "bypassPolicyLockoutSafetyCheck",
            "customerMasterKeySpec",
            "deletionWindowInDays",
            "description",
            "enableKeyRotation",
            "isEnabled",
            "keyUsage",
            "multiRegion",
            "policy",
            "rotationPeriodInDays",
        }
    )
    replace_on = frozenset({"customerMasterKeySpec", "keyUsage", "multiRegion"})
    computed = frozenset({"description", "policy", "rotationPeriodInDays", "multiRegion"})
    documents = frozenset({"policy"})
    defaults: ClassVar[dict[str, Any]] = {
        "bypassPolicyLockoutSafetyCheck": False,
        "customerMasterKeySpec": "SYMMETRIC_DEFAULT",
        "enableKeyRotation": False,
        "isEnabled": True,
        "keyUsage": "ENCRYPT_DECRYPT",
    }
    tagged = True

    def create(self, inputs: Plain) -> str:
        options = {"Description": inputs.get("description"), "Policy": inputs.get("policy")}
        made = self.client("kms").create_key(
            KeySpec=inputs["customerMasterKeySpec"],
            KeyUsage=inputs["keyUsage"],
            MultiRegion=bool(inputs.get("multiRegion")),
            BypassPolicyLockoutSafetyCheck=inputs["bypassPolicyLockoutSafetyCheck"],
            Tags=_kms_tags(inputs["tagsAll"]),
            **{name: value for name, value in options.items() if value},
        )
        return str(made["KeyMetadata"]["KeyId"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        if inputs["enableKeyRotation"]:
            self._rotate(resource_id, inputs)
        if not inputs["isEnabled"]:
            self.client("kms").disable_key(KeyId=resource_id)

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        kms = self.client("kms")
        key = kms.describe_key(KeyId=resource_id)["KeyMetadata"]
        if key["KeyState"] == "PendingDeletion":
            return None
        rotation = kms.get_key_rotation_status(KeyId=resource_id)
        tags = kms.list_resource_tags(KeyId=resource_id)["Tags"]
        return {
            "arn": key["Arn"],
            "customerMasterKeySpec": key["CustomerMasterKeySpec"],
            "description": key.get("Description"),
            "enableKeyRotation": rotation["KeyRotationEnabled"],
            "isEnabled": key["Enabled"],
            "keyId": key["KeyId"],
            "keyUsage": key["KeyUsage"],
            "multiRegion": key["MultiRegion"],
            "policy": kms.get_key_policy(KeyId=resource_id, PolicyName="default")["Policy"],
            "rotationPeriodInDays": rotation.get("RotationPeriodInDays"),
            "tagsAll": {tag["TagKey"]: tag["TagValue"] for tag in tags},
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        kms = self.client("kms")
        if "isEnabled" in changed and new["isEnabled"]:
            kms.enable_key(KeyId=resource_id)
        if changed & {"enableKeyRotation", "rotationPeriodInDays"}:
            self._rotate(resource_id, new)
        if "description" in changed:
            kms.update_key_description(KeyId=resource_id, Description=new.get("description", ""))
        if "policy" in changed:
            kms.put_key_policy(KeyId=resource_id, PolicyName="default", Policy=new["policy"])
        if "isEnabled" in changed and not new["isEnabled"]:
            kms.disable_key(KeyId=resource_id)
        if gone := sorted(old.get("tagsAll", {}).keys() - new["tagsAll"].keys()):
            kms.untag_resource(KeyId=resource_id, TagKeys=gone)
        if "tagsAll" in changed and new["tagsAll"]:
            kms.tag_resource(KeyId=resource_id, Tags=_kms_tags(new["tagsAll"]))

    def delete(self, resource_id: str, state: Plain) -> None:
        window = state.get("deletionWindowInDays") or 30
        self.client("kms").schedule_key_deletion(KeyId=resource_id, PendingWindowInDays=window)

    def _rotate(self, resource_id: str, inputs: Plain) -> None:
        kms = self.client("kms")
        if not inputs["enableKeyRotation"]:
            kms.disable_key_rotation(KeyId=resource_id)
        elif period := inputs.get("rotationPeriodInDays"):
            kms.enable_key_rotation(KeyId=resource_id, RotationPeriodInDays=period)
        else:
            kms.enable_key_rotation(KeyId=resource_id)


class Alias(Resource):
    """aws.kms.Alias; its id is its name."""

    urn_type = "aws:kms/alias:Alias"
    arguments = frozenset({"name", "targetKeyId"})
    replace_on = frozenset({"name"})
    auto_name = AutoName("name", 255, lambda name: f"alias/{name}")

    def create(self, inputs: Plain) -> str:
        self.client("kms").create_alias(AliasName=inputs["name"], TargetKeyId=inputs["targetKeyId"])
        return str(inputs["name"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        for page in self.client("kms").get_paginator("list_aliases").paginate():
            for alias in page["Aliases"]:
                if alias["AliasName"] == resource_id:
                    key_arn = f"arn:{PARTITION}:kms:{self.region}:{self.session.account}:key/{alias['TargetKeyId']}"
                    # An ARN given as the target stays one: the provider holds both for equal.
                    by_arn = str(state.get("targetKeyId", "")) == key_arn
                    return {
                        "arn": alias["AliasArn"],
                        "name": resource_id,
                        "targetKeyArn": key_arn,
                        "targetKeyId": key_arn if by_arn else alias["TargetKeyId"],
                    }
        return None

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        self.client("kms").update_alias(AliasName=resource_id, TargetKeyId=new["targetKeyId"])

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("kms").delete_alias(AliasName=resource_id)


class Repository(Resource):
    """aws.ecr.Repository; its id is its name. Without `forceDelete` one that holds images is not deleted."""

    urn_type = "aws:ecr/repository:Repository"
    arguments = frozenset(
        {"encryptionConfigurations", "forceDelete", "imageScanningConfiguration", "imageTagMutability", "name"}
    )
    replace_on = frozenset({"encryptionConfigurations", "name"})
    computed = frozenset({"encryptionConfigurations"})
    defaults: ClassVar[dict[str, Any]] = {"imageTagMutability": "MUTABLE"}
    auto_name = AutoName("name", 255, str.lower)
    tagged = True

    def create(self, inputs: Plain) -> str:
        scan = inputs.get("imageScanningConfiguration", {})
        options: Plain = {}
        if encryption := inputs.get("encryptionConfigurations"):
            given = {"encryptionType": encryption[0].get("encryptionType"), "kmsKey": encryption[0].get("kmsKey")}
            options["encryptionConfiguration"] = {name: value for name, value in given.items() if value}
        self.client("ecr").create_repository(
            repositoryName=inputs["name"],
            imageTagMutability=inputs["imageTagMutability"],
            imageScanningConfiguration={"scanOnPush": bool(scan.get("scanOnPush"))},
            tags=tag_list(inputs["tagsAll"]),
            **options,
        )
        return str(inputs["name"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        ecr = self.client("ecr")
        found = self.only(ecr.describe_repositories(repositoryNames=[resource_id])["repositories"])
        tags = ecr.list_tags_for_resource(resourceArn=found["repositoryArn"])["tags"]
        encryption = found.get("encryptionConfiguration", {})
        return {
            "arn": found["repositoryArn"],
            "encryptionConfigurations": [encryption] if encryption else None,
            "imageScanningConfiguration": {"scanOnPush": found["imageScanningConfiguration"]["scanOnPush"]},
            "imageTagMutability": found["imageTagMutability"],
            "name": found["repositoryName"],
            "registryId": found["registryId"],
            "repositoryUrl": found["repositoryUri"],
            "tagsAll": tag_map(tags),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        ecr = self.client("ecr")
        if "imageTagMutability" in changed:
            ecr.put_image_tag_mutability(repositoryName=resource_id, imageTagMutability=new["imageTagMutability"])
        if "imageScanningConfiguration" in changed:
            scan = bool(new.get("imageScanningConfiguration", {}).get("scanOnPush"))
            ecr.put_image_scanning_configuration(
                repositoryName=resource_id, imageScanningConfiguration={"scanOnPush": scan}
            )
        if gone := sorted(old.get("tagsAll", {}).keys() - new["tagsAll"].keys()):
            ecr.untag_resource(resourceArn=old["arn"], tagKeys=gone)
        if "tagsAll" in changed and new["tagsAll"]:
            ecr.tag_resource(resourceArn=old["arn"], tags=tag_list(new["tagsAll"]))

    def delete(self, resource_id: str, state: Plain) -> None:
        try:
            self.client("ecr").delete_repository(repositoryName=resource_id, force=bool(state.get("forceDelete")))
        except ClientError as problem:
            if problem.response["Error"]["Code"] != "RepositoryNotEmptyException":
                raise
            raise RefusedError(f"ECR Repository ({resource_id}) not empty, consider using force_delete") from problem


class LifecyclePolicy(Resource):
    """aws.ecr.LifecyclePolicy; its id is the repository's name."""

    urn_type = "aws:ecr/lifecyclePolicy:LifecyclePolicy"
    arguments = frozenset({"policy", "repository"})
    # As with the real provider, another policy is another resource.
    replace_on = frozenset({"policy", "repository"})
    documents = frozenset({"policy"})

    def create(self, inputs: Plain) -> str:
        self.client("ecr").put_lifecycle_policy(
            repositoryName=inputs["repository"], lifecyclePolicyText=inputs["policy"]
        )
        return str(inputs["repository"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("ecr").get_lifecycle_policy(repositoryName=resource_id)
        return {
            "policy": found["lifecyclePolicyText"],
            "registryId": found["registryId"],
            "repository": found["repositoryName"],
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ecr").delete_lifecycle_policy(repositoryName=resource_id)


def _kms_tags(tags: Plain) -> list[dict[str, str]]:
    return [{"TagKey": key, "TagValue": value} for key, value in sorted(tags.items())]


RESOURCES: tuple[type[Resource], ...] = (Key, Alias, Repository, LifecyclePolicy)
