"""A Kubernetes cluster for tests: the real control plane, and one node whose containers are processes here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kubernetes import client, config  # type: ignore[import-untyped]

from tests.support.cluster.container import Image, replica_image
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.kubelet import Kubelet

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.support.cluster.identity import PodIdentityAgent

IMAGE = "registry.test/diloco@sha256:" + "0" * 64
"""The project's image, as the node knows it."""

__all__ = ["IMAGE", "Cluster", "Image", "replica_image"]


class Cluster:
    """Use it as a context manager: it answers in some 5 s."""

    def __init__(
        self, folder: Path, *, images: Mapping[str, Image] | None = None, identity: PodIdentityAgent | None = None
    ) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._images = {IMAGE: replica_image(), **(images or {})}
        self._identity = identity
        self.plane = ControlPlane(folder)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.plane)
            self.api = config.new_client_from_config(str(self.plane.kubeconfig))
            self.core, self.batch = client.CoreV1Api(self.api), client.BatchV1Api(self.api)
            self.rbac = client.RbacAuthorizationV1Api(self.api)
            stack.callback(self.api.close)
            if self._identity is not None:
                self._identity.core, self._identity.authentication = self.core, client.AuthenticationV1Api(self.api)
            self.kubelet = stack.enter_context(
                Kubelet(self.plane, self._folder / "pods", images=self._images, identity=self._identity)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return self.plane.kubeconfig

    def namespace(self, name: str, *, enforce: str | None = "restricted") -> str:
        """Make a namespace with a Pod Security Standard; returns its name once pods can be made in it."""
        labels = {} if enforce is None else {"pod-security.kubernetes.io/enforce": enforce}
        self.core.create_namespace({"metadata": {"name": name, "labels": labels}})
        self.until(lambda: self.core.list_namespaced_service_account(name).items, "a default ServiceAccount")
        return name

    def kubeconfig_of(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig as a ServiceAccount."""
        request = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        answer = self.core.create_namespaced_service_account_token(service_account, namespace, request)
        path = self._folder / f"kubeconfig-{namespace}-{service_account}"
        return self.plane.write_kubeconfig(path, answer.status.token, namespace)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl to its end."""
        return subprocess.run(
            [
                str(Path(sys.executable).parent / "kubectl"),
                "--kubeconfig",
                str(kubeconfig or self.kubeconfig),
                *arguments,
            ],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._folder)},
        )

    def pods(self, namespace: str, selector: str = "") -> list[Any]:
        """The pods there, by name."""
        found = self.core.list_namespaced_pod(namespace, label_selector=selector).items
        return sorted(found, key=lambda pod: str(pod.metadata.name))

    @staticmethod
    def until(look: Callable[[], T], what: str, patience: float = 300.0) -> T:
        """What `look` returns once it is true; AssertionError after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not (found := look()):
            assert time.monotonic() < deadline, f"no {what} within {patience:g} s"
            time.sleep(0.1)
        return found
