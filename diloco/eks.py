"""Talking to an EKS cluster without the aws CLI: a kubeconfig, and tokens presigned by boto3.

`python -m diloco.eks --cluster NAME --region REGION` is the kubeconfig's credential plugin; so no token is written
anywhere. https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError
from diloco.executors.local import ERROR_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

API_VERSION = "client.authentication.k8s.io/v1"
TOKEN_PREFIX = "k8s-aws-v1."  # noqa: S105 - how EKS's tokens begin
TOKEN_SECONDS = 60
"""Validity of the presigned request; EKS itself takes the token for 15 minutes."""
_RENEW_AFTER = timedelta(minutes=14)


def kubeconfig(cluster: str, region: str) -> dict[str, Any]:
    """A kubeconfig for a cluster, asked of EKS. Raises ConfigurationError if it is not there or can't be read."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = boto3.session.Session(region_name=region).client("eks").describe_cluster(name=cluster)["cluster"]
    except (BotoCoreError, ClientError) as problem:
        raise ConfigurationError(
            f"the EKS cluster {cluster} in {region} can't be read: {problem}: check the credentials, or name a file by"
            " --kubeconfig"
        ) from None
    return kubeconfig_document(
        cluster, region, found["endpoint"], found["certificateAuthority"]["data"], python=sys.executable
    )


def kubeconfig_document(cluster: str, region: str, server: str, authority: str, *, python: str) -> dict[str, Any]:
    """A kubeconfig whose credentials this module makes; `authority` is base64."""
    plugin = {
        "apiVersion": API_VERSION,
        "command": python,
        "args": ["-m", "diloco.eks", "--cluster", cluster, "--region", region],
        "interactiveMode": "Never",
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": cluster,
        "clusters": [{"name": cluster, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": cluster, "user": {"exec": plugin}}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
    }


def token(cluster: str, region: str) -> str:
    """A bearer token: a presigned GetCallerIdentity bound to the cluster's name
    (https://docs.aws.amazon.com/eks/latest/userguide/cluster-auth.html). Raises ConfigurationError without credentials.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.signers import RequestSigner

    try:
        session = boto3.session.Session(region_name=region)
        sts = session.client("sts")
        credentials = session.get_credentials()
        if credentials is None:
            raise ConfigurationError("no AWS credentials: log in, or set AWS_PROFILE")
        signer = RequestSigner(sts.meta.service_model.service_id, region, "sts", "v4", credentials, session.events)
        url = signer.generate_presigned_url(
            {
                "method": "GET",
                "url": f"{sts.meta.endpoint_url}/?Action=GetCallerIdentity&Version=2011-06-15",
                "body": {},
                "headers": {"x-k8s-aws-id": cluster},
                "context": {},
            },
            region_name=region,
            expires_in=TOKEN_SECONDS,
            operation_name="",
        )
    except (BotoCoreError, ClientError) as problem:  # of a role that a profile assumes, too
        raise ConfigurationError(f"no AWS credentials: {problem}") from None
    return TOKEN_PREFIX + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def main(argv: Sequence[str] | None = None) -> int:
    """Print an ExecCredential; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco.eks", description="A token for an EKS cluster.")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--region", required=True)
    options = parser.parse_args(argv)
    try:
        status = {
            "token": token(options.cluster, options.region),
            "expirationTimestamp": f"{datetime.now(UTC) + _RENEW_AFTER:%Y-%m-%dT%H:%M:%SZ}",
        }
    except DilocoError as problem:
        sys.stderr.write(f"{ERROR_PREFIX}{problem}\n")
        return problem.exit_code
    sys.stdout.write(json.dumps({"apiVersion": API_VERSION, "kind": "ExecCredential", "status": status}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
