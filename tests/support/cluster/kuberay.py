"""What KubeRay does of a RayJob as far as replicas meet it, beside the tests' control plane: no real binary of it is
here, and no Ray.

It makes a RayCluster of a RayJob, and a head pod of that with the labels, variables and command that the real operator
gives it, which the real scheduler binds; it makes a head anew that was lost, submits the entrypoint over HTTP to the
program that stands in for Ray in the pod (`ray_head.py`), and follows it: retries by a new cluster, the deadline,
suspension, the deletion of the cluster after the end, the job's stop when the RayJob is deleted. What is left out:
workers, services, other ways to submit, and events but for pods that are refused. The definitions are KubeRay's own.
After https://github.com/ray-project/kuberay, ray-operator/controllers/ray.
"""

from __future__ import annotations

import copy
import json
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes.client import ApiException  # type: ignore[import-untyped]

from tests.support.cluster.container import replica_image
from tests.support.cluster.operator import Operator, definitions
from tests.support.engine import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tests.support.cluster import Cluster, Image

GROUP, VERSION = "ray.io", "v1"
JOBS, CLUSTERS = "rayjobs", "rayclusters"
FINALIZER = "ray.io/rayjob-finalizer"
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
_DASHBOARD = "dashboard: "


def ray_definitions(cluster: Cluster) -> AbstractContextManager[None]:
    """KubeRay's RayJob and RayCluster are known to the API server."""
    return definitions(cluster, "ray.io_rayjobs.yaml", "ray.io_rayclusters.yaml")


def ray_image(**env: str) -> Image:
    """The project's image with Ray, or what stands in for it."""
    image = replica_image(**env)
    ray = ROOT / "tests" / "support" / "cluster" / "ray_head.py"
    return type(image)(env=image.env, files={**image.files, "/usr/local/bin/ray": ray})


