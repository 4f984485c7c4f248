"""What Volcano does of a Job as far as replicas meet it, beside the tests' control plane: no real binary of it is here.

It makes a task's pods with the labels and the `env` plugin's variable that the real controller gives them, binds them
(the real scheduler's part), follows the task's policies, counts retries, and says how the Job ended; after
https://github.com/volcano-sh/volcano, pkg/controllers/job. The Job's definition is Volcano's own.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kubernetes.client import ApiException  # type: ignore[import-untyped]

from tests.support.cluster.operator import Operator, definitions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tests.support.cluster import Cluster

GROUP, VERSION, PLURAL = "batch.volcano.sh", "v1alpha1", "jobs"
_OVER = ("Completed", "Failed", "Terminated")


def volcano_definitions(cluster: Cluster) -> AbstractContextManager[None]:
    """Volcano's Job is known to the API server."""
    return definitions(cluster, "batch.volcano.sh_jobs.yaml")


class Volcano(Operator):
    """The controller."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._node = cluster.kubelet.node
        self._seen: set[str] = set()
        """Uids of pods that a policy was followed for, or that were deleted here."""

    def look(self) -> None:
        """Look at all Jobs once."""
        for job in self.custom.list_cluster_custom_object(GROUP, VERSION, PLURAL)["items"]:
            if "deletionTimestamp" not in job["metadata"]:
                self.attempt(self._sync, job)

    def _sync(self, job: dict[str, Any]) -> None:
        [task] = job["spec"]["tasks"]
        status = job.get("status", {})
        state, retries = dict(status.get("state", {})), status.get("retryCount", 0)
        if state.get("phase") in _OVER:
            return
        where, name = job["metadata"]["namespace"], job["metadata"]["name"]
        pods = {
            int(pod.metadata.labels["volcano.sh/task-index"]): pod
            for pod in self.core.list_namespaced_pod(where, label_selector=f"volcano.sh/job-name={name}").items
        }
        ending = None
        for pod in pods.values():
            action = self._action(task, pod)
            if action == "RestartPod":
                retries += 1
                self._delete(pod)
            ending = "Terminated" if action == "TerminateJob" else ending
        if retries >= job["spec"].get("maxRetry", 3):
            ending = "Failed"
        phases = [pod.status.phase for pod in pods.values() if pod.metadata.uid not in self._seen]
        counts = {each.lower(): phases.count(each) for each in ("Pending", "Running", "Succeeded", "Failed")}
        ended = counts["succeeded"] + counts["failed"]
        if ending is None and ended == task["replicas"]:
            ending = "Completed" if counts["succeeded"] >= job["spec"]["minAvailable"] else "Failed"
        if ending is not None:
            for pod in pods.values():
                if pod.status.phase not in ("Succeeded", "Failed"):
                    self._delete(pod)
        else:
            for index in set(range(task["replicas"])) - set(pods):
                self._create(job, task, index)
        phase = ending or ("Running" if counts["running"] >= job["spec"]["minAvailable"] else "Pending")
        now = {**counts, "retryCount": retries, "minAvailable": job["spec"]["minAvailable"], "state": {"phase": phase}}
        if now != {name: status.get(name) for name in now}:
            self.custom.patch_namespaced_custom_object_status(GROUP, VERSION, where, PLURAL, name, {"status": now})

    def _action(self, task: Mapping[str, Any], pod: Any) -> str | None:
        """What the policies say of an end that was not seen before; without one the pod stays as it is."""
        uid = pod.metadata.uid
        evicted = pod.metadata.deletion_timestamp is not None
        if uid in self._seen or not (evicted or pod.status.phase == "Failed"):
            return None
        code = None if evicted else pod.status.container_statuses[0].state.terminated.exit_code
        for policy in task.get("policies", ()):
            if policy.get("event") == "PodEvicted" if evicted else policy.get("exitCode") == code:
                return str(policy["action"])
        return None

    def _delete(self, pod: Any) -> None:
        self._seen.add(pod.metadata.uid)
        with suppress(ApiException):
            self.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)

    def _create(self, job: Mapping[str, Any], task: Mapping[str, Any], index: int) -> None:
        metadata, template = job["metadata"], copy.deepcopy(task["template"])
        labels = {
            "volcano.sh/job-name": metadata["name"],
            "volcano.sh/job-namespace": metadata["namespace"],
            "volcano.sh/queue-name": job["spec"]["queue"],
            "volcano.sh/task-index": str(index),
            "volcano.sh/task-spec": task["name"],
        }
        owner = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Job",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        name = f"{metadata['name']}-{task['name']}-{index}"
        spec = template["spec"] | {"schedulerName": job["spec"]["schedulerName"]}
        if "env" in job["spec"].get("plugins", {}):
            for container in spec["containers"]:
                container["env"] = [
                    *container.get("env", ()),
                    *({"name": variable, "value": str(index)} for variable in ("VK_TASK_INDEX", "VC_TASK_INDEX")),
                ]
        pod = {
            "metadata": {
                "name": name,
                "labels": template["metadata"].get("labels", {}) | labels,
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [owner],
            },
            "spec": spec,
        }
        self.core.create_namespaced_pod(metadata["namespace"], pod)
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        binding = {"metadata": {"name": name}, "target": target}
        # The client can't read the answer, which is a Status.
        self.core.create_namespaced_pod_binding(name, metadata["namespace"], binding, _preload_content=False)
