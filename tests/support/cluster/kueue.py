"""The real Kueue controller beside the tests' control plane, and queues for it."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.cluster.control_plane import free_ports
from tests.support.engine import ROOT, require
from tests.support.namespace import NamespacedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.cluster import Cluster

API = "kueue.x-k8s.io/v1beta2"

# It looks for its metrics' certificate in this place, and nowhere else.
_SET_UP = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" /etc
mkdir -p /etc/kueue/metrics
cp -r "$2" /etc/kueue/metrics/certs
shift 2
exec "$@"
"""


def crds(pattern: str) -> list[Path]:
    """Definitions of other projects' resources: in `$DILOCO_CRDS`, else in `shared/crds` beside the checkout. Skips the
    test when they are not there.
    """
    folder = Path(os.environ.get("DILOCO_CRDS", ROOT.parent / "shared" / "crds"))
    found = sorted(folder.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {folder}: put the projects' CustomResourceDefinitions there, or set $DILOCO_CRDS")
    return found


def install(cluster: Cluster, pattern: str) -> None:
    """Install definitions, and wait until the API server serves them."""
    files = [option for path in crds(pattern) for option in ("--filename", str(path))]
    applied = cluster.kubectl("apply", "--server-side", *files)
    assert applied.returncode == 0, applied.stderr
    ready = cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *files)
    assert ready.returncode == 0, ready.stderr


@contextmanager
def kueue(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Runs the controller; its log is in `folder`."""
    binary = require("kueue")["kueue"]
    install(cluster, "kueue.x-k8s.io_*.yaml")
    cluster.namespace("kueue-system", enforce=None)
    health, metrics, webhook = free_ports(3)
    pair = cluster.plane.authority.pair("kueue")
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    shutil.copy(pair.certificate, certificates / "tls.crt")
    shutil.copy(pair.key, certificates / "tls.key")
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
        "webhook": {"port": webhook, "host": "127.0.0.1", "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "manageJobsWithoutQueueName": False,
        "integrations": {"frameworks": ["batch/job", "ray.io/rayjob"]},
        "featureGates": {"VisibilityOnDemand": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration))
    scratch = folder / "scratch"
    scratch.mkdir()
    with (folder / "kueue.log").open("w") as log:
        process = NamespacedProcess(
            _SET_UP,
            [
                *(str(scratch), str(certificates), str(binary)),
                *("--config", str(folder / "config.yaml"), "--kubeconfig", str(cluster.kubeconfig)),
            ],
            {"PATH": "/usr/bin:/bin"},
            lambda line: print(line, file=log, flush=True),
        )
        try:
            yield
        finally:
            process.stop(5.0)


def queue(
    cluster: Cluster, namespace: str, name: str, *, node_labels: Mapping[str, str] | None = None, **quotas: str
) -> None:
    """A LocalQueue of that name in the namespace, with a ClusterQueue of its own; pods that it admits must be on nodes
    with those labels.
    """
    flavor: dict[str, Any] = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": namespace}}
    if node_labels:
        flavor["spec"] = {"nodeLabels": dict(node_labels)}
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quotas.items()]
    owner = {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": namespace},
        "spec": {
            "namespaceSelector": {},
            "resourceGroups": [
                {"coveredResources": list(quotas), "flavors": [{"name": namespace, "resources": resources}]}
            ],
        },
    }
    local = {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": namespace},
    }
    applied = cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([flavor, owner, local]))
    assert applied.returncode == 0, applied.stderr
