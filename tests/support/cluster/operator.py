"""What the stand-ins for other projects' operators have in common: their definitions, and a loop over the API."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from kubernetes.client import ApiException, ApiextensionsV1Api, CustomObjectsApi  # type: ignore[import-untyped]

from tests.support.cluster.kueue import crds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster import Cluster

_LOOK_EVERY = 0.1


@contextmanager
def definitions(cluster: Cluster, *names: str) -> Iterator[None]:
    """The API server knows the resources of these files."""
    paths = [path for name in names for path in crds(name)]
    files = [option for path in paths for option in ("--filename", str(path))]
    applied = cluster.kubectl("apply", "--server-side", *files)
    assert applied.returncode == 0, applied.stderr
    api = ApiextensionsV1Api(cluster.api)
    made = [yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["metadata"]["name"] for path in paths]

    def established() -> bool:
        conditions = [api.read_custom_resource_definition(name).status.conditions or () for name in made]
        return all(any(each.type == "Established" and each.status == "True" for each in found) for found in conditions)

    cluster.until(established, f"established {', '.join(made)}")
    yield
    deleted = cluster.kubectl("delete", "crd", *made, "--timeout=60s")
    assert deleted.returncode == 0, deleted.stderr


class Operator(ABC):
    """Acts in a thread of its own while it is used as a context manager; a problem of its own fails the test."""

    def __init__(self, cluster: Cluster) -> None:
        self.core, self.custom = cluster.core, CustomObjectsApi(cluster.api)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._problem: Exception | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert self._problem is None, self._problem

    @abstractmethod
    def look(self) -> None:
        """Look at all objects once, and do what is to be done."""

    @staticmethod
    def attempt(act: Callable[[dict[str, Any]], None], item: dict[str, Any]) -> None:
        """Do something with one object; one that cannot be served now keeps no other waiting."""
        try:
            act(item)
        except ApiException as problem:
            going = problem.status == 403 and "because it is being terminated" in str(problem.body)
            if not going and problem.status not in (404, 409):  # it or its namespace goes, or somebody was faster
                raise

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY):
            try:
                self.look()
            except Exception as problem:  # noqa: BLE001 - the test's thread says it
                self._problem = problem
                return
