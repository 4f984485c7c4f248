"""A kubelet whose containers are processes of this machine: one Ready node, and every pod that is bound to it.

It keeps to what the API promises of a kubelet: phases, exit codes, conditions, deletion by SIGTERM and, after the grace
period, SIGKILL, and logs on its own port. So the real controllers decide about everything else.
"""

from __future__ import annotations

import datetime
import shutil
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import urllib3
from kubernetes import client, config, watch  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]

from tests.support.cluster import pod as pods
from tests.support.cluster.container import Image, PodContainer
from tests.support.cluster.logs import ContainerLog, LogServer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.cluster.control_plane import ControlPlane
    from tests.support.cluster.identity import PodIdentityAgent

_LOOK_EVERY = 0.02
_PATCH_SECONDS = 20.0
CAPACITY = {"cpu": "32", "memory": "64Gi", "pods": "200", "ephemeral-storage": "100Gi"}


class Kubelet:
    """Use it as a context manager. `images` are those that it can pull."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        *,
        images: Mapping[str, Image],
        node: str = "node-1",
        labels: Mapping[str, str] | None = None,
        identity: PodIdentityAgent | None = None,
    ) -> None:
        self.node = node
        self.images = dict(images)
        self.identity = identity
        self.core = client.CoreV1Api(config.new_client_from_config(str(plane.kubeconfig)))
        self._folder = folder
        self._labels = {"kubernetes.io/hostname": node, **(labels or {})}
        self._logs = LogServer(plane.authority)
        self._running: dict[str, _Pod] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watch_stream = watch.Watch()

    def __enter__(self) -> Self:
        self._logs.start()
        self._register()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watch_stream.stop()
        with self._lock:
            running = list(self._running.values())
        for each in running:
            each.kill()
        for each in running:
            each.join()
        self._logs.stop()

    def kill(self, namespace: str, name: str) -> None:
        """SIGKILL a pod's process, as an out-of-memory killer does."""
        with self._lock:
            found = [each for each in self._running.values() if each.is_named(namespace, name)]
        found[0].kill()

    def set_capacity(self, **resources: str) -> None:
        """Change what the node has; names with `_` for `/`: `nvidia.com_gpu="1"`."""
        changed = {name.replace("_", "/"): value for name, value in resources.items()}
        status = {"capacity": CAPACITY | changed, "allocatable": CAPACITY | changed}
        self.core.patch_node_status(self.node, {"status": status})

    def _register(self) -> None:
        now = _now()
        self.core.create_node({"metadata": {"name": self.node, "labels": self._labels}})
        status = {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.node}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.port}},
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
            ],
        }
        self.core.patch_node_status(self.node, {"status": status})
        # New nodes are tainted until a node controller has looked at them; none runs here.
        self.core.patch_node(self.node, {"spec": {"taints": []}})

    def _watch(self) -> None:
        while not self._stopping.is_set():
            with suppress(ApiException, urllib3.exceptions.HTTPError):
                for event in self._watch_stream.stream(
                    self.core.list_pod_for_all_namespaces,
                    field_selector=f"spec.nodeName={self.node}",
                    timeout_seconds=60,
                ):
                    self._see(event["type"], event["object"])
                    if self._stopping.is_set():
                        return
            self._stopping.wait(_LOOK_EVERY)

    def _see(self, kind: str, pod: Any) -> None:
        uid = pod.metadata.uid
        with self._lock:
            mine = self._running.get(uid)
            if kind == "DELETED":
                if mine is not None:
                    mine.forget()
                return
            if mine is None and pod.status.phase not in ("Succeeded", "Failed"):
                mine = self._running[uid] = _Pod(self, pod, self._folder / uid, self._logs)
                mine.start()
        if pod.metadata.deletion_timestamp is not None:
            if mine is not None:
                mine.delete(pod.metadata.deletion_grace_period_seconds or 0)
            else:  # it had ended before this kubelet saw it
                threading.Thread(target=delete_now, args=(self.core, pod), daemon=True).start()


