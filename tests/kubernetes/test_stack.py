"""`pulumi up` with a cluster: the real engine and the real kubernetes provider on a real API server, AWS emulated."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes.client import ApiException, AppsV1Api, AuthenticationV1Api  # type: ignore[import-untyped]

from diloco.cli import main
from diloco.embedded import environment as surroundings
from diloco.executors.kubernetes import KubernetesExecutor
from diloco.executors.kubernetes_clients import Clients
from diloco.executors.kubernetes_manifest import PodSettings
from diloco.kubernetes_run import report_of, restore
from tests.infra.conftest import ACCOUNT, REGION, environment, full_config
from tests.support.cluster import IMAGE, replica_image
from tests.support.cluster.identity import PodIdentityAgent
from tests.support.engine import ROOT, require
from tests.support.gate import Gate
from tests.support.pulumi_stack import PulumiStack
from tests.support.sagemaker.ministack import ministack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.sagemaker.emulator import Emulator

CLUSTER = "platform"
GPU_NODES = {
    "instanceTypes": ["g5.2xlarge"],
    "amiType": "AL2023_x86_64_NVIDIA",
    "devicePlugin": "registry.test/nvidia/k8s-device-plugin:v0.17.4",
}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """One MiniStack for the tests of this file, with a cluster that nobody's stack made."""
    with ministack(tmp_path_factory.mktemp("ministack"), region=REGION) as emulator:
        emulator.client("eks").create_cluster(
            name=CLUSTER, roleArn=f"arn:aws:iam::{ACCOUNT}:role/any", resourcesVpcConfig={}
        )
        yield emulator


@pytest.fixture
def identity(aws: Emulator, cluster: Cluster) -> Iterator[PodIdentityAgent]:
    """Pod Identity on the node: pods become the roles that the emulator's EKS associates them with."""
    with PodIdentityAgent(aws, CLUSTER) as agent:
        agent.core, agent.authentication = cluster.core, AuthenticationV1Api(cluster.api)
        cluster.kubelet.identity = agent
        yield agent
        cluster.kubelet.identity = None


def image(aws: Emulator, tag: str) -> str:
    """Another image in the shared repository, by digest."""
    ecr = aws.client("ecr")
    if tag == "v1":
        ecr.create_repository(repositoryName="shared/trainer")
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": f"sha256:{tag[1] * 64}", "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": []}
    pushed = ecr.put_image(
        repositoryName="shared/trainer", imageTag=tag, imageManifest=json.dumps(manifest | {"config": config})
    )
    return f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/shared/trainer@{pushed['image']['imageId']['imageDigest']}"


