"""One run from its launch to its end by commands alone, as the account of the Role that `access` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from diloco.cli import main
from diloco.cluster_access import LAUNCHER
from tests.kubernetes.runs import SKIP, bind, run_command

if TYPE_CHECKING:
    import pytest

    from diloco.embedded import EmbeddedS3
    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster


def walk_through(
    workload: str,
    image: str,
    make_run: MakeRun,
    cluster: Cluster,
    namespace: str,
    embedded_s3: EmbeddedS3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`run --detach`, `status`, `list`, `logs`, `scale`, which is refused, and `cancel`, which leaves nothing."""
    bind(cluster, namespace, capsys)
    run_id = make_run().settings.run_id
    where = ["--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig_of(namespace, LAUNCHER))]
    start = [
        *run_command(run_id, embedded_s3.endpoint_url, replicas=2, steps=4000, image=image),
        *("--workload", workload, *SKIP, "--trainer-kwargs-json", '{"step_seconds": 0.05}', "--detach", *where),
    ]
    on = ["--backend", "kubernetes", *where]
    # The Role of Indexed Jobs does not reach others, and other runs are still found with it.
    assert main(start) == 2
    assert f"bind the Role that `access --cloud kubernetes --workload {workload}` prints" in capsys.readouterr().err
    assert main(["status", run_id, *on]) == 2
    assert "has no Job in namespace" in capsys.readouterr().err

    bind(cluster, namespace, capsys, "--workload", workload)
    assert main(start) == 0

    def document(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, *on, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def all_run() -> bool:
        replicas = document("status", run_id)["replicas"]
        return [each["status"] for each in replicas] == ["running"] * 2

    cluster.until(all_run, "running pods")
    [listed] = document("list")
    assert (listed["run_id"], listed["replicas"]) == (run_id, {"active": 2})

    def log() -> str:
        capsys.readouterr()
        assert main(["logs", run_id, "--rank", "1", *on]) == 0
        return capsys.readouterr().out

    assert "[1] " in cluster.until(lambda: found if "averaged ranks" in (found := log()) else "", "log of rank 1")
    assert main(["scale", run_id, "--replicas", "3", *where]) == 2
    error = capsys.readouterr().err
    assert "keeps its size" in error
    assert error.count("\n") == 1
    assert main(["cancel", run_id, *on]) == 0
    assert cluster.pods(namespace) == []
    assert main(["status", run_id, *on]) == 2
