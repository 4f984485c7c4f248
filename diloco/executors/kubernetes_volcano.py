"""A run as one Volcano Job, for clusters whose capacity Volcano's queues share out: the Indexed Job's pods in another
wrapping. https://volcano.sh/en/docs/vcjob/

Replicas need no gang: one task, of which one pod may start alone. Volcano's actions are by exit code, so a rank that
can't be helped stays failed while the others go on; its retries are the Job's as a whole, not each rank's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, ExitCode
from diloco.executors import kubernetes_jobs as jobs
from diloco.executors.kubernetes_clients import CustomResource
from diloco.executors.kubernetes_manifest import (
    HOPELESS,
    VOLCANO_RANK_LABEL,
    least_replicas,
    pod_template,
    run_annotations,
    run_labels,
)
from diloco.executors.local import arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.kubernetes_clients import Clients
    from diloco.executors.kubernetes_manifest import PodSettings

RESOURCE = CustomResource("batch.volcano.sh", "v1alpha1", "jobs", "Volcano", "volcano")
TASK = "replica"
DEFAULT_QUEUE = "default"
RESTARTABLE = (
    ExitCode.FAILED,
    ExitCode.LOST_RENDEZVOUS,
    # 128 + signal, of the kernel and of the container runtime: SIGINT, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV.
    *(130, 134, 135, 136, 137, 139),
    ExitCode.INTERRUPTED,
)
"""Exit codes after which the same pod again may do better: Volcano has no "any other than these"."""
_ENDED = ("Completed", "Failed", "Aborted", "Terminated")
_ENDING = (*_ENDED, "Completing", "Aborting", "Terminating")


def volcano_manifest(settings: PodSettings, spec: ReplicaSpec) -> dict[str, Any]:
    """The Volcano Job of a whole run. `spec` is any rank's; its rank is not used."""
    template = pod_template(settings, spec, arguments(spec))
    if settings.max_runtime is not None:
        # A Volcano Job has no deadline of its own: each of its pods does.
        template["spec"]["activeDeadlineSeconds"] = settings.max_runtime
    policies: list[dict[str, Any]] = []
    if settings.retries > 0:
        policies += [{"event": "PodEvicted", "action": "RestartPod"}]
        policies += [{"exitCode": int(code), "action": "RestartPod"} for code in RESTARTABLE]
    if least_replicas(spec) == spec.world_size:
        policies += [{"exitCode": int(code), "action": "TerminateJob"} for code in HOPELESS]
    task: dict[str, Any] = {"name": TASK, "replicas": spec.world_size, "minAvailable": 1, "template": template}
    if policies:
        task["policies"] = policies
    job: dict[str, Any] = {
        "schedulerName": "volcano",
        "minAvailable": 1,
        # Without minSuccess, which would end the Job, and its slower ranks, as soon as so many have succeeded.
        "queue": settings.queue or DEFAULT_QUEUE,
        # Volcano gives up when it counts this one, and counts all ranks' restarts in one.
        "maxRetry": settings.retries * spec.world_size + 1,
        "plugins": {"env": []},
        "tasks": [task],
    }
    if settings.priority_class is not None:
        job["priorityClassName"] = settings.priority_class
    return {
        "apiVersion": RESOURCE.api_version,
        "kind": "Job",
        "metadata": {
            "name": settings.name,
            "namespace": settings.namespace,
            "labels": run_labels(settings),
            "annotations": run_annotations(settings, spec),
        },
        "spec": job,
    }