def test_the_stack_runs_a_job_to_the_end_and_replaces_it_cleanly(
    aws: Emulator,
    cluster: Cluster,
    identity: PodIdentityAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require("pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python", "pulumi-resource-kubernetes")
    space = "stack-runs"
    first, second = image(aws, "v1"), image(aws, "v2")
    for uri in (first, second):
        cluster.kubelet.images[uri] = replica_image(PYTHONPATH=str(ROOT))
    job: dict[str, Any] = {
        "runId": "from-the-stack",
        "replicas": 4,
        "steps": 8,
        "syncEvery": 4,
        "trainerModule": "tests.kubernetes.trainer",
        "trainerFn": "train",
        "cpu": "100m",
        "memory": "256Mi",
    }
    config: dict[str, Any] = {
        "eks": {
            "adopt": CLUSTER,
            "namespace": space,
            "kubeconfig": str(cluster.kubeconfig),
            "endpointUrl": aws.endpoint_url,
        },
        "job": job,
    }
    with (
        Gate(aws.endpoint_url) as gate,
        PulumiStack(
            tmp_path, name="dev", environment=environment(aws, gate), config=full_config(first, config)
        ) as stack,
    ):
        up = stack.up().check()
        assert "Job diloco-dev" in up.of("create")
        outputs = stack.outputs()
        assert (outputs["clusterName"], outputs["namespace"], outputs["serviceAccount"]) == (
            CLUSTER,
            space,
            "diloco-replica",
        )
        surrounded: dict[str, str | None] = {
            "AWS_ENDPOINT_URL": aws.endpoint_url,
            "AWS_ACCESS_KEY_ID": aws.access_key,
            "AWS_SECRET_ACCESS_KEY": aws.secret_key,
        }
        cluster.until(
            lambda: [job.status.succeeded for job in cluster.batch.list_namespaced_job(space).items] == [4],
            "end of the Job",
            patience=500,
        )
        # The launcher's commands find the stack's Job as any other.
        clients = Clients(cluster.kubeconfig)
        job_of_run = KubernetesExecutor(PodSettings("from-the-stack", space, ""), clients=clients).job()
        assert job_of_run is not None
        restored = restore(job_of_run)
        assert restored.settings.uri == f"{outputs['rendezvousUri']}/from-the-stack"
        executor = KubernetesExecutor(restored.pods, clients=clients)
        results = executor.collect(executor.existing(), timeout=60)
        with surroundings(surrounded):
            report = asyncio.run(report_of(restored, results, wall_seconds=0))
        assert report.succeeded
        assert [line.status for line in report.replicas] == ["succeeded"] * 4
        assert len({line.digest for line in report.replicas}) == 1
        assert identity.served >= 4  # by the association that the stack made, as the role that it made

        # So does a launcher start a run of its own with what the stack says. The emulator's EKS and S3 are not where
        # Amazon's would be: those two addresses are told.
        monkeypatch.chdir(stack.project)
        served = identity.served
        capsys.readouterr()
        with surroundings({**stack.environment, **surrounded}):
            code = main(
                [
                    *("run", "--backend", "kubernetes", "--stack", "dev", "--replicas", "2", "--steps", "8"),
                    *("--sync-every", "4", "--trainer-module", "tests.kubernetes.trainer", "--trainer-fn", "train"),
                    *("--cpu", "100m", "--memory", "256Mi", "--json"),
                    *("--kubeconfig", str(cluster.kubeconfig), "--endpoint-url", aws.endpoint_url),
                ]
            )
        launched = json.loads(capsys.readouterr().out)
        assert (code, launched["status"]) == (0, "succeeded")
        assert launched["rendezvous_uri"] == f"{outputs['rendezvousUri']}/{launched['run_id']}"
        pods = cluster.pods(space, f"diloco/run-id={launched['run_id']}")
        assert {pod.spec.containers[0].image for pod in pods} == {outputs["imageUri"]}
        assert {pod.spec.service_account_name for pod in pods} == {outputs["serviceAccount"]}
        assert identity.served >= served + 2
        clients.batch.delete_namespaced_job(pods[0].metadata.labels["job-name"], space, propagation_policy="Foreground")

        stack.preview("--expect-no-changes").check()
        assert stack.up().check().changes == {}

        # Another run id starts another run, and a new image goes on with it, though its pods still ran.
        config["job"] = job | {"runId": "second", "steps": 40000, "trainerKwargs": {"step_seconds": 0.05}}
        stack.configure(full_config(first, config))
        assert stack.up().check().changes == {"replace": 1}
        _runs(cluster, space, first)
        stack.configure(full_config(second, config))
        assert stack.up().check().changes == {"replace": 1}
        _runs(cluster, space, second)
        stack.preview("--expect-no-changes").check()

        del config["job"]
        stack.configure(full_config(second, config))
        assert stack.up().check().changes == {"delete": 2}
        cluster.until(lambda: not cluster.pods(space), "end of the pods")
        _empty(aws, outputs["bucket"])
        stack.destroy().check()
    cluster.until(lambda: _is_gone(cluster, space), "end of the namespace")
    associations = aws.client("eks").list_pod_identity_associations(clusterName=CLUSTER)["associations"]
    assert associations == []
    assert not [name for name in _roles(aws) if name.startswith("diloco-dev") and "standin" not in name]


def _runs(cluster: Cluster, space: str, image: str) -> None:
    """Return once all four replicas run in that image."""

    def look() -> bool:
        pods = [pod for pod in cluster.pods(space) if pod.status.phase == "Running"]
        return len(pods) == 4 and all(pod.spec.containers[0].image == image for pod in pods)

    cluster.until(look, "four pods of the image")


def _empty(aws: Emulator, bucket: str) -> None:
    s3 = aws.client("s3")
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", ()):
            s3.delete_object(Bucket=bucket, Key=entry["Key"])


def _is_gone(cluster: Cluster, space: str) -> bool:
    try:
        cluster.core.read_namespace(space)
    except ApiException as problem:
        return bool(problem.status == 404)
    return False


def _roles(aws: Emulator) -> list[str]:
    return [role["RoleName"] for role in aws.client("iam").list_roles()["Roles"]]


@pytest.mark.parametrize("mode", ["auto", "nodes"])
def test_a_cluster_is_created_stays_as_it_is_and_leaves_nothing(
    mode: str, aws: Emulator, cluster: Cluster, tmp_path: Path
) -> None:
    require("pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python", "pulumi-resource-kubernetes")
    space = f"created-{mode}"
    admin = f"arn:aws:iam::{ACCOUNT}:role/platform-{mode}"
    aws.client("iam").create_role(RoleName=f"platform-{mode}", AssumeRolePolicyDocument="{}")
    config: dict[str, Any] = {
        "network": {"egress": "nat"},
        "eks": {
            "mode": mode,
            "admins": [admin],
            "publicAccessCidrs": ["203.0.113.0/24"],
            **({"nodes": GPU_NODES} if mode == "nodes" else {}),
            "namespace": space,
            "kubeconfig": str(cluster.kubeconfig),
        },
    }
    before = set(_roles(aws))
    with (
        Gate(aws.endpoint_url) as gate,
        PulumiStack(
            tmp_path, name="local", environment=environment(aws, gate), config=full_config(IMAGE, config)
        ) as stack,
    ):
        # The policies see what a preview can't know.
        stack.up("--policy-pack", str(ROOT / "infra" / "policies")).check()
        name = stack.outputs()["clusterName"]
        eks = aws.client("eks")
        made = eks.describe_cluster(name=name)["cluster"]
        assert made["accessConfig"]["authenticationMode"] == "API"
        assert made["accessConfig"]["bootstrapClusterCreatorAdminPermissions"] is False
        assert made["encryptionConfig"][0]["resources"] == ["secrets"]
        assert made["resourcesVpcConfig"]["publicAccessCidrs"] == ["203.0.113.0/24"]
        [logging] = made["logging"]["clusterLogging"]
        assert "audit" in logging["types"]
        policies = eks.list_associated_access_policies(clusterName=name, principalArn=admin)
        assert [each["policyArn"].rpartition("/")[2] for each in policies["associatedAccessPolicies"]] == [
            "AmazonEKSClusterAdminPolicy"
        ]
        # Auto Mode has add-ons and nodes of its own, and takes no others beside them.
        addons = eks.list_addons(clusterName=name)["addons"]
        groups = eks.list_nodegroups(clusterName=name)["nodegroups"]
        assert (sorted(addons), len(groups)) == (
            ([], 0) if mode == "auto" else (["coredns", "eks-pod-identity-agent", "kube-proxy", "vpc-cni"], 1)
        )
        plugins = AppsV1Api(cluster.api).list_namespaced_daemon_set("kube-system").items
        images = [each.spec.template.spec.containers[0].image for each in plugins]
        assert images == ([] if mode == "auto" else [GPU_NODES["devicePlugin"]])
        [association] = eks.list_pod_identity_associations(clusterName=name)["associations"]
        assert (association["namespace"], association["serviceAccount"]) == (space, "diloco-replica")

        stack.preview("--expect-no-changes").check()
        assert stack.up().check().changes == {}
        stack.destroy().check()
    assert name not in eks.list_clusters()["clusters"]
    assert set(_roles(aws)) == before
    cluster.until(lambda: _is_gone(cluster, space), "end of the namespace")