class KubeRay(Operator):
    """The operator."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for job in self._list(JOBS):  # else they could not be deleted any more
            self._release(job)

    def look(self) -> None:
        """Look at all clusters and jobs once."""
        for cluster in self._list(CLUSTERS):
            if "deletionTimestamp" not in cluster["metadata"]:
                self.attempt(self._sync_cluster, cluster)
        for job in self._list(JOBS):
            self.attempt(self._finish if "deletionTimestamp" in job["metadata"] else self._sync_job, job)

    def _sync_job(self, job: dict[str, Any]) -> None:
        status, spec = job.get("status", {}), job["spec"]
        phase = status.get("jobDeploymentStatus", "")
        if phase in ("Initializing", "Running"):
            if spec.get("suspend"):
                return self._set(job, jobDeploymentStatus="Suspending")
            deadline = spec.get("activeDeadlineSeconds")
            if deadline is not None and _age(status["startTime"]) >= deadline:
                message = f"The RayJob has passed the activeDeadlineSeconds. ActiveDeadlineSeconds: {deadline}"
                return self._end(job, "Failed", reason="DeadlineExceeded", message=message)
        return getattr(self, f"_when_{phase.lower() or 'new'}")(job, status)  # type: ignore[no-any-return]

    def _when_new(self, job: dict[str, Any], _status: Mapping[str, Any]) -> None:
        name = job["metadata"]["name"]
        # Unless it changed: one that is being deleted takes none.
        same = {"resourceVersion": job["metadata"]["resourceVersion"]}
        self._patch(job, JOBS, {"metadata": {"finalizers": [FINALIZER], **same}})
        self._set(
            job,
            jobDeploymentStatus="Initializing",
            jobStatus="",
            jobId=f"{name}-{secrets.token_hex(3)[:5]}",
            rayClusterName=f"{name}-{secrets.token_hex(3)[:5]}",
            startTime=_now(),
        )

    def _when_initializing(self, job: dict[str, Any], status: Mapping[str, Any]) -> None:
        cluster = self._cluster(job)
        if cluster is None:
            self._make_cluster(job)
        elif (address := self._dashboard(cluster)) is not None:
            self._set(job, jobDeploymentStatus="Running", dashboardURL=address)
        del status

    def _when_running(self, job: dict[str, Any], status: Mapping[str, Any]) -> None:
        cluster = self._cluster(job)
        address = None if cluster is None else self._dashboard(cluster)
        if address is None:
            return
        code, found = _http("GET", f"{address}/api/jobs/{status['jobId']}")
        if code == 404:
            asked = {"entrypoint": job["spec"]["entrypoint"], "submission_id": status["jobId"]}
            _http("POST", f"{address}/api/jobs/", asked)
        elif code == 200 and found["status"] in TERMINAL:
            end = "Failed" if found["status"] == "FAILED" else "Complete"
            reason = "AppFailed" if end == "Failed" else ""
            self._end(job, end, jobStatus=found["status"], reason=reason, message=found["message"])
        elif code == 200 and found["status"] != status.get("jobStatus"):
            self._set(job, jobStatus=found["status"], message=found["message"])

    def _when_retrying(self, job: dict[str, Any], _status: Mapping[str, Any]) -> None:
        self._reset(job, "")

    def _when_suspending(self, job: dict[str, Any], _status: Mapping[str, Any]) -> None:
        self._reset(job, "Suspended")

    def _when_suspended(self, job: dict[str, Any], _status: Mapping[str, Any]) -> None:
        if not job["spec"].get("suspend"):
            self._set(job, jobDeploymentStatus="")

    def _when_complete(self, job: dict[str, Any], status: Mapping[str, Any]) -> None:
        over = _age(status["endTime"]) >= job["spec"].get("ttlSecondsAfterFinished", 0)
        if job["spec"].get("shutdownAfterJobFinishes") and over:
            self._delete_cluster(job)

    _when_failed = _when_complete

    def _end(self, job: dict[str, Any], phase: str, **status: Any) -> None:
        known = job.get("status", {})
        failed = known.get("failed", 0) + (phase == "Failed")
        if phase == "Failed" and failed <= job["spec"]["backoffLimit"] and status["reason"] != "DeadlineExceeded":
            phase = "Retrying"
        self._set(job, jobDeploymentStatus=phase, failed=failed, endTime=_now(), **status)

    def _reset(self, job: dict[str, Any], phase: str) -> None:
        if self._cluster(job) is not None:
            self._delete_cluster(job)
            return
        empty = dict.fromkeys(("rayClusterName", "dashboardURL", "jobId", "message", "reason", "jobStatus"), "")
        self._set(job, jobDeploymentStatus=phase, **empty)

    def _finish(self, job: dict[str, Any]) -> None:
        """It is deleted: its job is told to stop, and not waited for."""
        status = job.get("status", {})
        if FINALIZER not in job["metadata"].get("finalizers", ()):
            return
        if status.get("jobStatus") not in TERMINAL and status.get("dashboardURL"):
            _http("POST", f"{status['dashboardURL']}/api/jobs/{status['jobId']}/stop")
        self._release(job)

    def _release(self, job: dict[str, Any]) -> None:
        metadata = job["metadata"]
        left = [each for each in metadata.get("finalizers", ()) if each != FINALIZER]
        self._patch(job, JOBS, {"metadata": {"finalizers": left, "resourceVersion": metadata["resourceVersion"]}})

    def _make_cluster(self, job: dict[str, Any]) -> None:
        metadata = job["metadata"]
        labels = {"ray.io/originated-from-cr-name": metadata["name"], "ray.io/originated-from-crd": "RayJob"}
        cluster = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "RayCluster",
            "metadata": {
                "name": job["status"]["rayClusterName"],
                "labels": metadata.get("labels", {}) | labels,
                "annotations": metadata.get("annotations", {}),
                "ownerReferences": [_owner(job, "RayJob")],
            },
            "spec": copy.deepcopy(job["spec"]["rayClusterSpec"]),
        }
        self.custom.create_namespaced_custom_object(
            GROUP, VERSION, metadata["namespace"], CLUSTERS, cluster, field_validation="Strict"
        )

    def _sync_cluster(self, cluster: dict[str, Any]) -> None:
        heads = self._heads(cluster)
        for pod in heads:
            if pod.status.phase in ("Succeeded", "Failed") and pod.metadata.deletion_timestamp is None:
                self.core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        if not heads:
            try:
                self.core.create_namespaced_pod(cluster["metadata"]["namespace"], _head(cluster))
            except ApiException as problem:
                if problem.status != 403:
                    raise
                self._refused(cluster, json.loads(problem.body)["message"])

    def _refused(self, cluster: dict[str, Any], why: str) -> None:
        where, name = cluster["metadata"]["namespace"], cluster["metadata"]["name"]
        event = {
            "metadata": {"name": f"{name}.refused", "namespace": where},
            "involvedObject": {
                "kind": "RayCluster",
                "name": name,
                "namespace": where,
                "uid": cluster["metadata"]["uid"],
            },
            "type": "Warning",
            "reason": "FailedToCreateHeadPod",
            "message": f"Failed to create head Pod {where}/, {why}",
            "lastTimestamp": _now(),
        }
        with suppress(ApiException):  # it is there already
            self.core.create_namespaced_event(where, event)

    def _heads(self, cluster: Mapping[str, Any]) -> list[Any]:
        selector = f"ray.io/cluster={cluster['metadata']['name']},ray.io/node-type=head"
        return list(self.core.list_namespaced_pod(cluster["metadata"]["namespace"], label_selector=selector).items)

    def _dashboard(self, cluster: Mapping[str, Any]) -> str | None:
        """Where the head of a cluster that is ready answers."""
        for pod in self._heads(cluster):
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None:
                # The client makes a text of its bytes that is none.
                log = self.core.read_namespaced_pod_log(
                    pod.metadata.name, pod.metadata.namespace, _preload_content=False
                )
                for line in log.data.decode().splitlines():
                    if line.startswith(_DASHBOARD):
                        return str(line.removeprefix(_DASHBOARD))
        return None

    def _cluster(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        where, name = job["metadata"]["namespace"], job["status"].get("rayClusterName")
        return next((each for each in self._list(CLUSTERS, where) if each["metadata"]["name"] == name), None)

    def _delete_cluster(self, job: Mapping[str, Any]) -> None:
        where, name = job["metadata"]["namespace"], job["status"]["rayClusterName"]
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, where, CLUSTERS, name)

    def _list(self, plural: str, namespace: str | None = None) -> list[dict[str, Any]]:
        if namespace is None:
            return list(self.custom.list_cluster_custom_object(GROUP, VERSION, plural)["items"])
        return list(self.custom.list_namespaced_custom_object(GROUP, VERSION, namespace, plural)["items"])

    def _set(self, job: Mapping[str, Any], **status: Any) -> None:
        where, name = job["metadata"]["namespace"], job["metadata"]["name"]
        change = {"status": status}
        self.custom.patch_namespaced_custom_object_status(GROUP, VERSION, where, JOBS, name, change)

    def _patch(self, job: Mapping[str, Any], plural: str, change: Mapping[str, Any]) -> None:
        where, name = job["metadata"]["namespace"], job["metadata"]["name"]
        self.custom.patch_namespaced_custom_object(GROUP, VERSION, where, plural, name, change)


def _head(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The head pod of a cluster."""
    name, group = cluster["metadata"]["name"], cluster["spec"]["headGroupSpec"]
    template = copy.deepcopy(group["template"])
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": name,
        "ray.io/node-type": "head",
        "ray.io/group": "headgroup",
        "ray.io/identifier": f"{name}-head",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    [container] = template["spec"]["containers"]
    params = {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
    given = params | group.get("rayStartParams", {})
    flags = " ".join(f"--{key}" if value == "true" else f"--{key}={value}" for key, value in given.items())
    # Where the template has a command, it would run after this one, which does not end.
    assert not {"command", "args"} & set(container), container
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"ulimit -n 65536; ray start --head {flags} "]
    container["ports"] = [{"name": "metrics", "containerPort": 8080}]
    container["env"] = [
        *container.get("env", ()),
        {"name": "RAY_CLUSTER_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['ray.io/cluster']"}}},
        {"name": "RAY_PORT", "value": "6379"},
        {"name": "RAY_ADDRESS", "value": "127.0.0.1:6379"},
        {"name": "RAY_USAGE_STATS_KUBERAY_IN_USE", "value": "1"},
    ]
    return {
        "metadata": {
            "generateName": f"{name}-head-",
            "labels": labels | template["metadata"].get("labels", {}),
            "annotations": template["metadata"].get("annotations", {}),
            "ownerReferences": [_owner(cluster, "RayCluster")],
        },
        "spec": template["spec"],
    }


def _owner(of: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind,
        "name": of["metadata"]["name"],
        "uid": of["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _http(method: str, url: str, body: Any = None) -> tuple[int, Any]:
    """Status and document; 0 if nobody answers."""
    try:
        answer = urllib3.request(method, url, json=body, timeout=5.0, retries=False)
    except urllib3.exceptions.HTTPError:
        return 0, None
    return answer.status, answer.json()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
