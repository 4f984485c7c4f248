"""The stand-in for the aws provider: every resource type and function that it has."""

from __future__ import annotations

from importlib.metadata import version

from tests.support.providers import aws_ec2, aws_eks, aws_iam, aws_kms_ecr, aws_s3, aws_vpc
from tests.support.providers.aws_functions import FUNCTIONS
from tests.support.providers.provider import StandInProvider, serve
from tests.support.providers.session import AwsSession

RESOURCES = {
    cls.urn_type: cls
    for module in (aws_s3, aws_kms_ecr, aws_iam, aws_ec2, aws_vpc, aws_eks)
    for cls in module.RESOURCES
}


def main() -> None:
    """Serve under the version of the installed pulumi_aws."""
    serve(version("pulumi-aws"), StandInProvider("aws", RESOURCES, FUNCTIONS, AwsSession))
