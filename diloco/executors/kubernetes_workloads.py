"""What wraps a run's pods on a cluster, and how each kind is made, found, read and deleted. The pods are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from diloco.executors import kubernetes_jobs as jobs
from diloco.executors.kubernetes_clients import ask, try_to
from diloco.executors.kubernetes_manifest import QUEUE_LABEL, RANK_LABEL, job_manifest
from diloco.executors.kubernetes_queue import why_suspended
from diloco.executors.kubernetes_rayjob import RESOURCE as RAY
from diloco.executors.kubernetes_rayjob import RayJobs
from diloco.executors.kubernetes_volcano import RESOURCE as VOLCANO
from diloco.executors.kubernetes_volcano import VolcanoJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.kubernetes_clients import Clients
    from diloco.executors.kubernetes_manifest import Kind, PodSettings


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

    def complete(self, clients: Clients, namespace: str, job: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Make what is missing of a run that goes on, if it has several objects. Raises DilocoError."""

    def delete(self, clients: Clients, namespace: str, job: Mapping[str, Any]) -> None:
        """Begin to delete it and its pods; one that is not there needs nothing. Raises DilocoError."""

    def refuse_scale(self) -> None:
        """Raise ConfigurationError if its size can't change while it runs."""

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its pods' template."""

    def arguments(self, job: Mapping[str, Any]) -> list[str]:
        """The replica entrypoint's, of any rank."""

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

    def complete(self, clients: Clients, namespace: str, job: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """One object is whole."""

    def delete(self, clients: Clients, namespace: str, job: Mapping[str, Any]) -> None:
        """Begin to delete it and its pods; one that is not there needs nothing. Raises DilocoError."""
        name = job["metadata"]["name"]
        try_to(clients.batch.delete_namespaced_job, name, namespace, propagation_policy="Foreground")

    def refuse_scale(self) -> None:
        """An Indexed Job is elastic."""

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its pods' template."""
        return dict(job["spec"]["template"])

    def arguments(self, job: Mapping[str, Any]) -> list[str]:
        """The replica entrypoint's."""
        return list(self.template(job)["spec"]["containers"][0]["args"])

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
        return why_suspended(clients, job)

    def own_settings(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Those of PodSettings that are not in the pods' template."""
        return {
            "retries": job["spec"]["backoffLimitPerIndex"],
            "max_runtime": job["spec"].get("activeDeadlineSeconds"),
            "queue": job["metadata"]["labels"].get(QUEUE_LABEL),
        }


WORKLOADS: dict[Kind, Workload] = {"job": IndexedJob(), "volcano": VolcanoJob(), "rayjob": RayJobs()}
"""By the name that `--workload` takes."""


def workload_of(job: Mapping[str, Any]) -> Kind:
    """The kind of an object that the API listed; it leaves out the API's name in lists of its own kinds."""
    group, _, _ = str(job.get("apiVersion", "")).rpartition("/")
    others: dict[str, Kind] = {VOLCANO.group: "volcano", RAY.group: "rayjob"}
    return others.get(group, "job")
