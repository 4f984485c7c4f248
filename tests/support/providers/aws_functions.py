"""Stand-ins of the aws functions that a program may invoke: token → results under the wire's names."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from tests.support.providers.aws_iam import document_text
from tests.support.providers.aws_s3 import bucket_names
from tests.support.providers.resource import RefusedError
from tests.support.providers.session import PARTITION, AwsSession, tag_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.providers.values import Plain


def caller_identity(aws: AwsSession, _: Plain) -> Plain:
    told = aws.client("sts").get_caller_identity()
    return {"accountId": told["Account"], "arn": told["Arn"], "id": told["Account"], "userId": told["UserId"]}


def region(aws: AwsSession, args: Plain) -> Plain:
    name = args.get("region") or args.get("name") or aws.region
    return {"description": name, "endpoint": f"ec2.{name}.amazonaws.com", "id": name, "name": name, "region": name}


def partition(_: AwsSession, __: Plain) -> Plain:
    return {
        "dnsSuffix": "amazonaws.com",
        "id": PARTITION,
        "partition": PARTITION,
        "reverseDnsPrefix": "com.amazonaws",
    }


def availability_zones(aws: AwsSession, args: Plain) -> Plain:
    filters = [{"Name": one["name"], "Values": one["values"]} for one in args.get("filters", [])]
    if state := args.get("state"):
        filters.append({"Name": "state", "Values": [state]})
    zones = aws.client("ec2", args.get("region")).describe_availability_zones(Filters=filters)["AvailabilityZones"]
    kept = sorted(
        (
            zone
            for zone in zones
            if zone["ZoneName"] not in args.get("excludeNames", [])
            and zone["ZoneId"] not in args.get("excludeZoneIds", [])
        ),
        key=lambda zone: str(zone["ZoneName"]),
    )
    return args | {
        "groupNames": sorted({zone["GroupName"] for zone in kept}),
        "id": aws.region,
        "names": [zone["ZoneName"] for zone in kept],
        "region": aws.region,
        "zoneIds": [zone["ZoneId"] for zone in kept],
    }


def ecr_authorization_token(aws: AwsSession, args: Plain) -> Plain:
    told = aws.client("ecr", args.get("region")).get_authorization_token()["authorizationData"][0]
    user, _, password = base64.b64decode(told["authorizationToken"]).decode().partition(":")
    return args | {
        "authorizationToken": told["authorizationToken"],
        "expiresAt": told["expiresAt"].isoformat(),
        "id": aws.region,
        "password": password,
        "proxyEndpoint": told["proxyEndpoint"],
        "region": aws.region,
        "userName": user,
    }


def ecr_repository(aws: AwsSession, args: Plain) -> Plain:
    ecr = aws.client("ecr", args.get("region"))
    found = ecr.describe_repositories(repositoryNames=[args["name"]])["repositories"][0]
    images = ecr.describe_images(repositoryName=args["name"])["imageDetails"]
    newest: Plain = max(images, key=lambda image: image["imagePushedAt"], default={})
    return {
        "arn": found["repositoryArn"],
        "encryptionConfigurations": [found["encryptionConfiguration"]] if "encryptionConfiguration" in found else [],
        "id": found["repositoryName"],
        "imageScanningConfigurations": [{"scanOnPush": found["imageScanningConfiguration"]["scanOnPush"]}],
        "imageTagMutability": found["imageTagMutability"],
        "imageTagMutabilityExclusionFilters": [],
        "mostRecentImageTags": newest.get("imageTags", []),
        "name": found["repositoryName"],
        "region": aws.region,
        "registryId": found["registryId"],
        "repositoryUrl": found["repositoryUri"],
        "tags": tag_map(ecr.list_tags_for_resource(resourceArn=found["repositoryArn"])["tags"]),
    }


def ecr_image(aws: AwsSession, args: Plain) -> Plain:
    ecr = aws.client("ecr", args.get("region"))
    wanted = {"imageTag": args.get("imageTag"), "imageDigest": args.get("imageDigest")}
    chosen = {name: value for name, value in wanted.items() if value}
    if not chosen and not args.get("mostRecent"):
        raise RefusedError("one of imageDigest, imageTag, mostRecent is needed")
    selection = {"imageIds": [chosen]} if chosen else {}
    images = ecr.describe_images(repositoryName=args["repositoryName"], **selection)["imageDetails"]
    if not images:
        raise RefusedError(f"no image {chosen} in {args['repositoryName']}")
    image = max(images, key=lambda one: one["imagePushedAt"])
    repository = ecr.describe_repositories(repositoryNames=[args["repositoryName"]])["repositories"][0]
    return args | {
        "id": image["imageDigest"],
        "imageDigest": image["imageDigest"],
        "imagePushedAt": int(image["imagePushedAt"].timestamp()),
        "imageSizeInBytes": image.get("imageSizeInBytes", 0),
        "imageTags": image.get("imageTags", []),
        "imageUri": f"{repository['repositoryUri']}@{image['imageDigest']}",
        "region": aws.region,
        "registryId": image["registryId"],
    }


def s3_bucket(aws: AwsSession, args: Plain) -> Plain:
    found = aws.client("s3", args.get("region")).head_bucket(Bucket=args["bucket"])
    place = found.get("BucketRegion") or aws.region
    return bucket_names(args["bucket"], place) | {"bucket": args["bucket"], "id": args["bucket"], "region": aws.region}


def iam_role(aws: AwsSession, args: Plain) -> Plain:
    role = aws.client("iam").get_role(RoleName=args["name"])["Role"]
    return {
        "arn": role["Arn"],
        "assumeRolePolicy": document_text(role["AssumeRolePolicyDocument"]),
        "createDate": role["CreateDate"].isoformat(),
        "description": role.get("Description", ""),
        "id": role["RoleName"],
        "maxSessionDuration": role["MaxSessionDuration"],
        "name": role["RoleName"],
        "path": role["Path"],
        "permissionsBoundary": role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn", ""),
        "roleLastUseds": [],
        "tags": tag_map(role.get("Tags")),
        "uniqueId": role["RoleId"],
    }


def iam_simulation(aws: AwsSession, args: Plain) -> Plain:
    contexts = [
        {"ContextKeyName": one["key"], "ContextKeyType": one["type"], "ContextKeyValues": one["values"]}
        for one in args.get("contexts", [])
    ]
    options = {
        "CallerArn": args.get("callerArn"),
        "ContextEntries": contexts,
        "PermissionsBoundaryPolicyInputList": args.get("permissionsBoundaryPoliciesJsons"),
        "PolicyInputList": args.get("additionalPoliciesJsons"),
        "ResourceArns": args.get("resourceArns"),
        "ResourceHandlingOption": args.get("resourceHandlingOption"),
        "ResourceOwner": args.get("resourceOwnerAccountId"),
        "ResourcePolicy": args.get("resourcePolicyJson"),
    }
    pages = aws.client("iam").get_paginator("simulate_principal_policy")
    results = []
    for page in pages.paginate(
        PolicySourceArn=args["policySourceArn"],
        ActionNames=args["actionNames"],
        **{name: value for name, value in options.items() if value},
    ):
        for one in page["EvaluationResults"]:
            statements = [
                {"sourcePolicyId": hit.get("SourcePolicyId", ""), "sourcePolicyType": ""} for hit in _hits(one)
            ]
            results.append(
                {
                    "actionName": one["EvalActionName"],
                    "allowed": one["EvalDecision"] == "allowed",
                    "decision": one["EvalDecision"],
                    "decisionDetails": {},
                    "matchedStatements": statements,
                    "missingContextKeys": one.get("MissingContextValues", []),
                    "resourceArn": one.get("EvalResourceName", "*"),
                }
            )
    return args | {"allAllowed": all(one["allowed"] for one in results), "id": "-", "results": results}


def eks_cluster(aws: AwsSession, args: Plain) -> Plain:
    found = aws.client("eks", args.get("region")).describe_cluster(name=args["name"])["cluster"]
    return {
        "arn": found["arn"],
        "certificateAuthorities": [found["certificateAuthority"]],
        "endpoint": found["endpoint"],
        "id": found["name"],
        "identities": [{"oidcs": [{"issuer": found["identity"]["oidc"]["issuer"]}]}],
        "name": found["name"],
        "region": aws.region,
        "roleArn": found["roleArn"],
        "status": found["status"],
        "tags": found.get("tags", {}),
        "version": found["version"],
    }


def kms_key(aws: AwsSession, args: Plain) -> Plain:
    key = aws.client("kms", args.get("region")).describe_key(KeyId=args["keyId"])["KeyMetadata"]
    return args | {
        "arn": key["Arn"],
        "awsAccountId": key.get("AWSAccountId", aws.account),
        "creationDate": key["CreationDate"].isoformat(),
        "customerMasterKeySpec": key["CustomerMasterKeySpec"],
        "description": key.get("Description", ""),
        "enabled": key["Enabled"],
        "id": key["KeyId"],
        "keyManager": key["KeyManager"],
        "keySpec": key["KeySpec"],
        "keyState": key["KeyState"],
        "keyUsage": key["KeyUsage"],
        "multiRegion": key["MultiRegion"],
        "multiRegionConfigurations": [],
        "origin": key["Origin"],
        "region": aws.region,
        "xksKeyConfigurations": [],
    }


def _hits(result: Plain) -> list[Plain]:
    hits: list[Plain] = result.get("MatchedStatements", [])
    return hits


FUNCTIONS: dict[str, Callable[[Any, Plain], Plain]] = {
    "aws:index/getCallerIdentity:getCallerIdentity": caller_identity,
    "aws:index/getRegion:getRegion": region,
    "aws:index/getPartition:getPartition": partition,
    "aws:index/getAvailabilityZones:getAvailabilityZones": availability_zones,
    "aws:ecr/getAuthorizationToken:getAuthorizationToken": ecr_authorization_token,
    "aws:ecr/getRepository:getRepository": ecr_repository,
    "aws:ecr/getImage:getImage": ecr_image,
    "aws:s3/getBucket:getBucket": s3_bucket,
    "aws:iam/getRole:getRole": iam_role,
    "aws:iam/getPrincipalPolicySimulation:getPrincipalPolicySimulation": iam_simulation,
    "aws:eks/getCluster:getCluster": eks_cluster,
    "aws:kms/getKey:getKey": kms_key,
}
