"""The command line on a cluster: what a user types, against a real API server and real replicas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli import main
from diloco.executors.kubernetes_manifest import job_manifest
from diloco.kubernetes_run import restore
from tests.kubernetes.runs import EVERYTHING, SKIP, assert_same, run_command

if TYPE_CHECKING:
    from diloco.embedded import EmbeddedS3
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster


def test_a_run_by_the_command_line_from_run_to_cancel(
    make_run: MakeRun,
    cluster: Cluster,
    namespace: str,
    embedded_s3: EmbeddedS3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_id = make_run().settings.run_id
    where = ["--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig)]

    def document(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, *where, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    start = run_command(run_id, embedded_s3.endpoint_url, replicas=2, steps=4000)
    started = document(*start, *SKIP, "--trainer-kwargs-json", '{"step_seconds": 0.05}', "--detach")
    assert started == {"run_id": run_id, "jobs": [f"diloco-{run_id}-0", f"diloco-{run_id}-1"]}

    on = ["--backend", "kubernetes"]
    cluster.until(
        lambda: {each["status"] for each in document("status", run_id, *on)["replicas"]} == {"running"}, "running pods"
    )
    assert [run["run_id"] for run in document("list", *on)] == [run_id]
    assert main(["scale", run_id, "--replicas", "3", *where]) == 0
    assert "2 replicas before, 3 now" in capsys.readouterr().out
    cluster.until(
        lambda: {each["status"] for each in document("status", run_id, *on)["replicas"]} == {"running"}, "third pod"
    )
    assert main(["status", run_id, *on, *where]) == 0
    assert f"diloco-{run_id}-2" in capsys.readouterr().out
    assert main(["logs", run_id, "--rank", "0", *on, *where]) == 0
    assert main(["scale", run_id, "--replicas", "0", *where]) == 1
    assert main(["cancel", run_id, *on, *where]) == 0
    assert cluster.pods(namespace) == []
    assert main(["status", run_id, *on, *where]) == 2
    assert "has no Job in namespace" in capsys.readouterr().err


def test_a_run_to_its_end_is_collected_and_resumed_without_doing_anything(
    make_run: MakeRun,
    cluster: Cluster,
    namespace: str,
    embedded_s3: EmbeddedS3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(steps=8, trainer_module="tests.kubernetes.trainer", trainer_fn="train")
    where = ["--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig)]
    start = run_command(run.settings.run_id, embedded_s3.endpoint_url, replicas=2, steps=8)
    code = main([*start, *where, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["status"]) == (0, "succeeded")
    for command in ("collect", "resume"):
        assert main([command, run.settings.run_id, "--backend", "kubernetes", *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "succeeded"


def test_a_run_is_found_again_by_its_job_as_it_was_started(make_run: MakeRun) -> None:
    run = make_run(
        **EVERYTHING,
        exchange={"policy": "skip", "min_replicas": 1},
        trainer_kwargs={"model": "tiny", "data": "stdlib"},
        output="s3://elsewhere/models",
    )
    assert_same(restore(job_manifest(run.pods, run.settings.replica_specs(launcher="nonce")[0])), run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", "i"], "--rendezvous s3://bucket/prefix is needed"),
        (["--rendezvous", "s3://b/p"], "--image registry/name@sha256:… is needed"),
        (["--rendezvous", "file:///tmp/x", "--image", "i"], "pods share no files: use s3://bucket/prefix"),
        (["--rendezvous", "s3://b/p", "--image", "i", "--memory", "much"], "--memory 'much': write a quantity"),
        (["--rendezvous", "s3://b/p", "--image", "i", "--node-selector", "a"], "--node-selector a: write it as"),
        (["--rendezvous", "s3://b/p", "--image", "i", "--context", "no"], "no cluster: "),
        (["--rendezvous", "s3://b/p", "--image", "i", "--baseline"], "--baseline goes with --local"),
        (["--local"], "say where the replicas run"),
    ],
)
def test_what_can_not_work_is_one_line(
    words: list[str], said: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "--backend", "kubernetes", "--replicas", "2", "--steps", "4", "--sync-every", "4"]
    assert main([*run, *words, "--kubeconfig", str(cluster.kubeconfig)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
