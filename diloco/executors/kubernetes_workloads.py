"""What wraps a run's pods on a cluster, and how each kind is made, found, read and deleted. The pods are the same."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from diloco.errors import DilocoError
from diloco.executors import kubernetes_jobs as jobs
from diloco.executors.kubernetes_clients import ask, try_to
from diloco.executors.kubernetes_manifest import QUEUE_LABEL, RANK_LABEL, job_manifest
from diloco.executors.kubernetes_volcano import GROUP, VolcanoJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.kubernetes_clients import Clients
    from diloco.executors.kubernetes_manifest import Kind, PodSettings

_KUEUE = "kueue.x-k8s.io"


class Workload(Protocol):
    """One kind of object around a run's pods. Objects are as the API has them in JSON."""

    title: str
    """What it is called in messages."""
    rank_label: str
    """The label of its pods whose value is the rank."""

    def manifest(self, settings: PodSettings, spec: ReplicaSpec) -> dict[str, Any]:
        """The object of a whole run."""

    def find(self, clients: Clients, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that a label selector names. Raises DilocoError."""

    def create(self, clients: Clients, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Raises TakenError if one of that name is there, else DilocoError."""

    def delete(self, clients: Clients, namespace: str, name: str) -> None:
        """Begin to delete it and its pods; one that is not there needs nothing. Raises DilocoError."""

    def refuse_scale(self) -> None:
        """Raise ConfigurationError if its size can't change while it runs."""

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its pods' template."""

    def replicas(self, job: Mapping[str, Any]) -> int:
        """How many ranks it has."""

    def outcome(self, job: Mapping[str, Any]) -> str | None:
        """How it ended in the cluster's words, once it has or is bound to."""

    def counts(self, job: Mapping[str, Any]) -> dict[str, int]:
        """How many ranks by status."""

    def rank_states(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], held: str | None
    ) -> list[jobs.RankState]:
        """Every rank's state, in rank order. `held` is why it has no pods, if somebody said so."""

    def held(self, clients: Clients, job: Mapping[str, Any]) -> str | None:
        """Why it has no pods yet, if a queue holds it. Raises DilocoError."""

    def own_settings(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Those of PodSettings that are not in the pods' template."""


class IndexedJob:
    """Kubernetes's own Job, in Indexed mode."""

    title = "Job"
    rank_label = RANK_LABEL
    manifest = staticmethod(job_manifest)

    def find(self, clients: Clients, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that a label selector names. Raises DilocoError."""
        return list(ask(clients.batch.list_namespaced_job, namespace, label_selector=selector)["items"])

    def create(self, clients: Clients, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Raises TakenError if one of that name is there, else DilocoError."""
        ask(clients.batch.create_namespaced_job, namespace, manifest)

    def delete(self, clients: Clients, namespace: str, name: str) -> None:
        """Begin to delete it and its pods; one that is not there needs nothing. Raises DilocoError."""
        try_to(clients.batch.delete_namespaced_job, name, namespace, propagation_policy="Foreground")

    def refuse_scale(self) -> None:
        """An Indexed Job is elastic."""

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its pods' template."""
        return dict(job["spec"]["template"])

    def replicas(self, job: Mapping[str, Any]) -> int:
        """How many ranks it has."""
        return int(job["spec"]["completions"])

    def outcome(self, job: Mapping[str, Any]) -> str | None:
        """How it ended in the Job controller's words, once it has or is bound to."""
        found = jobs.outcome(job)
        return None if found is None else found[1]

    def counts(self, job: Mapping[str, Any]) -> dict[str, int]:
        """How many ranks by status."""
        status = job.get("status", {})
        return {
            "succeeded": len(jobs.indexes(status.get("completedIndexes"))),
            "failed": len(jobs.indexes(status.get("failedIndexes"))),
            "active": status.get("active", 0),
        }

    def rank_states(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], held: str | None
    ) -> list[jobs.RankState]:
        """Every rank's state, in rank order."""
        return jobs.rank_states(job, pods, held)

    def held(self, clients: Clients, job: Mapping[str, Any]) -> str | None:
        """Why a suspended Job is held, in Kueue's words. Raises DilocoError."""
        if not job["spec"].get("suspend"):
            return None
        queue = job["metadata"]["labels"].get(QUEUE_LABEL)
        if queue is None:
            return "the Job is suspended: `kubectl patch` it with suspend false"
        for version in ("v1beta2", "v1beta1"):
            with suppress(DilocoError):
                found = try_to(
                    clients.custom.list_namespaced_custom_object,
                    _KUEUE,
                    version,
                    job["metadata"]["namespace"],
                    "workloads",
                    label_selector=f"{_KUEUE}/job-uid={job['metadata']['uid']}",
                )
                for workload in (found or {}).get("items", ()):
                    for condition in workload.get("status", {}).get("conditions", ()):
                        if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                            return f"queue {queue}: {condition['message']}"
        return f"queue {queue}: waits for its turn"

    def own_settings(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Those of PodSettings that are not in the pods' template."""
        return {
            "retries": job["spec"]["backoffLimitPerIndex"],
            "max_runtime": job["spec"].get("activeDeadlineSeconds"),
            "queue": job["metadata"]["labels"].get(QUEUE_LABEL),
        }


WORKLOADS: dict[Kind, Workload] = {"job": IndexedJob(), "volcano": VolcanoJob()}
"""By the name that `--workload` takes."""


def workload_of(job: Mapping[str, Any]) -> Kind:
    """The kind of an object that the API listed; it leaves out the API's name in lists of its own kinds."""
    return "volcano" if str(job.get("apiVersion", "")).startswith(f"{GROUP}/") else "job"
