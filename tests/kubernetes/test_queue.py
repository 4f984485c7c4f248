"""A queued run waits for its quota under the real Kueue controller, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.errors import ConfigurationError
from tests.support.cluster.kueue import kueue, queue

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster


def test_a_second_run_is_held_until_the_quota_is_free(
    make_run: MakeRun, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with kueue(cluster, tmp_path / "kueue"):
        queue(cluster, namespace, "training", cpu="1", memory="8Gi")
        settings = {
            "queue": "training",
            "cpu": "500m",
            "steps": 40000,
            "trainer_module": "tests.kubernetes.trainer",
            "trainer_fn": "train",
            "sync_every": 4,
        }
        first, second = make_run(**settings), make_run(**settings)
        first.executor.launch_replicas(first.settings.replica_specs())
        cluster.until(
            lambda: all(handle.status == "running" for handle in first.executor.existing()), "start of the first run"
        )
        first.reaches(0, 0, 1)
        second.executor.launch_replicas(second.settings.replica_specs())
        cluster.until(
            lambda: all("insufficient" in str(handle.waits) for handle in second.executor.existing()),
            "reason of the second run",
        )
        for handle in second.executor.existing():
            assert handle.status == "pending"
            assert str(handle.waits).startswith("queue training: ")
            assert "cpu" in str(handle.waits)
        with pytest.raises(ConfigurationError, match="queued run keeps its size"):
            first.executor.scale(1, policy="skip", min_replicas=1)
        first.executor.cancel(first.executor.existing())
        cluster.until(
            lambda: all(handle.status == "running" for handle in second.executor.existing()), "start of the second run"
        )
        second.reaches(0, 0, 1)
        second.executor.cancel(second.executor.existing())
