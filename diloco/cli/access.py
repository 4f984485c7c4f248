"""`access`: the policy documents of who takes part in runs, for those who make roles by other means than `infra/`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from diloco.cli.app import app
from diloco.cli.options import OutputsOption, StackOption, WorkloadKind
from diloco.errors import ConfigurationError


class Cloud(StrEnum):
    """Where replicas run. The bucket is Amazon S3's, whichever it is; `kubernetes` is any cluster's own access."""

    aws = "aws"
    gcp = "gcp"
    azure = "azure"
    kubernetes = "kubernetes"


@app.command()
def access(
    cloud: Annotated[Cloud, typer.Option(help="Where the replicas run that are to get access.")],
    stack: StackOption = None,
    outputs: OutputsOption = None,
    bucket: Annotated[str | None, typer.Option(help="Without a stack: the bucket.")] = None,
    region: Annotated[str | None, typer.Option(help="Without a stack: its region.")] = None,
    account: Annotated[str | None, typer.Option(help="Without a stack: the AWS account.")] = None,
    prefix: Annotated[str, typer.Option(help="Without a stack: folder above rendezvous/ and output/.")] = "",
    job_name_prefix: Annotated[str, typer.Option(help="Without a stack: what jobs' names begin with.")] = "diloco",
    role_arn: Annotated[
        str | None, typer.Option(help="Without a stack: the jobs' role, of the launcher's policy.")
    ] = None,
    repository_arn: Annotated[str | None, typer.Option(help="Without a stack: the image's ECR repository.")] = None,
    kms_key_arn: Annotated[str | None, typer.Option(help="Without a stack: the key that encrypts the bucket.")] = None,
    partition: Annotated[str, typer.Option(help="Without a stack: aws, aws-cn or aws-us-gov.")] = "aws",
    data_uri: Annotated[
        list[str] | None, typer.Option(help="Training data, s3://bucket/prefix; may be repeated.")
    ] = None,
    secret_arn: Annotated[list[str] | None, typer.Option(help="A secret that jobs read; may be repeated.")] = None,
    subject: Annotated[
        str | None, typer.Option(help="gcp: a service account's unique id; azure: a managed identity's object id.")
    ] = None,
    audience: Annotated[str | None, typer.Option(help="gcp, azure: the audience that tokens are asked for.")] = None,
    tenant: Annotated[str | None, typer.Option(help="azure: the Entra ID tenant.")] = None,
    namespace: Annotated[str, typer.Option(help="kubernetes: of the runs.")] = "diloco",
    workload: Annotated[
        WorkloadKind, typer.Option(help="kubernetes: what else than Indexed Jobs the launcher makes.")
    ] = WorkloadKind.job,
    document: Annotated[
        str | None, typer.Option(help="Only this document, bare, for `aws iam --policy-document`.")
    ] = None,
) -> int:
    """Print least-privilege policy documents, one JSON object by name; kubernetes: a List for `kubectl apply -f -`."""
    if cloud is Cloud.kubernetes:
        from diloco.cluster_access import cluster_documents

        sys.stdout.write(json.dumps(cluster_documents(namespace, workload.value), indent=1) + "\n")
        return 0
    from diloco.grants import Grants, federated_documents, grants_of

    if stack is None and outputs is None:
        grants = Grants.checked(
            bucket=bucket,
            region=region,
            account=account,
            partition=partition,
            prefix=prefix,
            job_name_prefix=job_name_prefix,
            role_arn=role_arn,
            repository_arn=repository_arn,
            kms_key_arn=kms_key_arn,
        )
    else:
        if bucket or region or account or role_arn or repository_arn or kms_key_arn or prefix:
            raise ConfigurationError(
                "a stack's outputs say which bucket and roles: leave out the options without a stack"
            )
        from diloco.stack import read_outputs

        grants = grants_of(read_outputs(outputs, stack))
    grants = replace(grants, data_uris=tuple(data_uri or ()), secret_arns=tuple(secret_arn or ()))
    found: dict[str, Any] = (
        grants.documents()
        if cloud is Cloud.aws
        else federated_documents(grants, cloud.value, subject=subject, audience=audience, tenant=tenant)
    )
    if document is not None:
        if document not in found:
            raise ConfigurationError(f"--document {document}: there are {', '.join(sorted(found))}")
        found = found[document]
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0