class _Pod:
    """One pod and its process, in a thread of its own. Pods here have one container."""

    def __init__(self, kubelet: Kubelet, pod: Any, folder: Path, logs: LogServer) -> None:
        self._kubelet = kubelet
        self._pod = pod
        self._folder = folder
        self._container = pod.spec.containers[0]
        self.log = ContainerLog()
        logs.add(pod.metadata.namespace, pod.metadata.name, self._container.name, self.log)
        self._changed = threading.Event()
        self._grace: float | None = None
        self._killed = False
        self._forgotten = False
        self._started: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(_PATCH_SECONDS)

    def is_named(self, namespace: str, name: str) -> bool:
        return bool((self._pod.metadata.namespace, self._pod.metadata.name) == (namespace, name))

    def delete(self, grace: float) -> None:
        """Deletion was asked for, or asked for anew with another grace period."""
        self._grace = grace if self._grace is None else min(self._grace, grace)
        self._changed.set()

    def kill(self) -> None:
        self._killed = True
        self._changed.set()

    def forget(self) -> None:
        """It is gone from the API: nothing of it may go on."""
        self._forgotten = True
        self.kill()

    def _run(self) -> None:
        try:
            code = self._start_and_wait()
            self.log.close()
            if code is not None:
                self._report_end(code)
            while self._grace is None and not self._forgotten and not self._killed:
                self._wait()
            if self._grace is not None and not self._forgotten:
                delete_now(self._kubelet.core, self._pod)
        finally:
            self.log.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start_and_wait(self) -> int | None:
        """The exit code, or None if it was never started."""
        container = self._prepare()
        if container is None:
            return None
        self._started = _now()
        self._patch("Running", {"running": {"startedAt": self._started}}, ready=True)
        deadline: float | None = None
        hook = None
        told = False
        while (code := container.poll()) is None:
            if self._killed:
                container.kill()
            elif self._grace is not None and deadline is None:
                deadline = time.monotonic() + self._grace
                hook = self._pre_stop(container)
            elif deadline is not None and time.monotonic() >= deadline:
                container.kill()
            elif deadline is not None and not told and (hook is None or hook.poll() is not None):
                told = True
                container.terminate()
            self._wait()
        return code

    def _pre_stop(self, container: PodContainer) -> subprocess.Popen[bytes] | None:
        lifecycle = self._container.lifecycle
        found = None if lifecycle is None else lifecycle.pre_stop
        return None if found is None else container.hook(found._exec.command)

    def _wait(self) -> None:
        self._changed.wait(_LOOK_EVERY)
        self._changed.clear()

    def _prepare(self) -> PodContainer | None:
        """Pull the image, make the container; says in the pod's status what keeps it from starting, and tries again."""
        said: tuple[str, str] | None = None
        again = 0.0
        while self._grace is None and not self._killed:
            if time.monotonic() >= again:
                try:
                    return self._make()
                except LookupError:
                    problem = ("ErrImagePull", f"image {self._container.image} is in no registry")
                except pods.CreateContainerConfigError as error:
                    problem = ("CreateContainerConfigError", str(error))
                if problem != said:
                    said = problem
                    self._patch("Pending", {"waiting": {"reason": problem[0], "message": problem[1]}}, ready=False)
                again = time.monotonic() + 0.5
            self._wait()
        return None

    def _make(self) -> PodContainer:
        kubelet, pod, container = self._kubelet, self._pod, self._container
        image = kubelet.images[container.image]
        user = pods.user(pod, container)
        env = pods.environment(kubelet.core, pod, container, image.env)
        self._folder.mkdir(parents=True, exist_ok=True)
        tokens = pods.projected(kubelet.core, pod, self._folder / "projected")
        mounts = []
        if kubelet.identity is not None:
            injected = kubelet.identity.inject(pod, self._folder / "identity")
            env |= injected.env
            mounts += injected.mounts
        mounts += pods.mounts(pod, container, self._folder / "volumes", tokens)
        return PodContainer(
            pods.command(container, image.entrypoint, env),
            env,
            image=image,
            user=user,
            mounts=mounts,
            read_only=bool(getattr(container.security_context, "read_only_root_filesystem", None)),
            scratch=self._folder / "scratch",
            lines=self.log.write,
        )

    def _report_end(self, code: int) -> None:
        reason = "Completed" if code == 0 else "OOMKilled" if self._killed else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": self._started, "finishedAt": _now()}
        if code != 0 and self._container.termination_message_policy == "FallbackToLogsOnError":
            ended["message"] = self.log.end()
        self._patch("Succeeded" if code == 0 else "Failed", {"terminated": ended}, ready=False)

    def _patch(self, phase: str, state: Mapping[str, Any], *, ready: bool) -> None:
        now, container = _now(), self._container
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": "127.0.0.1",
            "startTime": self._started or now,
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": now}],
            "containerStatuses": [
                {
                    "name": container.name,
                    "image": container.image,
                    "imageID": container.image,
                    "ready": ready,
                    "restartCount": 0,
                    "state": dict(state),
                }
            ],
        }
        _insist(
            lambda: self._kubelet.core.patch_namespaced_pod_status(
                self._pod.metadata.name, self._pod.metadata.namespace, {"status": status}
            )
        )


def delete_now(core: Any, pod: Any) -> None:
    """Remove a pod whose processes are gone from the API."""
    options = client.V1DeleteOptions(grace_period_seconds=0, preconditions=client.V1Preconditions(uid=pod.metadata.uid))
    _insist(lambda: core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, body=options))


def _insist(call: Any) -> None:
    """Try until the API server has answered; a pod that is gone, or is another of that name, needs nothing."""
    deadline = time.monotonic() + _PATCH_SECONDS
    while time.monotonic() < deadline:
        try:
            call()
        except ApiException as problem:
            if problem.status in (404, 409):
                return
        except urllib3.exceptions.HTTPError:
            pass
        else:
            return
        time.sleep(0.1)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