class VolcanoJob:
    """A :class:`~diloco.executors.kubernetes_workloads.Workload`."""

    title = "Volcano Job"
    rank_label = VOLCANO_RANK_LABEL
    manifest = staticmethod(volcano_manifest)

    def find(self, clients: Clients, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that the selector names; none where Volcano is not installed. Raises DilocoError."""
        return RESOURCE.find(clients, namespace, selector)

    def create(self, clients: Clients, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Raises ConfigurationError where Volcano is not installed, else DilocoError."""
        RESOURCE.create(clients, namespace, manifest)

    def complete(self, clients: Clients, namespace: str, job: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """One object is whole."""

    def delete(self, clients: Clients, namespace: str, job: Mapping[str, Any]) -> None:
        """Begin to delete it and its pods; one that is not there needs nothing. Raises DilocoError."""
        RESOURCE.delete(clients, namespace, job["metadata"]["name"])

    def refuse_scale(self) -> None:
        """Raise ConfigurationError."""
        raise ConfigurationError("a Volcano Job keeps its size: cancel, and run with other --replicas")

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its pods' template."""
        return dict(job["spec"]["tasks"][0]["template"])

    def arguments(self, job: Mapping[str, Any]) -> list[str]:
        """The replica entrypoint's."""
        return list(self.template(job)["spec"]["containers"][0]["args"])

    def replicas(self, job: Mapping[str, Any]) -> int:
        """How many ranks it has."""
        return int(job["spec"]["tasks"][0]["replicas"])

    def outcome(self, job: Mapping[str, Any]) -> str | None:
        """How it ended in Volcano's words, once it has or is bound to."""
        state = _state(job)
        phase = state.get("phase")
        return str(state.get("message") or f"the Volcano Job is {phase}") if phase in _ENDING else None

    def counts(self, job: Mapping[str, Any]) -> dict[str, int]:
        """How many ranks by status."""
        status = job.get("status", {})
        return {
            "succeeded": status.get("succeeded", 0),
            "failed": status.get("failed", 0),
            "active": status.get("running", 0) + status.get("pending", 0),
        }

    def rank_states(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], held: str | None
    ) -> list[jobs.RankState]:
        """Every rank's state, in rank order: Volcano keeps pods that have ended until the Job is deleted."""
        newest, ending = jobs.newest_pods(pods), self.outcome(job)
        restarts = {
            policy.get("exitCode")
            for policy in job["spec"]["tasks"][0].get("policies", ())
            if policy["action"] == "RestartPod"
        }
        return [_rank_state(rank, newest.get(rank), ending, restarts, held) for rank in range(self.replicas(job))]

    def held(self, clients: Clients, job: Mapping[str, Any]) -> str | None:
        """Why it has no pods yet, if its queue holds it."""
        del clients
        if _state(job).get("phase", "Pending") != "Pending":
            return None
        said = _state(job).get("message") or "waits for its turn"
        return f"queue {job['spec'].get('queue', DEFAULT_QUEUE)}: {said}"

    def own_settings(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Those of PodSettings that are not in the pods' template."""
        spec = job["spec"]
        queue = spec.get("queue", DEFAULT_QUEUE)
        return {
            "retries": (spec["maxRetry"] - 1) // self.replicas(job),
            "max_runtime": self.template(job)["spec"].get("activeDeadlineSeconds"),
            "queue": None if queue == DEFAULT_QUEUE else queue,
        }


def _state(job: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = job.get("status", {}).get("state", {})
    return found


def _rank_state(
    rank: int, pod: Mapping[str, Any] | None, ending: str | None, restarts: set[Any], held: str | None
) -> jobs.RankState:
    phase = None if pod is None else pod["status"].get("phase")
    if phase == "Succeeded":
        return jobs.state_of(rank, "succeeded", pod, exit_code=0)
    if phase == "Failed":
        code = jobs.terminated(pod).get("exitCode")
        if ending is None and code in restarts:
            return jobs.state_of(rank, "pending", pod, exit_code=None, why=f"restarts after: {jobs.why_ended(pod)}")
        return jobs.state_of(rank, "failed", pod, why=jobs.why_ended(pod))
    if ending is not None:
        return jobs.state_of(rank, "cancelled", pod, why=ending)
    if pod is None:
        return jobs.state_of(rank, "pending", None, exit_code=None, why=held)
    if phase == "Running":
        return jobs.state_of(rank, "running", pod, exit_code=None)
    return jobs.state_of(rank, "pending", pod, exit_code=None, why=jobs.why_waiting(pod))
