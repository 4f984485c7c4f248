"""Requests that the tests of the stand-in start from."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.sagemaker import Emulator

BUCKET = "sagemaker-standin"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/diloco-jobs"

VALID: dict[str, Any] = {
    "TrainingJobName": "diloco-r0-s1",
    "AlgorithmSpecification": {
        "TrainingImage": "public.ecr.aws/example/trainer:1",
        "TrainingInputMode": "FastFile",
        "ContainerEntrypoint": ["/bin/sh", "-c"],
        "ContainerArguments": ["exit 0"],
    },
    "RoleArn": ROLE,
    "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out"},
    "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}


def request(name: str = "diloco-r0-s1", script: str = "exit 0", **fields: Any) -> dict[str, Any]:
    """A valid request whose container runs a shell script; `fields` replace its own, None removes one."""
    made = copy.deepcopy(VALID)
    made["TrainingJobName"] = name
    made["AlgorithmSpecification"]["ContainerArguments"] = [script]
    made |= fields
    return {key: value for key, value in made.items() if value is not None}


def make_account(emulator: Emulator, statements: list[dict[str, Any]] | None = None) -> None:
    """Create the bucket and the execution role that :func:`request` names."""
    emulator.client("s3").create_bucket(Bucket=BUCKET)
    iam = emulator.client("iam")
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
                "Condition": {
                    "StringEquals": {"aws:SourceAccount": ACCOUNT},
                    "ArnLike": {"aws:SourceArn": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/diloco-*"},
                },
            }
        ],
    }
    iam.create_role(RoleName="diloco-jobs", AssumeRolePolicyDocument=json.dumps(trust))
    allow = {"Version": "2012-10-17", "Statement": statements or [STORAGE, LOGS]}
    iam.put_role_policy(RoleName="diloco-jobs", PolicyName="jobs", PolicyDocument=json.dumps(allow))


STORAGE = {
    "Effect": "Allow",
    "Action": ["s3:GetObject", "s3:PutObject", "s3:ListBucket"],
    "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
}
LOGS = {
    "Effect": "Allow",
    "Action": ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"],
    "Resource": "*",
}
