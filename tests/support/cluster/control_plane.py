"""A real control plane on 127.0.0.1: etcd, API server, controllers and scheduler as guarded child processes."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
import urllib.request
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import yaml  # type: ignore[import-untyped]
from cryptography.hazmat.primitives.asymmetric import ec

from diloco import guard
from tests.support.cluster.certificates import Authority, write_key
from tests.support.engine import require

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

START_SECONDS = 90.0
"""4 s are usual."""
ISSUER = "https://kubernetes.default.svc"
CONTROLLERS = (
    "daemonset-controller",
    "job-controller",
    "pod-garbage-collector-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "namespace-controller",
    "garbage-collector-controller",
    "disruption-controller",
    "ttl-after-finished-controller",
)
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


class ControlPlane:
    """Use it as a context manager. `kubeconfig` is an administrator's; logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._token = secrets.token_hex(16)
        self.authority = Authority(folder / "certificates")
        self.kubeconfig = folder / "kubeconfig"
        self.server = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> Path:
        """A kubeconfig with a bearer token."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.server, "certificate-authority": str(self.authority.certificate)},
                }
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
        return path

    def spawn(self, name: str, *options: str, program: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a program of the cluster; it ends with the control plane."""
        binary = program or self._binaries[name]
        with (self._folder / f"{name}.log").open("ab") as log:
            process = guard.spawn([str(binary), *options], env={"PATH": "/usr/bin:/bin"}, output=log, grace=3.0)
        self._stack.callback(guard.stop, [process])
        return process

    def _start(self) -> None:
        self._binaries = require(*BINARIES)
        etcd, peer, api, controllers, scheduler = free_ports(5)
        folder = self._folder
        self.server = f"https://127.0.0.1:{api}"
        write_key(folder / "service-accounts.key", ec.generate_private_key(ec.SECP256R1()))
        tokens = folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f"{self._token},administrator,administrator,system:masters\n")
        serving = self.authority.pair("kube-apiserver")
        to_kubelet = self.authority.pair("kube-apiserver-kubelet-client", groups=("system:masters",))
        authority = str(self.authority.certificate)
        self.spawn(
            "etcd",
            *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"),
            *(
                "--listen-client-urls",
                f"http://127.0.0.1:{etcd}",
                "--advertise-client-urls",
                f"http://127.0.0.1:{etcd}",
            ),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
        )
        server = self.spawn(
            "kube-apiserver",
            *("--etcd-servers", f"http://127.0.0.1:{etcd}"),
            *("--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(api)),
            *("--tls-cert-file", str(serving.certificate), "--tls-private-key-file", str(serving.key)),
            *("--token-auth-file", str(tokens), "--authorization-mode", "Node,RBAC"),
            *("--service-account-key-file", str(folder / "service-accounts.key")),
            *("--service-account-signing-key-file", str(folder / "service-accounts.key")),
            *("--service-account-issuer", ISSUER, "--service-cluster-ip-range", "10.0.0.0/24"),
            *("--kubelet-certificate-authority", authority, "--kubelet-preferred-address-types", "InternalIP"),
            *("--kubelet-client-certificate", str(to_kubelet.certificate), "--kubelet-client-key", str(to_kubelet.key)),
            *("--endpoint-reconciler-type", "none"),
        )
        self._wait_until_ready(server)
        config = str(self.write_kubeconfig(self.kubeconfig, self._token))
        self.spawn(
            "kube-controller-manager",
            *("--kubeconfig", config, "--leader-elect=false"),
            *("--bind-address", "127.0.0.1", "--secure-port", str(controllers)),
            *("--service-account-private-key-file", str(folder / "service-accounts.key")),
            *("--root-ca-file", authority, "--controllers", ",".join(CONTROLLERS)),
        )
        self.spawn(
            "kube-scheduler",
            *("--kubeconfig", config, "--leader-elect=false"),
            *("--bind-address", "127.0.0.1", "--secure-port", str(scheduler)),
        )

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        opener.addheaders = [("Authorization", f"Bearer {self._token}")]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(OSError), opener.open(f"{self.server}/readyz", timeout=2):
                return
            time.sleep(0.05)
        log = self._folder / "kube-apiserver.log"
        raise RuntimeError(f"the API server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has at the moment."""
    with ExitStack() as probes:
        found: list[int] = []
        for _ in range(count):
            probe: Any = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
        return found
