"""Small runs of the default trainer on the tests' cluster, through an S3 that they share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from diloco.cli import main
from diloco.embedded import BUCKET
from diloco.exchange.store import open_store
from diloco.executors.kubernetes import KubernetesExecutor
from diloco.executors.kubernetes_clients import Clients
from diloco.executors.kubernetes_manifest import PodSettings
from diloco.run import Pace, make_diloco_run
from diloco.spec import RunSettings
from diloco.status import read_beats
from tests.support.cluster import IMAGE

if TYPE_CHECKING:
    import pytest

    from diloco.embedded import EmbeddedS3
    from diloco.exchange.records import Beat
    from diloco.kubernetes_run import Restored
    from diloco.report import RunReport
    from tests.support.cluster import Cluster

SECRET = "bucket-credentials"  # noqa: S105 - a Secret's name
EVERYTHING: dict[str, Any] = {
    "gpus": 2,
    "queue": "training",
    "priority_class": "system-node-critical",
    "node_selector": {"zone": "a"},
    "tolerations": ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
    "token_secret": "hub",
    "max_runtime": 3600,
    "env": {"A": "b"},
    "labels": {"team": "research"},
}
"""Settings of pods that are not the defaults."""
SKIP = ("--policy", "skip", "--min-replicas", "1")
PACE = Pace(processes=0.2, status=0.3)


def run_command(run_id: str, endpoint_url: str, *, replicas: int, steps: int, image: str = IMAGE) -> list[str]:
    """What a user types to start a small run; its trainer takes `step_seconds`."""
    return [
        *("run", "--backend", "kubernetes", "--replicas", str(replicas), "--steps", str(steps), "--sync-every", "4"),
        *("--run-id", run_id, "--rendezvous", f"s3://{BUCKET}", "--image", image),
        *("--credentials-secret", SECRET, "--endpoint-url", endpoint_url, "--region", "us-east-1"),
        *("--cpu", "100m", "--memory", "256Mi"),
        *("--trainer-module", "tests.kubernetes.trainer", "--trainer-fn", "train"),
    ]


class Run:
    """One run: its settings, its executor, and a launcher in a thread once it is started."""

    def __init__(self, cluster: Cluster, namespace: str, endpoint_url: str, run_id: str, **changes: Any) -> None:
        pod = {name: changes.pop(name) for name in list(changes) if name in PodSettings.__dataclass_fields__}
        values: dict[str, Any] = {
            "replicas": 2,
            "steps": 12,
            "sync_every": 4,
            "run_id": run_id,
            "rendezvous": f"s3://{BUCKET}",
            "trainer_kwargs": {"model": "tiny", "data": "stdlib", "batch_size": 2},
            "max_restarts": 0,  # the cluster's own count
        }
        self.cluster, self.namespace = cluster, namespace
        self.settings = RunSettings.checked(**(values | changes))
        defaults: dict[str, Any] = {
            "cpu": "100m",
            "memory": "256Mi",
            "credentials_secret": SECRET,
            "endpoint_url": endpoint_url,
            "region": "us-east-1",
        }
        self.pods = PodSettings(run_id, namespace, pod.pop("image_uri", IMAGE), **(defaults | pod))
        self.executor = KubernetesExecutor(
            self.pods, clients=Clients(cluster.kubeconfig), look_every=0.2, on_note=self._note
        )
        self.notes: list[str] = []
        self.report: RunReport | None = None
        self._thread = threading.Thread(target=self._launch, daemon=True)

    def start(self) -> Run:
        """Launch and supervise in a thread."""
        self._thread.start()
        return self

    def end(self, patience: float = 500.0) -> RunReport:
        """The report of the launcher in the thread."""
        self._thread.join(patience)
        assert self.report is not None, f"no end within {patience:g} s:\n{self.state()}"
        return self.report

    def beats(self) -> dict[int, Beat]:
        """What the ranks say."""

        async def read() -> dict[int, Beat]:
            store = open_store(self.settings.uri)
            try:
                return await read_beats(store, frozenset())
            finally:
                await store.close()

        return asyncio.run(read())

    def reaches(self, round_: int, *ranks: int, attempt: int = 1) -> None:
        """Return once these ranks are in that round, in that attempt or a later one."""

        def look() -> bool:
            beats = self.beats()
            return all(
                rank in beats and beats[rank].round >= round_ and beats[rank].attempt >= attempt for rank in ranks
            )

        self.cluster.until(look, f"round {round_} of ranks {ranks}:\n{self.state()}")

    def pod(self, rank: int) -> Any:
        """The present pod of a rank."""
        selector = f"diloco/run-id={self.settings.run_id},batch.kubernetes.io/job-completion-index={rank}"
        found = [
            pod
            for pod in self.cluster.pods(self.namespace, selector)
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None
        ]
        return found[0] if found else None

    def state(self) -> str:
        """For people who read a failed test."""
        pods = self.cluster.kubectl("get", "pods,jobs", "-n", self.namespace, "-o", "wide").stdout
        logs = self.cluster.kubectl(
            "logs", "-n", self.namespace, "-l", f"diloco/run-id={self.settings.run_id}", "--prefix", "--tail", "5"
        ).stdout
        return f"{pods}\n{logs}\n{self.notes}"

    def _launch(self) -> None:
        self.report = make_diloco_run(self.executor, self.settings, pace=PACE, on_note=self._note)

    def _note(self, text: str) -> None:
        self.notes.append(text)


def credentials(cluster: Cluster, namespace: str, s3: EmbeddedS3) -> None:
    """The Secret that pods read the S3's credentials from."""
    keys = {name: value for name, value in s3.env.items() if "KEY" in name}
    cluster.core.create_namespaced_secret(namespace, {"metadata": {"name": SECRET}, "stringData": keys})


def assert_same(found: Restored, run: Run) -> None:
    """What was found again in the cluster is how the run was started."""
    assert found.settings == run.settings
    assert [dict(each) for each in found.pods.tolerations] == [dict(each) for each in run.pods.tolerations]
    for name in run.pods.__dataclass_fields__:
        if name != "tolerations":
            assert getattr(found.pods, name) == getattr(run.pods, name), name


def bind(cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str], *options: str) -> None:
    """Give the launcher's account what `access` prints."""
    assert main(["access", "--cloud", "kubernetes", "--namespace", namespace, *options]) == 0
    applied = cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=capsys.readouterr().out)
    assert applied.returncode == 0, applied.stderr
