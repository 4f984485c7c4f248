"""Who may do what: the restricted standard for pods, the printed Role for the launcher."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kubernetes.client import AuthorizationV1Api  # type: ignore[import-untyped]
from kubernetes.config import new_client_from_config  # type: ignore[import-untyped]

from diloco.cluster_access import LAUNCHER
from diloco.executors.kubernetes import KubernetesExecutor
from diloco.executors.kubernetes_clients import Clients, ask
from diloco.executors.kubernetes_manifest import job_manifest
from tests.kubernetes.runs import bind

if TYPE_CHECKING:
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster

ALLOWED = (
    ("create", "jobs.batch"),
    ("delete", "jobs.batch"),
    ("get", "jobs.batch"),
    ("list", "jobs.batch"),
    ("patch", "jobs.batch"),
    ("list", "pods"),
    ("get", "pods/log"),
    ("list", "events"),
    ("list", "workloads.kueue.x-k8s.io"),
)
OTHERS = {
    "job": (),
    "volcano": tuple((verb, "jobs.batch.volcano.sh") for verb in ("create", "delete", "list")),
    "rayjob": tuple((verb, "rayjobs.ray.io") for verb in ("create", "delete", "list")),
}
"""What a Role allows beside, by the `--workload` that it is printed for."""
DENIED = (
    *((verb, "jobs.batch.volcano.sh") for verb in ("get", "update", "patch", "deletecollection")),
    *((verb, "rayjobs.ray.io") for verb in ("get", "update", "patch", "deletecollection")),
    ("update", "rayjobs/status.ray.io"),
    ("create", "rayclusters.ray.io"),
    ("delete", "rayclusters.ray.io"),
    ("create", "rayservices.ray.io"),
    ("get", "services"),
    ("create", "services/proxy"),
    ("deletecollection", "jobs.batch"),
    ("update", "jobs.batch"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("create", "pods/eviction"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "secrets"),
    ("get", "configmaps"),
    ("create", "serviceaccounts/token"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("create", "deployments.apps"),
    ("create", "cronjobs.batch"),
    ("create", "events"),
    ("patch", "workloads.kueue.x-k8s.io"),
    ("list", "nodes"),
    ("list", "namespaces"),
    ("impersonate", "users"),
)


@pytest.fixture
def launcher(cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]) -> Clients:
    """Clients as the ServiceAccount of the documents that the command prints."""
    bind(cluster, namespace, capsys)
    return Clients(cluster.kubeconfig_of(namespace, LAUNCHER))


@pytest.mark.parametrize("workload", OTHERS)
def test_the_launchers_role_allows_what_it_does_and_nothing_else(
    workload: str, cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bind(cluster, namespace, capsys, "--workload", workload)
    reviews = AuthorizationV1Api(new_client_from_config(str(cluster.kubeconfig_of(namespace, LAUNCHER))))

    def may(verb: str, resource: str, where: str = namespace) -> bool:
        name, _, group = resource.partition(".")
        name, _, subresource = name.partition("/")
        asked = {"verb": verb, "resource": name, "subresource": subresource, "group": group, "namespace": where}
        answer = reviews.create_self_subject_access_review({"spec": {"resourceAttributes": asked}})
        return bool(answer.status.allowed)

    allowed = (*ALLOWED, *OTHERS[workload])
    elsewhere = [each for other in OTHERS if other != workload for each in OTHERS[other]]
    assert [each for each in allowed if not may(*each)] == []
    assert [each for each in (*DENIED, *elsewhere) if may(*each)] == []
    assert [each for each in allowed if may(*each, where="default")] == []


def test_the_launcher_launches_looks_reads_logs_and_cancels_as_that_account(
    launcher: Clients, make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    run = make_run(trainer_module="tests.kubernetes.trainer", trainer_fn="train", steps=4000)
    executor = KubernetesExecutor(run.pods, clients=launcher, look_every=0.2)
    handles = executor.launch_replicas(run.settings.replica_specs())
    cluster.until(lambda: all(handle.status == "running" for handle in executor.poll(handles)), "running replicas")
    run.reaches(1, 0, 1)
    assert list(executor.stream_logs(handles[0])) is not None
    executor.cancel(handles)
    assert cluster.pods(namespace) == []


def test_the_namespaces_standard_admits_the_runs_pods_and_no_job_that_violates_it(
    make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    run = make_run(steps=8)
    spec = run.settings.replica_specs()[0]
    for change in (
        {"hostNetwork": True},
        {"securityContext": {"runAsUser": 0}},
    ):
        manifest = job_manifest(run.pods, spec)
        manifest["spec"]["template"]["spec"] |= change
        ask(cluster.batch.create_namespaced_job, namespace, manifest)  # the Job itself is admitted
        cluster.until(lambda: all("forbidden" in str(handle.waits) for handle in run.executor.existing()), "refusal")
        waits = str(run.executor.existing()[0].waits)
        assert waits.startswith("its pods are refused: ")
        assert 'violates PodSecurity "restricted:latest"' in waits
        assert cluster.pods(namespace) == []
        run.executor.cancel(run.executor.existing())


def test_a_launcher_without_rights_is_told_what_to_bind(cluster: Cluster, namespace: str, make_run: MakeRun) -> None:
    run = make_run(steps=8)
    nobody = KubernetesExecutor(run.pods, clients=Clients(cluster.kubeconfig_of(namespace, "default")))
    with pytest.raises(Exception, match="bind the Role that `access --cloud kubernetes` prints"):
        nobody.launch_replicas(run.settings.replica_specs())


def test_manifests_pass_a_strict_dry_run(make_run: MakeRun, cluster: Cluster) -> None:
    full = make_run(
        gpus=2,
        queue="training",
        priority_class="system-node-critical",
        node_selector={"zone": "a"},
        tolerations=({"key": "spot", "operator": "Exists"},),
        token_secret="hub",  # noqa: S106 - a name
        max_runtime=3600,
        env={"A": "b"},
        labels={"team": "research"},
    )
    for run in (full, make_run()):
        manifest = json.dumps(job_manifest(run.pods, run.settings.replica_specs()[0]))
        done = cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=manifest)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
