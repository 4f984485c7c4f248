"""Runs on real controllers: training processes in pods, an S3 between them, and what befalls them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli import main
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster

PACED: dict[str, Any] = {
    "trainer_module": "tests.kubernetes.trainer",
    "trainer_fn": "train",
    "sync_every": 4,
}
# Nobody is waited for long who is dead.
SKIP = {"policy": "skip", "min_replicas": 1, "dead_after": 5.0, "grace": 1.0, "join_timeout": 60.0}


def test_four_replicas_train_to_the_end_with_equal_digests(make_run: MakeRun) -> None:
    run = make_run(replicas=4).start()
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert [line.status for line in report.replicas] == ["succeeded"] * 4
    assert report.digests_equal
    # The Job stays, with its logs, and a launcher that comes again has nothing to do.
    assert [handle.status for handle in run.executor.existing()] == ["succeeded"] * 4


def test_a_killed_pod_restarts_and_catches_up_and_an_evicted_one_is_not_counted(
    make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    run = make_run(steps=120, trainer_kwargs={"step_seconds": 0.1}, retries=1, **PACED).start()
    run.reaches(2, 0, 1)
    cluster.kubelet.kill(namespace, run.pod(1).metadata.name)
    run.reaches(4, 0, 1, attempt=1)
    run.reaches(4, 1, attempt=2)
    # It has used up its one restart: only because an eviction is not counted does it come again.
    evicted = run.pod(1).metadata.name
    cluster.core.create_namespaced_pod_eviction(evicted, namespace, {"metadata": {"name": evicted}})
    run.reaches(6, 1, attempt=3)
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert report.digests_equal
    [_, state] = run.executor.states()
    assert (state.restarts, state.disruptions) == (1, 1)


def test_a_configuration_that_can_not_work_fails_its_index_at_once(make_run: MakeRun) -> None:
    run = make_run(trainer_kwargs={"refuse": 1}, steps=40, retries=3, **PACED).start()
    report = run.end()
    assert not report.succeeded
    assert report.error == "rank 1 ended with exit code 78: this rank has no data that it could train on"
    assert run.beats()[1].attempt == 1  # three restarts were allowed, and none was made


def test_scaling_up_and_down_within_one_run(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    run = make_run(steps=4000, exchange=SKIP, trainer_kwargs={"step_seconds": 0.05}, **PACED).start()
    run.reaches(2, 0, 1)
    assert run.executor.scale(4, policy="skip", min_replicas=1) == 2
    cluster.until(lambda: len(run.beats()) == 4, "ranks 2 and 3")
    joined = max(beat.round for beat in run.beats().values())
    run.reaches(joined + 2, 0, 1, 2, 3)  # the new ones have caught up
    assert run.executor.scale(2, policy="skip", min_replicas=1) == 4
    cluster.until(lambda: len(cluster.pods(namespace)) == 2, "end of ranks 2 and 3")
    left = run.beats()[0].round
    run.reaches(left + 2, 0, 1)  # and those that went are left out
    with pytest.raises(ConfigurationError, match="below the run's --min-replicas 2"):
        run.executor.scale(1, policy="skip", min_replicas=2)
    with pytest.raises(ConfigurationError, match="strict run needs exactly"):
        run.executor.scale(3, policy="strict", min_replicas=2)
    run.executor.cancel(run.executor.existing())
    assert cluster.pods(namespace) == []
    assert run.executor.job() is None
    assert not run.end().succeeded


def test_logs_of_all_ranks_are_merged_and_none_is_twice(make_run: MakeRun) -> None:
    run = make_run(steps=8, trainer_kwargs={"step_seconds": 0.1}, **PACED)
    handles = run.executor.launch_replicas(run.settings.replica_specs())
    followed = list(
        run.executor.log_reader().lines(
            follow=True,
            ended=lambda: all(handle.status == "succeeded" for handle in run.executor.poll(handles)),
            look_every=0.1,
        )
    )
    again = list(run.executor.log_reader().lines(follow=False, ended=lambda: True))
    assert {line.rank for line in again} <= {0, 1}
    assert sorted(followed, key=lambda line: (line.stamp, line.rank, line.text)) == sorted(
        again, key=lambda line: (line.stamp, line.rank, line.text)
    )
    assert again == sorted(again, key=lambda line: line.stamp)


def test_a_second_launcher_adopts_the_job_and_another_runs_job_is_left_alone(make_run: MakeRun) -> None:
    run = make_run(steps=4000, trainer_kwargs={"step_seconds": 0.1}, **PACED)
    specs = run.settings.replica_specs()
    run.executor.launch_replicas(specs)
    run.reaches(0, 0, 1)  # a process that has not set up its signals yet would have to be killed
    uid = run.executor.job()["metadata"]["uid"]  # type: ignore[index]
    run.executor.launch_replicas(specs)
    assert run.executor.job()["metadata"]["uid"] == uid  # type: ignore[index]
    assert run.notes == [f"job {run.pods.name} is there already, and goes on"]
    other = run.settings.model_copy(update={"rendezvous": "s3://elsewhere"})
    with pytest.raises(ConfigurationError, match="is another run's"):
        run.executor.launch_replicas(other.replica_specs())
    run.executor.cancel(run.executor.existing())


def test_status_says_which_ranks_wait_for_gpus_and_why(
    make_run: MakeRun, cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(gpus=1, steps=4000, trainer_kwargs={"step_seconds": 0.1}, **PACED)
    where = ["--backend", "kubernetes", "--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig)]

    def status(*words: str) -> str:
        capsys.readouterr()
        assert main(["status", run.settings.run_id, *where, *words]) == 0
        return capsys.readouterr().out

    def waiting() -> dict[int, str]:
        replicas = json.loads(status("--json"))["replicas"]
        return {each["rank"]: each["why"] for each in replicas if each["status"] == "pending" and each["why"]}

    try:
        run.executor.launch_replicas(run.settings.replica_specs())
        cluster.until(lambda: len(waiting()) == 2, "reasons of both ranks", patience=30)
        assert all("Insufficient nvidia.com/gpu" in why for why in waiting().values())
        cluster.kubelet.set_capacity(**{"nvidia.com_gpu": "1"})
        cluster.until(lambda: len(waiting()) == 1, "one rank that waits, and one that has the GPU")
        [(rank, why)] = waiting().items()
        assert "Insufficient nvidia.com/gpu" in why
        shown = " ".join(status().split())
        assert f"{rank} diloco-{run.settings.run_id}-{rank}-" in shown
        assert "Insufficient nvidia.com/gpu" in shown
        cluster.kubelet.set_capacity(**{"nvidia.com_gpu": "2"})
        run.reaches(0, 0, 1)
        assert waiting() == {}
    finally:
        run.executor.cancel(run.executor.existing())
        cluster.kubelet.set_capacity(**{"nvidia.com_gpu": "0"})
