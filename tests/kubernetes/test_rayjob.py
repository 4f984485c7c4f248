"""The same run as RayJobs: admitted by KubeRay's own definitions, and run to its end by real replicas."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes.client import CustomObjectsApi  # type: ignore[import-untyped]

from diloco.cli import main
from diloco.errors import ConfigurationError
from diloco.executors.kubernetes_manifest import RAY_VARIABLES, RUN_LABEL, job_manifest
from diloco.executors.kubernetes_rayjob import as_one, rayjob_manifest
from diloco.kubernetes_run import restore
from tests.kubernetes.runs import EVERYTHING, assert_same
from tests.kubernetes.walk import walk_through
from tests.support.cluster.kuberay import CLUSTERS, GROUP, JOBS, VERSION, KubeRay, ray_definitions, ray_image
from tests.support.engine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.embedded import EmbeddedS3
    from tests.kubernetes.conftest import MakeRun
    from tests.kubernetes.runs import Run
    from tests.support.cluster import Cluster

IMAGE = "registry.test/diloco-ray@sha256:" + "1" * 64
RAY: dict[str, Any] = {"workload": "rayjob", "image_uri": IMAGE}
PACED: dict[str, Any] = {
    **RAY,
    "trainer_module": "tests.kubernetes.trainer",
    "trainer_fn": "train",
    "sync_every": 4,
}
FULL: dict[str, Any] = {**RAY, **EVERYTHING}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> Iterator[None]:
    """The API server knows KubeRay's resources, and the node an image with Ray."""
    cluster.kubelet.images[IMAGE] = ray_image(PYTHONPATH=str(ROOT))
    with ray_definitions(cluster):
        yield


@pytest.fixture
def controller(definitions: None, cluster: Cluster) -> Iterator[None]:
    """KubeRay acts."""
    with KubeRay(cluster):
        yield


def objects(cluster: Cluster, namespace: str) -> list[str]:
    """The names of all of KubeRay's objects and pods there."""
    api = CustomObjectsApi(cluster.api)
    found = [
        each["metadata"]["name"]
        for plural in (JOBS, CLUSTERS)
        for each in api.list_namespaced_custom_object(GROUP, VERSION, namespace, plural)["items"]
    ]
    return found + [pod.metadata.name for pod in cluster.pods(namespace)]


