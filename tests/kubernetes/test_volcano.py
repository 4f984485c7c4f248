"""The same run in a Volcano Job: admitted by Volcano's own definition, and run to its end by real replicas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError
from diloco.executors.kubernetes_manifest import job_manifest
from diloco.executors.kubernetes_volcano import volcano_manifest
from diloco.kubernetes_run import restore
from tests.kubernetes.runs import EVERYTHING, assert_same
from tests.kubernetes.walk import walk_through
from tests.support.cluster import IMAGE
from tests.support.cluster.volcano import Volcano, volcano_definitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.embedded import EmbeddedS3
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster

PACED: dict[str, Any] = {
    "workload": "volcano",
    "trainer_module": "tests.kubernetes.trainer",
    "trainer_fn": "train",
    "sync_every": 4,
}
FULL: dict[str, Any] = {"workload": "volcano", **EVERYTHING}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> Iterator[None]:
    """The API server knows Volcano's Job."""
    with volcano_definitions(cluster):
        yield


@pytest.fixture
def controller(definitions: None, cluster: Cluster) -> Iterator[None]:
    """Volcano acts."""
    with Volcano(cluster):
        yield


# Before all that need the definitions, which stay until the last one.
def test_a_cluster_without_volcano_is_told_so(make_run: MakeRun) -> None:
    run = make_run(**PACED)
    with pytest.raises(ConfigurationError, match=r"has no jobs\.batch\.volcano\.sh: install Volcano"):
        run.executor.launch_replicas(run.settings.replica_specs())


@pytest.mark.usefixtures("definitions")
def test_manifests_pass_a_strict_dry_run(make_run: MakeRun, cluster: Cluster) -> None:
    strict = ["create", "--dry-run=server", "--validate=strict", "-f", "-"]
    for run in (make_run(**FULL), make_run(workload="volcano", retries=0)):
        manifest = volcano_manifest(run.pods, run.settings.replica_specs()[0])
        done = cluster.kubectl(*strict, stdin=json.dumps(manifest))
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        manifest["spec"]["minimumAvailable"] = 1
        refused = cluster.kubectl(*strict, stdin=json.dumps(manifest))
        assert 'unknown field "spec.minimumAvailable"' in refused.stderr


def test_the_pods_are_those_of_an_indexed_job(make_run: MakeRun) -> None:
    run = make_run(**FULL | {"max_runtime": None})
    spec = run.settings.replica_specs()[0]
    manifest = volcano_manifest(run.pods, spec)
    [task] = manifest["spec"]["tasks"]
    assert task["template"] == job_manifest(run.pods, spec)["spec"]["template"]
    assert (task["replicas"], task["minAvailable"], manifest["spec"]["minAvailable"]) == (2, 1, 1)
    assert manifest["spec"]["plugins"] == {"env": []}


def test_a_run_is_found_again_by_its_volcano_job_as_it_was_started(make_run: MakeRun) -> None:
    run = make_run(**FULL, retries=5, exchange={"policy": "skip", "min_replicas": 1})
    found = restore(volcano_manifest(run.pods, run.settings.replica_specs(launcher="nonce")[0]))
    assert_same(found, run)


@pytest.mark.usefixtures("controller")
def test_replicas_train_to_the_end_with_equal_digests(make_run: MakeRun) -> None:
    run = make_run(workload="volcano", steps=8).start()
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    results = run.executor.collect(run.executor.existing(), timeout=60)
    assert [(result.rank, result.status, result.exit_code) for result in results] == [
        (0, "succeeded", 0),
        (1, "succeeded", 0),
    ]


@pytest.mark.usefixtures("controller")
def test_a_killed_pod_restarts_alone_and_catches_up(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    run = make_run(steps=80, trainer_kwargs={"step_seconds": 0.1}, retries=1, **PACED).start()
    run.reaches(2, 0, 1)
    cluster.kubelet.kill(namespace, f"{run.pods.name}-replica-1")
    run.reaches(4, 1, attempt=2)
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    assert {rank: beat.attempt for rank, beat in run.beats().items()} == {0: 1, 1: 2}


@pytest.mark.parametrize("policy", ["strict", "skip"])
@pytest.mark.usefixtures("controller")
def test_a_configuration_that_can_not_work_fails_its_rank_at_once(
    policy: str, make_run: MakeRun, cluster: Cluster
) -> None:
    skip = {"min_replicas": 1, "dead_after": 5.0, "grace": 1.0, "join_timeout": 5.0}  # the dead are not waited for long
    exchange = {"policy": policy} | (skip if policy == "skip" else {})
    kwargs = {"refuse": 1, "step_seconds": 0.01}
    run = make_run(trainer_kwargs=kwargs, steps=8, retries=3, exchange=exchange, **PACED)
    run.executor.launch_replicas(run.settings.replica_specs())
    results = run.executor.collect(run.executor.existing(), timeout=90)
    # A strict run can't go on without it, and its others are stopped; under skip they train to their end.
    assert [result.status for result in results] == ["cancelled" if policy == "strict" else "succeeded", "failed"]
    assert (results[1].exit_code, results[1].error) == (78, "this rank has no data that it could train on")
    assert run.beats()[1].attempt == 1


@pytest.mark.usefixtures("definitions")
def test_a_queued_run_waits_and_says_so(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    run = make_run(steps=4000, queue="research", trainer_kwargs={"step_seconds": 0.1}, **PACED)
    handles = run.executor.launch_replicas(run.settings.replica_specs())
    assert [(each.status, each.waits) for each in handles] == [("pending", "queue research: waits for its turn")] * 2
    with Volcano(cluster):
        run.reaches(0, 0, 1)
        run.executor.cancel(handles)
    assert cluster.pods(namespace) == []
    assert run.executor.job() is None


@pytest.mark.usefixtures("controller")
def test_by_the_command_line_as_the_account_of_the_printed_role(
    make_run: MakeRun, cluster: Cluster, namespace: str, embedded_s3: EmbeddedS3, capsys: pytest.CaptureFixture[str]
) -> None:
    walk_through("volcano", IMAGE, make_run, cluster, namespace, embedded_s3, capsys)
