"""What a stack's principals may do at services whose requests no emulator authorises as AWS does: decided by the
policies that it stores, with the resource and the condition keys of the real request.

https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco import access
from tests.support.iam_authority import Authority
from tests.support.sagemaker.ministack import ministack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.iam_authority import Context

PLACE = access.Place("us-east-1", "123456789012")
PREFIX = "diloco-dev"
ROLE = f"arn:aws:iam::{PLACE.account}:role/diloco-dev-job"
LAUNCHER = f"arn:aws:iam::{PLACE.account}:user/launcher"
STRANGER = f"arn:aws:iam::{PLACE.account}:user/stranger"
JOB = PLACE.arn("sagemaker", f"training-job/{PREFIX}-run-0")
OTHER_JOB = PLACE.arn("sagemaker", "training-job/another")
ALIKE_JOB = PLACE.arn("sagemaker", f"training-job/{PREFIX}x-run-0")
KEY = PLACE.arn("kms", "key/00000000-0000-0000-0000-000000000000")
STREAM = PLACE.arn("logs", f"log-group:{access.LOG_GROUP}:log-stream:{PREFIX}-run-0/algo-1-1")
OTHER_STREAM = PLACE.arn("logs", f"log-group:{access.LOG_GROUP}:log-stream:another/algo-1-1")
SUBNET, OTHER_SUBNET = PLACE.arn("ec2", "subnet/subnet-1"), PLACE.arn("ec2", "subnet/subnet-2")
INTERFACE = PLACE.arn("ec2", "network-interface/eni-1")
QUOTA = PLACE.arn("servicequotas", "sagemaker/L-1")

CREATE, UPDATE = "sagemaker:CreateTrainingJob", "sagemaker:UpdateTrainingJob"
SMALL: Context = {"sagemaker:InstanceTypes": ["ml.g5.xlarge"]}


def with_small(**more: str) -> Context:
    return {**SMALL, **{f"sagemaker:{name}": value for name, value in more.items()}}


def named(*rows: tuple[str, str, str, Context]) -> list[Any]:
    return [pytest.param(*row, id=name) for name, *row in rows]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    """The documents of a stack in a VPC, with a key and limits for its launcher, as MiniStack stores them."""
    storage = access.Storage("runs", ("rendezvous", "output"), KEY)
    with ministack(tmp_path_factory.mktemp("iam"), auth=True) as emulator:
        iam = emulator.client("iam")
        iam.create_role(
            RoleName=ROLE.rpartition("/")[2],
            AssumeRolePolicyDocument=json.dumps(access.sagemaker_trust(PLACE, PREFIX)),
        )
        job = access.sagemaker_role_policy(
            PLACE,
            storage,
            job_name_prefix=PREFIX,
            repository_arn=None,
            vpc=access.Vpc(("subnet-1",), ("sg-1",)),
        )
        iam.put_role_policy(RoleName=ROLE.rpartition("/")[2], PolicyName="job", PolicyDocument=json.dumps(job))
        launcher = access.launcher_policy(
            PLACE,
            storage,
            job_name_prefix=PREFIX,
            role_arn=ROLE,
            repository_arn=None,
            instance_types=["ml.g5.*", "ml.c5.xlarge"],
            max_keep_alive_seconds=600,
        )
        for name in ("launcher", "stranger"):
            iam.create_user(UserName=name)
        arn = iam.create_policy(PolicyName="launcher", PolicyDocument=json.dumps(launcher))["Policy"]["Arn"]
        iam.attach_user_policy(UserName="launcher", PolicyArn=arn)
        yield Authority(iam)


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    named(
        ("start a job", CREATE, JOB, SMALL),
        (
            "start one of each allowed type",
            CREATE,
            JOB,
            {"sagemaker:InstanceTypes": ["ml.g5.48xlarge", "ml.c5.xlarge"]},
        ),
        ("start a job in a warm pool", CREATE, JOB, with_small(KeepAlivePeriod="600")),
        ("shorten a warm pool", UPDATE, JOB, {"sagemaker:KeepAlivePeriod": "0"}),
        ("look at a job", "sagemaker:DescribeTrainingJob", JOB, {}),
        ("stop a job", "sagemaker:StopTrainingJob", JOB, {}),
        ("delete a job", "sagemaker:DeleteTrainingJob", JOB, {}),
        ("tag a job", "sagemaker:AddTags", JOB, {}),
        ("read a job's tags", "sagemaker:ListTags", JOB, {}),
        ("list jobs", "sagemaker:ListTrainingJobs", "*", {}),
        ("pass the role", "iam:PassRole", ROLE, {"iam:PassedToService": "sagemaker.amazonaws.com"}),
        ("read a quota", "servicequotas:GetServiceQuota", QUOTA, {}),
        ("list quotas", "servicequotas:ListServiceQuotas", "*", {}),
        ("list default quotas", "servicequotas:ListAWSDefaultServiceQuotas", "*", {}),
        ("read a job's log", "logs:GetLogEvents", STREAM, {}),
        ("use the key for the bucket", "kms:Decrypt", KEY, {"kms:ViaService": "s3.us-east-1.amazonaws.com"}),
    ),
)
def test_the_launcher_may(authority: Authority, action: str, resource: str, context: Context) -> None:
    decision = authority.authorise(LAUNCHER, action, resource, context)
    assert decision, decision.reason
    assert not authority.authorise(STRANGER, action, resource, context)


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    named(
        ("start a job of another name", CREATE, OTHER_JOB, SMALL),
        ("start a job whose name begins alike", CREATE, ALIKE_JOB, SMALL),
        ("start a job elsewhere", CREATE, JOB.replace("us-east-1", "eu-west-1"), SMALL),
        ("start another type", CREATE, JOB, {"sagemaker:InstanceTypes": ["ml.p5.48xlarge"]}),
        ("start another type beside", CREATE, JOB, {"sagemaker:InstanceTypes": ["ml.g5.xlarge", "ml.p5.48xlarge"]}),
        ("start a larger one of a type", CREATE, JOB, {"sagemaker:InstanceTypes": ["ml.c5.2xlarge"]}),
        ("keep a pool for longer", CREATE, JOB, with_small(KeepAlivePeriod="601")),
        ("prolong a pool", UPDATE, JOB, {"sagemaker:KeepAlivePeriod": "3600"}),
        ("stop another's job", "sagemaker:StopTrainingJob", OTHER_JOB, {}),
        ("delete another's job", "sagemaker:DeleteTrainingJob", OTHER_JOB, {}),
        ("look at another's job", "sagemaker:DescribeTrainingJob", OTHER_JOB, {}),
        ("tag another's job", "sagemaker:AddTags", OTHER_JOB, {}),
        ("untag a job", "sagemaker:DeleteTags", JOB, {}),
        ("start a notebook", "sagemaker:CreateNotebookInstance", PLACE.arn("sagemaker", "notebook-instance/a"), {}),
        ("pass the role to EC2", "iam:PassRole", ROLE, {"iam:PassedToService": "ec2.amazonaws.com"}),
        ("pass the role to anything", "iam:PassRole", ROLE, {}),
        (
            "pass another role",
            "iam:PassRole",
            ROLE.replace("diloco-dev-job", "administrator"),
            {"iam:PassedToService": "sagemaker.amazonaws.com"},
        ),
        ("raise a quota", "servicequotas:RequestServiceQuotaIncrease", QUOTA, {}),
        ("read another's log", "logs:GetLogEvents", OTHER_STREAM, {}),
        ("forge a log", "logs:PutLogEvents", STREAM, {}),
        ("use the key for itself", "kms:Decrypt", KEY, {}),
        ("use the key for another service", "kms:Decrypt", KEY, {"kms:ViaService": "ebs.us-east-1.amazonaws.com"}),
        ("change the key's policy", "kms:PutKeyPolicy", KEY, {}),
    ),
)
def test_the_launcher_may_not(authority: Authority, action: str, resource: str, context: Context) -> None:
    assert authority.authorise(LAUNCHER, action, resource, context).kind == "implicitDeny"


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    named(
        ("make its log stream", "logs:CreateLogStream", STREAM, {}),
        ("write its log", "logs:PutLogEvents", STREAM, {}),
        # AWS names the group so: https://github.com/terraform-aws-modules/terraform-aws-ecs/pull/313
        ("make the log group", "logs:CreateLogGroup", STREAM.partition(":log-stream:")[0] + ":log-stream:", {}),
        ("write its metrics", "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": access.METRICS_NAMESPACE}),
        ("use the key for the bucket", "kms:GenerateDataKey", KEY, {"kms:ViaService": "s3.us-east-1.amazonaws.com"}),
        ("make an interface in its subnet", "ec2:CreateNetworkInterface", SUBNET, {}),
        ("make an interface", "ec2:CreateNetworkInterface", INTERFACE, {}),
        ("drop an interface of its subnet", "ec2:DeleteNetworkInterface", INTERFACE, {"ec2:Subnet": SUBNET}),
        ("look at subnets", "ec2:DescribeSubnets", "*", {}),
    ),
)
def test_a_job_may(authority: Authority, action: str, resource: str, context: Context) -> None:
    decision = authority.authorise(ROLE, action, resource, context)
    assert decision, decision.reason
    assert not authority.authorise(STRANGER, action, resource, context)


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    named(
        ("make another job's log stream", "logs:CreateLogStream", OTHER_STREAM, {}),
        ("write another job's log", "logs:PutLogEvents", OTHER_STREAM, {}),
        ("read its log back", "logs:GetLogEvents", STREAM, {}),
        ("write other metrics", "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "AWS/Billing"}),
        ("write metrics of no namespace", "cloudwatch:PutMetricData", "*", {}),
        ("start jobs", CREATE, JOB, SMALL),
        ("stop jobs", "sagemaker:StopTrainingJob", JOB, {}),
        ("pass its role on", "iam:PassRole", ROLE, {"iam:PassedToService": "sagemaker.amazonaws.com"}),
        ("make an interface in another subnet", "ec2:CreateNetworkInterface", OTHER_SUBNET, {}),
        ("drop another's interface", "ec2:DeleteNetworkInterface", INTERFACE, {"ec2:Subnet": OTHER_SUBNET}),
        ("start machines", "ec2:RunInstances", PLACE.arn("ec2", "instance/*"), {}),
        ("raise a quota", "servicequotas:RequestServiceQuotaIncrease", QUOTA, {}),
    ),
)
def test_a_job_may_not(authority: Authority, action: str, resource: str, context: Context) -> None:
    assert authority.authorise(ROLE, action, resource, context).kind == "implicitDeny"