def kill_replica(run: Run, rank: int) -> None:
    """SIGKILL a rank's process, and leave its pod's process 1 alone."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            mine = words[1:3] == ["-m", "diloco.replica_entrypoint"] and run.settings.uri in words
            if mine and words[-3:-1] == ["--rank", str(rank)]:
                os.kill(int(folder.name), signal.SIGKILL)
                return
    raise AssertionError(f"no process of rank {rank}")


# Before all that need the definitions, which stay until the last one.
def test_a_cluster_without_kuberay_is_told_so(make_run: MakeRun) -> None:
    run = make_run(**PACED)
    with pytest.raises(ConfigurationError, match=r"has no rayjobs\.ray\.io: install KubeRay") as caught:
        run.executor.launch_replicas(run.settings.replica_specs())
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("definitions")
def test_manifests_pass_a_strict_dry_run(make_run: MakeRun, cluster: Cluster) -> None:
    strict = ["create", "--dry-run=server", "--validate=strict", "-f", "-"]
    for run in (make_run(**FULL), make_run(workload="rayjob", retries=0)):
        manifest = rayjob_manifest(run.pods, run.settings.replica_specs()[0])
        done = cluster.kubectl(*strict, stdin=json.dumps(manifest))
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        assert done.stdout.count("created (server dry run)") == 2
        manifest["items"][1]["spec"]["rayClusterSpec"]["headGroup"] = {}
        refused = cluster.kubectl(*strict, stdin=json.dumps(manifest["items"][1]))
        assert 'unknown field "spec.rayClusterSpec.headGroup"' in refused.stderr


def test_the_pods_are_those_of_an_indexed_job_but_that_ray_starts_them(make_run: MakeRun) -> None:
    run = make_run(**FULL)
    spec = run.settings.replica_specs()[0]
    theirs = job_manifest(run.pods, spec)["spec"]["template"]
    [arguments] = [container.pop("args") for container in theirs["spec"]["containers"]]
    for rank, job in enumerate(rayjob_manifest(run.pods, spec)["items"]):
        template = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
        assert template["metadata"]["labels"].pop("diloco/rank") == str(rank)
        [container] = template["spec"]["containers"]
        assert list(container.pop("lifecycle")) == ["preStop"]
        container["env"] = [each for each in container["env"] if each["name"] not in RAY_VARIABLES]
        theirs["spec"]["containers"][0]["env"].sort(key=lambda each: str(each["name"]))
        container["env"].sort(key=lambda each: str(each["name"]))
        assert template == theirs
        assert shlex.split(job["spec"]["entrypoint"])[-len(arguments) - 2 :] == [*arguments, "--rank", str(rank)]
        assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]


def test_names_and_arguments_that_kuberay_or_a_shell_can_not_take_are_refused(make_run: MakeRun) -> None:
    run = make_run(workload="rayjob", prefix="a" * 36, trainer_kwargs={"text": "a" * 140_000})
    with pytest.raises(ConfigurationError, match=r"must be at most 47 .*; .*--trainer-kwargs-json is longer"):
        run.executor.check(run.settings.replica_specs())


def test_a_run_is_found_again_by_its_rayjobs_as_it_was_started(make_run: MakeRun) -> None:
    run = make_run(**FULL, retries=5, exchange={"policy": "skip", "min_replicas": 1})
    made = rayjob_manifest(run.pods, run.settings.replica_specs(launcher="nonce")[0])
    found = restore(as_one(made["items"][::-1]))
    assert_same(found, run)


@pytest.mark.usefixtures("controller")
def test_replicas_train_to_the_end_with_equal_digests(
    make_run: MakeRun, cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(**RAY, steps=8).start()
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    results = run.executor.collect(run.executor.existing(), timeout=60)
    assert [(result.rank, result.status, result.exit_code) for result in results] == [
        (0, "succeeded", 0),
        (1, "succeeded", 0),
    ]
    where = ["--backend", "kubernetes", "--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig)]
    for command in ("collect", "resume"):
        assert main([command, run.settings.run_id, *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "succeeded"
    # Nothing is left but the RayJobs, which are read by `collect`, once the clusters have been kept for long enough.
    cluster.until(lambda: objects(cluster, namespace) == [f"{run.pods.name}-0", f"{run.pods.name}-1"], "clean-up")


@pytest.mark.usefixtures("controller")
def test_a_killed_replica_is_tried_again_in_a_new_cluster_and_catches_up(make_run: MakeRun, cluster: Cluster) -> None:
    run = make_run(steps=120, trainer_kwargs={"step_seconds": 0.1}, retries=1, **PACED).start()
    run.reaches(2, 0, 1)
    [first] = run.executor.workload.find(run.executor.clients, run.namespace, RUN_LABEL)
    kill_replica(run, 1)
    said = cluster.until(
        lambda: [state.why for state in run.executor.states() if state.rank == 1 and state.why], "reason of the retry"
    )
    assert said == ["restarts after: killed by SIGKILL"]
    run.reaches(4, 1, attempt=2)
    [second] = run.executor.workload.find(run.executor.clients, run.namespace, RUN_LABEL)
    clusters = [[job["status"]["rayClusterName"] for job in each["items"]] for each in (first, second)]
    assert [one == other for one, other in zip(*clusters, strict=True)] == [True, False]
    assert [state.restarts for state in run.executor.states()] == [0, 1]
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    assert {rank: beat.attempt for rank, beat in run.beats().items()} == {0: 1, 1: 2}


@pytest.mark.usefixtures("controller")
def test_a_head_that_was_evicted_left_its_round_and_is_made_anew_without_being_counted(
    make_run: MakeRun, cluster: Cluster
) -> None:
    run = make_run(steps=120, trainer_kwargs={"step_seconds": 0.1}, retries=0, **PACED).start()
    run.reaches(2, 0, 1)
    [pod] = cluster.pods(run.namespace, "diloco/rank=1")
    evicted = {"metadata": {"name": pod.metadata.name, "namespace": run.namespace}}
    cluster.core.create_namespaced_pod_eviction(pod.metadata.name, run.namespace, evicted)
    # One that was killed would have told nobody.
    cluster.until(lambda: (run.beats()[1].attempt, run.beats()[1].phase) == (1, "failed"), "word of rank 1", 10.0)
    run.reaches(4, 1, attempt=2)
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal


@pytest.mark.usefixtures("controller")
def test_a_configuration_that_can_not_work_fails_its_rank_with_its_own_words(make_run: MakeRun) -> None:
    exchange = {"policy": "skip", "min_replicas": 1, "dead_after": 5.0, "grace": 1.0, "join_timeout": 5.0}
    kwargs = {"refuse": 1, "step_seconds": 0.01}
    run = make_run(trainer_kwargs=kwargs, steps=8, retries=1, exchange=exchange, **PACED)
    run.executor.launch_replicas(run.settings.replica_specs())
    results = run.executor.collect(run.executor.existing(), timeout=120)
    assert [result.status for result in results] == ["succeeded", "failed"]
    assert (results[1].exit_code, results[1].error) == (78, "this rank has no data that it could train on")
    # KubeRay knows no exit code after which another try is pointless.
    assert results[1].metrics["cluster_restarts"] == 1
    assert run.beats()[1].attempt == 2


@pytest.mark.usefixtures("controller")
def test_a_second_launch_adopts_the_run_and_makes_what_the_first_left_out(
    make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    run = make_run(steps=4000, trainer_kwargs={"step_seconds": 0.1}, **PACED)
    specs = run.settings.replica_specs()
    broken_off = rayjob_manifest(run.pods, specs[0])
    broken_off["items"].pop()
    run.executor.workload.create(run.executor.clients, namespace, broken_off)
    assert [(state.status, state.why) for state in _states(run)][1] == ("cancelled", "its RayJob was deleted")
    run.executor.launch_replicas(specs)
    run.reaches(0, 0, 1)
    handles = run.executor.launch_replicas(specs)
    assert run.notes == [f"job {run.pods.name} is there already, and goes on"] * 2
    assert {rank: beat.attempt for rank, beat in run.beats().items()} == {0: 1, 1: 1}
    run.executor.cancel(handles)
    assert objects(cluster, namespace) == []


@pytest.mark.usefixtures("controller")
def test_a_run_of_which_one_part_can_not_be_made_leaves_nothing(
    make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    run = make_run(steps=4000, replicas=3, **PACED)
    other = make_run(**RAY)
    theirs = rayjob_manifest(other.pods, other.settings.replica_specs()[0])["items"][0]
    theirs["metadata"]["name"] = f"{run.pods.name}-2"
    theirs["spec"]["suspend"] = True
    CustomObjectsApi(cluster.api).create_namespaced_custom_object(GROUP, VERSION, namespace, JOBS, theirs)
    with pytest.raises(Exception, match=r"^rank 2: .*already exists: what had been made of the run is deleted again$"):
        run.executor.launch_replicas(run.settings.replica_specs())
    assert objects(cluster, namespace) == [f"{run.pods.name}-2"]


@pytest.mark.usefixtures("controller")
def test_pods_that_the_namespace_refuses_are_said_and_wait(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    run = make_run(steps=8, **PACED)
    manifest = rayjob_manifest(run.pods, run.settings.replica_specs()[0])
    for job in manifest["items"]:
        job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"] = {"runAsUser": 0}
    run.executor.workload.create(run.executor.clients, namespace, manifest)
    cluster.until(lambda: all("forbidden" in str(handle.waits) for handle in run.executor.existing()), "refusal")
    waits = str(run.executor.existing()[0].waits)
    assert waits.startswith("KubeRay: Failed to create head Pod")
    assert 'violates PodSecurity "restricted:latest"' in waits
    assert cluster.pods(namespace) == []
    run.executor.cancel(run.executor.existing())
    assert objects(cluster, namespace) == []


@pytest.mark.usefixtures("controller")
def test_a_run_that_is_too_long_is_ended_by_its_deadline(make_run: MakeRun) -> None:
    run = make_run(steps=4000, trainer_kwargs={"step_seconds": 0.1}, max_runtime=8, retries=3, **PACED)
    run.executor.launch_replicas(run.settings.replica_specs())
    results = run.executor.collect(run.executor.existing(), timeout=60)
    assert [result.status for result in results] == ["failed"] * 2
    assert "passed the activeDeadlineSeconds" in str(results[0].error)


@pytest.mark.usefixtures("definitions")
def test_a_suspended_run_waits_for_its_queue_and_says_so(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    run = make_run(steps=4000, queue="research", trainer_kwargs={"step_seconds": 0.1}, **PACED)
    handles = run.executor.launch_replicas(run.settings.replica_specs())
    assert [(each.status, each.waits) for each in handles] == [("pending", "queue research: waits for its turn")] * 2
    with KubeRay(cluster):
        cluster.until(lambda: _phases(cluster, namespace) == ["Suspended"] * 2, "suspension")
        assert cluster.pods(namespace) == []
        for job in run.executor.job()["items"]:  # type: ignore[index]
            name = job["metadata"]["name"]
            CustomObjectsApi(cluster.api).patch_namespaced_custom_object(
                GROUP, VERSION, namespace, JOBS, name, {"spec": {"suspend": False}}
            )
        run.reaches(0, 0, 1)
        run.executor.cancel(handles)
        assert objects(cluster, namespace) == []


@pytest.mark.usefixtures("controller")
def test_by_the_command_line_as_the_account_of_the_printed_role(
    make_run: MakeRun, cluster: Cluster, namespace: str, embedded_s3: EmbeddedS3, capsys: pytest.CaptureFixture[str]
) -> None:
    walk_through("rayjob", IMAGE, make_run, cluster, namespace, embedded_s3, capsys)
    assert objects(cluster, namespace) == []


def _states(run: Run) -> list[Any]:
    run.executor.existing()
    return run.executor.states()


def _phases(cluster: Cluster, namespace: str) -> list[str]:
    found = CustomObjectsApi(cluster.api).list_namespaced_custom_object(GROUP, VERSION, namespace, JOBS)["items"]
    return [job.get("status", {}).get("jobDeploymentStatus", "") for job in found]
