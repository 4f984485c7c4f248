"""What these tests share: one control plane and one node, and a namespace for each test."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from diloco.embedded import environment
from tests.kubernetes.runs import Run, credentials
from tests.support.cluster import IMAGE, Cluster, Image, replica_image
from tests.support.engine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.embedded import EmbeddedS3

SHELL = "registry.test/shell:1"
"""An image whose containers run any command of this machine."""


class MakeRun(Protocol):
    """Makes a run; keywords are settings of the run or of its pods."""

    def __call__(self, **changes: Any) -> Run: ...


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests of this folder."""
    if os.geteuid() != 0:
        pytest.skip("the node's containers are made by mounts and other users' processes: run as root")
    shell = Image(entrypoint=("/bin/sh",), env={"PATH": "/usr/local/bin:/usr/bin:/bin"}, folder="/")
    with Cluster(
        tmp_path_factory.mktemp("cluster"), images={SHELL: shell, IMAGE: replica_image(PYTHONPATH=str(ROOT))}
    ) as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of this test, which enforces the restricted Pod Security Standard."""
    name = cluster.namespace(f"test-{secrets.token_hex(4)}")
    yield name
    cluster.core.delete_namespace(name)


@pytest.fixture
def make_run(cluster: Cluster, namespace: str, embedded_s3: EmbeddedS3) -> Iterator[MakeRun]:
    """Runs of this test, in its namespace."""
    credentials(cluster, namespace, embedded_s3)
    with environment(embedded_s3.env):
        yield lambda **changes: Run(cluster, namespace, embedded_s3.endpoint_url, f"r{secrets.token_hex(4)}", **changes)
