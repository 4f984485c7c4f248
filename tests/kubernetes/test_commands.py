"""The command line on a cluster: what a user types, against a real API server and real replicas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli import main
from diloco.embedded import BUCKET
from diloco.executors.kubernetes_manifest import job_manifest
from diloco.kubernetes_run import restore
from tests.kubernetes.runs import SECRET
from tests.support.cluster import IMAGE

if TYPE_CHECKING:
    from diloco.embedded import EmbeddedS3
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster

TRAINER = ["--trainer-module", "tests.kubernetes.trainer", "--trainer-fn", "train"]


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

    def start(replicas: int, steps: int, *more: str) -> list[str]:
        return [
            *("run", "--backend", "kubernetes", "--replicas", str(replicas), "--steps", str(steps)),
            *("--sync-every", "4", "--run-id", run_id, "--rendezvous", f"s3://{BUCKET}", "--image", IMAGE),
            *("--credentials-secret", SECRET, "--endpoint-url", embedded_s3.endpoint_url, "--region", "us-east-1"),
            *("--cpu", "100m", "--memory", "256Mi", "--policy", "skip", "--min-replicas", "1", *TRAINER, *more),
        ]

    kwargs = ["--trainer-kwargs-json", '{"step_seconds": 0.05}']
    started = document(*start(2, 4000, *kwargs), "--detach")
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
    code = main(
        [
            *("run", "--backend", "kubernetes", "--replicas", "2", "--steps", "8", "--sync-every", "4"),
            *("--run-id", run.settings.run_id, "--rendezvous", f"s3://{BUCKET}", "--image", IMAGE),
            *("--credentials-secret", SECRET, "--endpoint-url", embedded_s3.endpoint_url, "--region", "us-east-1"),
            *("--cpu", "100m", "--memory", "256Mi", *TRAINER, *where, "--json"),
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert (code, report["status"]) == (0, "succeeded")
    for command in ("collect", "resume"):
        assert main([command, run.settings.run_id, "--backend", "kubernetes", *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "succeeded"


def test_a_run_is_found_again_by_its_job_as_it_was_started(make_run: MakeRun) -> None:
    run = make_run(
        gpus=2,
        queue="training",
        node_selector={"zone": "a"},
        tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
        token_secret="hub",  # noqa: S106 - a name
        max_runtime=3600,
        env={"A": "b"},
        labels={"team": "research"},
        exchange={"policy": "skip", "min_replicas": 1},
        trainer_kwargs={"model": "tiny", "data": "stdlib"},
        output="s3://elsewhere/models",
    )
    found = restore(job_manifest(run.pods, run.settings.replica_specs(launcher="nonce")[0]))
    assert found.settings == run.settings
    tolerations = [dict(each) for each in found.pods.tolerations]
    assert tolerations == [dict(each) for each in run.pods.tolerations]
    for name in run.pods.__dataclass_fields__:
        if name != "tolerations":
            assert getattr(found.pods, name) == getattr(run.pods, name), name


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
