"""What a job needs of the account, used as its execution role: the output's bucket and the image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from tests.support.sagemaker.errors import ApiError
from tests.support.sagemaker.role import role_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.sagemaker.service import Service

_ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[^:@]+)(?P<tag>.*)")


def check(service: Service, request: Mapping[str, Any]) -> None:
    """Raise what the service says before it accepts a job whose role reaches neither bucket nor image."""
    role = request["RoleArn"]
    bucket, prefix = split(request["OutputDataConfig"]["S3OutputPath"])
    try:
        service.as_role(role, "s3").list_objects_v2(Bucket=bucket, Prefix=f"{prefix.rstrip('/')}/", MaxKeys=1)
    except ClientError as problem:
        what = "Access denied to" if problem.response["Error"]["Code"] == "AccessDenied" else "No such"
        raise ApiError("ValidationException", f"{what} OutputDataConfig S3 bucket: {bucket}") from None
    try:
        pull_image(service, request)
    except ClientError as problem:
        image = request["AlgorithmSpecification"]["TrainingImage"]
        denied = problem.response["Error"]["Code"] in ("AccessDenied", "AccessDeniedException")
        what = "Access denied for" if denied else "Cannot find"
        raise ApiError(
            "ValidationException",
            f"{what} repository: {image}. Please check if your role {role_name(role)} is right.",
        ) from None


def pull_image(service: Service, request: Mapping[str, Any]) -> None:
    """Do as the execution role what a pull does at ECR; raises ClientError."""
    found = _ECR.fullmatch(request["AlgorithmSpecification"].get("TrainingImage", ""))
    if found is None:
        return
    ecr = service.as_role(request["RoleArn"], "ecr")
    ecr.get_authorization_token()
    tag = found["tag"]
    image = {"imageDigest": tag[1:]} if tag.startswith("@") else {"imageTag": tag[1:] or "latest"}
    answer = ecr.batch_get_image(registryId=found["account"], repositoryName=found["name"], imageIds=[image])
    if not answer["images"]:
        raise ClientError({"Error": {"Code": "ImageNotFound", "Message": found.string}}, "BatchGetImage")
    layers = re.findall(r'"digest"\s*:\s*"(sha256:[0-9a-f]{64})"', answer["images"][0]["imageManifest"])
    for layer in layers[-1:]:
        ecr.get_download_url_for_layer(registryId=found["account"], repositoryName=found["name"], layerDigest=layer)


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an S3 URI."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key
