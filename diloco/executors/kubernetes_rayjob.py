"""A run as KubeRay RayJobs, one a rank: each a Ray cluster of one node, whose head pod is the replica's pod.
https://docs.ray.io/en/latest/cluster/kubernetes/getting-started/rayjob-quick-start.html

KubeRay starts Ray in the pod's container, and submits the entrypoint to it over HTTP. Of its ways to submit, `HTTPMode`
is the one that needs no second pod (`K8sJobMode` makes one, which can die by itself) and passes the `restricted`
standard (the container that `SidecarMode` adds has no security context). In it a head that was lost is made anew and
gets the same entrypoint again, which is what a replica needs: its attempt is claimed in the bucket. An entrypoint that
failed is tried again with another cluster, up to `backoffLimit` times, whatever its exit code.

The run's RayJobs are handled as one object here: a list whose metadata is that of the run.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError
from diloco.executors import kubernetes_jobs as jobs
from diloco.executors.kubernetes_clients import CustomResource, ask
from diloco.executors.kubernetes_manifest import (
    QUEUE_LABEL,
    RAY_RANK_LABEL,
    RAY_VARIABLES,
    RUN_LABEL,
    pod_template,
    run_annotations,
    run_labels,
)
from diloco.executors.kubernetes_queue import why_suspended
from diloco.executors.local import arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec, Status
    from diloco.executors.kubernetes_clients import Clients
    from diloco.executors.kubernetes_manifest import PodSettings

RESOURCE = CustomResource("ray.io", "v1", "rayjobs", "KubeRay", "rayjob")
KEPT_SECONDS = 60
"""How long a rank's pod outlives it, for those who read its log; the pod holds its node's GPUs until then."""
_ENDED = ("Complete", "Failed")
_NAME = "diloco-replica"
_PID_FILE = "/tmp/replica.pid"  # noqa: S108 - of the pod's own volume
# Ray sets a number of threads, of 1, for what asks for no CPUs of its own, unless the container has one.
# Ray keeps a job's output in a file; process 1's is the pod's log. When it stops a job, Ray signals each of its
# processes, and what the replica says last is still to be passed on. A Ray job does not know the image's entrypoint.
_START = (
    f'echo $$ > {_PID_FILE}; grep -qz "^OMP_NUM_THREADS=" /proc/1/environ || unset OMP_NUM_THREADS; '
    'exec > >(trap "" TERM; exec tee /proc/1/fd/1) 2>&1; '
    'exec /usr/local/bin/diloco-replica "$@"'
)
# Process 1 is Ray's, which kills the replica when it gets SIGTERM.
_STOP = f'pid=$(cat {_PID_FILE}) && kill -TERM "$pid" && while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done; true'
_EXIT_CODE = re.compile(r"failed with exit code (-?\d+)")


def rayjob_manifest(settings: PodSettings, spec: ReplicaSpec) -> dict[str, Any]:
    """The RayJobs of a whole run, as a List. `spec` is any rank's; its rank is not used."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [_rayjob(settings, spec, rank) for rank in range(spec.world_size)],
    }


def entrypoint(spec: ReplicaSpec, rank: int) -> str:
    """What Ray gives to a shell in the pod."""
    return "exec " + shlex.join(["bash", "-c", _START, _NAME, *arguments(spec), "--rank", str(rank)])


def _rayjob(settings: PodSettings, spec: ReplicaSpec, rank: int) -> dict[str, Any]:
    template = pod_template(settings, spec, ())
    template["metadata"]["labels"][RAY_RANK_LABEL] = str(rank)
    [container] = template["spec"]["containers"]
    del container["args"]  # KubeRay would run them after Ray
    ours = dict(zip(RAY_VARIABLES, (str(settings.grace_seconds), "0"), strict=True))
    container["env"] = [
        *(each for each in container["env"] if each["name"] not in ours),
        *({"name": name, "value": value} for name, value in ours.items()),
    ]
    container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", _STOP]}}}
    labels = {**run_labels(settings), RAY_RANK_LABEL: str(rank)}
    job: dict[str, Any] = {
        "submissionMode": "HTTPMode",
        "entrypoint": entrypoint(spec, rank),
        "backoffLimit": settings.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "rayClusterSpec": {
            "headGroupSpec": {
                # Replicas keep nothing in Ray's object store: the least that it takes, in bytes.
                "rayStartParams": {"dashboard-host": "0.0.0.0", "object-store-memory": str(75 * 2**20)},  # noqa: S104
                "template": template,
            }
        },
    }
    if settings.max_runtime is not None:
        job["activeDeadlineSeconds"] = settings.max_runtime
    if settings.queue is not None:
        job["suspend"] = True
        labels[QUEUE_LABEL] = settings.queue
    return {
        "apiVersion": RESOURCE.api_version,
        "kind": "RayJob",
        "metadata": {
            "name": f"{settings.name}-{rank}",
            "namespace": settings.namespace,
            "labels": labels,
            "annotations": run_annotations(settings, spec),
        },
        "spec": job,
    }


