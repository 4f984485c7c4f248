"""A pod's role reaches the bucket and nothing else, and its credentials are renewed while the run lasts."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from kubernetes.client import AuthenticationV1Api  # type: ignore[import-untyped]

from diloco.access import Place, Storage, pod_trust, replica_policy, service_trust, web_identity_trust
from diloco.embedded import environment as surroundings
from tests.kubernetes.runs import Run
from tests.support.cluster.control_plane import ISSUER
from tests.support.cluster.identity import ACCOUNT, ROLE_ANNOTATION, PodIdentityAgent
from tests.support.sagemaker.ministack import ministack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.sagemaker.emulator import Emulator

CLUSTER, BUCKET, SERVICE_ACCOUNT = "platform", "runs", "replica"
PLACE = Place("us-east-1", ACCOUNT)
LIFE = 8
"""Seconds that credentials live: MiniStack refuses them after."""


@contextmanager
def identity(aws: Emulator, cluster: Cluster) -> Iterator[PodIdentityAgent]:
    """The node's agent, and EKS's webhook."""
    with PodIdentityAgent(aws, CLUSTER, seconds=LIFE) as agent:
        agent.core, agent.authentication = cluster.core, AuthenticationV1Api(cluster.api)
        cluster.kubelet.identity = agent
        try:
            yield agent
        finally:
            cluster.kubelet.identity = None


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Emulator]:
    """A MiniStack that enforces IAM and the expiry of sessions."""
    with ministack(tmp_path, auth=True) as emulator:
        emulator.client("s3").create_bucket(Bucket=BUCKET)
        trust = json.dumps(service_trust("eks.amazonaws.com"))
        made = emulator.client("iam").create_role(RoleName="cluster", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
        emulator.client("eks").create_cluster(name=CLUSTER, roleArn=made, resourcesVpcConfig={})
        yield emulator


def role(aws: Emulator, trust: Any) -> str:
    """A role with the replicas' policy."""
    iam = aws.client("iam")
    made = iam.create_role(RoleName="pods", AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]
    policy = replica_policy(PLACE, Storage(bucket=BUCKET, prefixes=("rendezvous",)))
    iam.put_role_policy(RoleName="pods", PolicyName="runs", PolicyDocument=json.dumps(policy))
    return str(made)


def associate(aws: Emulator, cluster: Cluster, namespace: str) -> None:
    """Pod Identity: EKS knows the ServiceAccount's role."""
    arn = role(aws, pod_trust(PLACE, CLUSTER, namespace, SERVICE_ACCOUNT))
    aws.client("eks").create_pod_identity_association(
        clusterName=CLUSTER, namespace=namespace, serviceAccount=SERVICE_ACCOUNT, roleArn=arn
    )
    cluster.core.create_namespaced_service_account(namespace, {"metadata": {"name": SERVICE_ACCOUNT}})


def annotate(aws: Emulator, cluster: Cluster, namespace: str) -> None:
    """IRSA: the ServiceAccount names its role, which trusts the cluster's tokens."""
    issuer = ISSUER.removeprefix("https://")
    aws.client("iam").create_open_id_connect_provider(Url=ISSUER, ClientIDList=["sts.amazonaws.com"])
    claims = {"aud": "sts.amazonaws.com", "sub": f"system:serviceaccount:{namespace}:{SERVICE_ACCOUNT}"}
    arn = role(aws, web_identity_trust(f"arn:aws:iam::{ACCOUNT}:oidc-provider/{issuer}", claims))
    account = {"metadata": {"name": SERVICE_ACCOUNT, "annotations": {ROLE_ANNOTATION: arn}}}
    cluster.core.create_namespaced_service_account(namespace, account)


@pytest.mark.parametrize("give", [associate, annotate], ids=["pod-identity", "irsa"])
def test_short_lived_credentials_are_renewed_during_a_run(
    give: Callable[[Emulator, Cluster, str], None], aws: Emulator, cluster: Cluster, namespace: str
) -> None:
    give(aws, cluster, namespace)
    with identity(aws, cluster) as agent:
        run = pod_run(aws, cluster, namespace)
        with surroundings(launcher(aws)):
            report = run.start().end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    assert [line.restarts for line in report.replicas] == [0, 0]
    assert report.wall_seconds > 2 * LIFE
    assert agent.issued > 2
    # What a pod got at first is of no use any more.
    first = agent.first
    assert first is not None
    given = {"AccessKeyId": first["AccessKeyId"], "SecretAccessKey": first["SecretAccessKey"]}
    with pytest.raises(ClientError, match=r"expired|ExpiredToken|InvalidAccessKeyId|403"):
        aws.client("s3", given | {"SessionToken": first["Token"]}).list_objects_v2(Bucket=BUCKET, Prefix="rendezvous/")


def test_a_service_account_without_an_association_reaches_nothing(
    aws: Emulator, cluster: Cluster, namespace: str
) -> None:
    role(aws, pod_trust(PLACE, CLUSTER, namespace, SERVICE_ACCOUNT))
    cluster.core.create_namespaced_service_account(namespace, {"metadata": {"name": SERVICE_ACCOUNT}})
    run = pod_run(aws, cluster, namespace, retries=0, steps=4)
    with surroundings(launcher(aws)):
        report = run.start().end()
    assert not report.succeeded
    assert "credentials" in str(report.error)


def pod_run(aws: Emulator, cluster: Cluster, namespace: str, **changes: Any) -> Run:
    """A run whose pods have no credentials but their role's."""
    settings: dict[str, Any] = {
        "rendezvous": f"s3://{BUCKET}/rendezvous",
        "service_account": SERVICE_ACCOUNT,
        "credentials_secret": None,
        "trainer_module": "tests.kubernetes.trainer",
        "trainer_fn": "train",
        "trainer_kwargs": {"step_seconds": 0.5},
        "steps": 40,
        "sync_every": 4,
    }
    return Run(cluster, namespace, aws.endpoint_url, "short-lived", **(settings | changes))


def launcher(aws: Emulator) -> dict[str, str | None]:
    """The launcher is the account's root."""
    return {
        "AWS_ENDPOINT_URL": aws.endpoint_url,
        "AWS_ACCESS_KEY_ID": aws.access_key,
        "AWS_SECRET_ACCESS_KEY": aws.secret_key,
        "AWS_DEFAULT_REGION": aws.region,
    }