def as_one(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The RayJobs of one run as one object."""
    ordered = sorted(items, key=_rank)
    first = ordered[0]["metadata"]
    metadata = {
        "name": first["name"].removesuffix(f"-{_rank(ordered[0])}"),
        "namespace": first["namespace"],
        "labels": {name: value for name, value in first["labels"].items() if name != RAY_RANK_LABEL},
        "annotations": first.get("annotations", {}),
        "uid": first.get("uid"),
        "creationTimestamp": min(str(each["metadata"].get("creationTimestamp")) for each in ordered),
    }
    going = [each["metadata"]["deletionTimestamp"] for each in ordered if "deletionTimestamp" in each["metadata"]]
    if going:
        metadata["deletionTimestamp"] = min(going)
    return {"apiVersion": RESOURCE.api_version, "kind": "RayJobList", "metadata": metadata, "items": ordered}


class RayJobs:
    """A :class:`~diloco.executors.kubernetes_workloads.Workload`."""

    title = "RayJobs"
    rank_label = RAY_RANK_LABEL
    manifest = staticmethod(rayjob_manifest)

    def find(self, clients: Clients, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that the selector names, each run's as one; none where KubeRay is not installed. Raises DilocoError."""
        runs: dict[str, list[dict[str, Any]]] = {}
        for job in RESOURCE.find(clients, namespace, f"{selector},{RAY_RANK_LABEL}"):
            runs.setdefault(job["metadata"]["labels"][RUN_LABEL], []).append(job)
        return [as_one(items) for items in runs.values()]

    def create(self, clients: Clients, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Raises TakenError if one of the first one's name is there, ConfigurationError where KubeRay is not installed,
        else DilocoError; what was made before an error stays.
        """
        for job in manifest["items"]:
            try:
                RESOURCE.create(clients, namespace, job)
            except DilocoError as problem:
                if _rank(job) == 0:
                    raise
                kind = ConfigurationError if isinstance(problem, ConfigurationError) else DilocoError
                raise kind(f"rank {_rank(job)}: {problem}") from None

    def complete(self, clients: Clients, namespace: str, job: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Make the ranks that a launch left out which was broken off. Raises DilocoError."""
        there = {_rank(each) for each in job["items"]}
        for missing in (each for each in manifest["items"] if _rank(each) not in there):
            RESOURCE.create(clients, namespace, missing)

    def delete(self, clients: Clients, namespace: str, job: Mapping[str, Any]) -> None:
        """Begin to delete all of them with their clusters and pods. Raises DilocoError."""
        for each in job["items"]:
            RESOURCE.delete(clients, namespace, each["metadata"]["name"])

    def refuse_scale(self) -> None:
        """Raise ConfigurationError."""
        raise ConfigurationError("a run of RayJobs keeps its size: cancel, and run with other --replicas")

    def template(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Its head pods' template."""
        return dict(job["items"][0]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"])

    def arguments(self, job: Mapping[str, Any]) -> list[str]:
        """The replica entrypoint's, those of the first rank."""
        words = shlex.split(job["items"][0]["spec"]["entrypoint"])
        return words[words.index(_NAME) + 1 :] if _NAME in words else []

    def replicas(self, job: Mapping[str, Any]) -> int:
        """How many ranks it has, or should have."""
        given = self.arguments(job)
        return int(dict(zip(given[::2], given[1::2], strict=False))["--world-size"])

    def outcome(self, job: Mapping[str, Any]) -> str | None:
        """How they ended, once all have."""
        ends = [_status(each).get("jobDeploymentStatus") for each in job["items"]]
        if any(end not in _ENDED for end in ends):
            return None
        return f"{ends.count('Complete')} RayJobs are complete, {ends.count('Failed')} failed"

    def counts(self, job: Mapping[str, Any]) -> dict[str, int]:
        """How many ranks by status."""
        found = Counter[str](_status_of(each) for each in job["items"])
        active = found.pop("pending", 0) + found.pop("running", 0)
        return {**found, "active": active}

    def rank_states(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], held: str | None
    ) -> list[jobs.RankState]:
        """Every rank's state, in rank order."""
        newest, items = jobs.newest_pods(pods), {_rank(each): each for each in job["items"]}
        return [_rank_state(rank, items.get(rank), newest.get(rank), held) for rank in range(self.replicas(job))]

    def held(self, clients: Clients, job: Mapping[str, Any]) -> str | None:
        """Why ranks have no pods yet, in Kueue's or KubeRay's words. Raises DilocoError."""
        for each in job["items"]:
            if (why := why_suspended(clients, each)) is not None:
                return why
        names = {each["metadata"]["name"] for each in job["items"]}
        names |= {_status(each).get("rayClusterName") for each in job["items"]}
        events = ask(clients.core.list_namespaced_event, job["metadata"]["namespace"], field_selector="type=Warning")[
            "items"
        ]
        mine = [each for each in events if each["involvedObject"].get("name") in names]
        newest = max(mine, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return None if newest is None else f"KubeRay: {newest['message']}"

    def own_settings(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Those of PodSettings that are not in the pods' template."""
        spec = job["items"][0]["spec"]
        return {
            "retries": spec["backoffLimit"],
            "max_runtime": spec.get("activeDeadlineSeconds"),
            "queue": job["metadata"]["labels"].get(QUEUE_LABEL),
        }


def _rank(job: Mapping[str, Any]) -> int:
    return int(job["metadata"]["labels"][RAY_RANK_LABEL])


def _status(job: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = job.get("status", {})
    return found


def _status_of(job: Mapping[str, Any]) -> Status:
    """By what KubeRay says alone."""
    end, ray = _status(job).get("jobDeploymentStatus"), _status(job).get("jobStatus")
    if end == "Failed":
        return "failed"
    if end == "Complete":
        return "succeeded" if ray == "SUCCEEDED" else "cancelled"
    return "running" if end == "Running" and ray == "RUNNING" else "pending"


def _rank_state(
    rank: int, job: Mapping[str, Any] | None, pod: Mapping[str, Any] | None, held: str | None
) -> jobs.RankState:
    name = None if pod is None else pod["metadata"]["name"]
    if job is None:
        return jobs.RankState(rank, "cancelled", why="its RayJob was deleted", pod=name)
    status, said = _status_of(job), _status(job)
    code, why = None, None
    if status == "succeeded":
        code = 0
    elif status in ("failed", "cancelled"):
        code, why = _end(said)
    elif said.get("jobDeploymentStatus") == "Retrying":
        why = f"restarts after: {_end(said)[1]}"
    elif pod is None:
        status, why = "pending", held
    elif pod["status"].get("phase") == "Pending":
        status, why = "pending", jobs.why_waiting(pod)
    elif pod["status"].get("phase") != "Running":
        status, why = "pending", f"restarts after: {jobs.why_ended(pod)}"
    elif status == "pending":
        why = "Ray starts in its pod"
    # KubeRay counts the end that it does not try again after, too.
    restarts = int(said.get("failed", 0)) - (1 if status == "failed" else 0)
    return jobs.RankState(rank, status, code, why, name, max(restarts, 0))


def _end(status: Mapping[str, Any]) -> tuple[int | None, str]:
    """Exit code of a Ray job that ended, as a shell has it, and why it did: its last error line, else Ray's words."""
    message = str(status.get("message", ""))
    found = _EXIT_CODE.search(message)
    code = None if found is None else int(found[1])
    if code is not None and code < 0:
        code = 128 - code
    if code is not None:
        return code, jobs.why_exited(code, message.splitlines()[1:])
    return None, message or str(status.get("reason") or status.get("jobStatus") or "no reason is given")
