"""Decoupled DiLoCo: language-model training by independent jobs that share nothing but an object store.

The names below load on first use: importing the package needs neither torch nor a cloud SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.exchange.allreduce import ObjectStoreAllReduce
    from diloco.executors.base import ReplicaHandle, ReplicaResult, ReplicaSpec, ServerlessExecutor
    from diloco.executors.local import LocalProcessExecutor
    from diloco.manager import ObjectStoreManager
    from diloco.outer import make_diloco_outer_loop
    from diloco.run import make_diloco_run
    from diloco.training import diloco_train

_HOME = {
    "LocalProcessExecutor": "diloco.executors.local",
    "ObjectStoreAllReduce": "diloco.exchange.allreduce",
    "ObjectStoreManager": "diloco.manager",
    "ReplicaHandle": "diloco.executors.base",
    "ReplicaResult": "diloco.executors.base",
    "ReplicaSpec": "diloco.executors.base",
    "ServerlessExecutor": "diloco.executors.base",
    "diloco_train": "diloco.training",
    "make_diloco_outer_loop": "diloco.outer",
    "make_diloco_run": "diloco.run",
}

__all__ = [
    "LocalProcessExecutor",
    "ObjectStoreAllReduce",
    "ObjectStoreManager",
    "ReplicaHandle",
    "ReplicaResult",
    "ReplicaSpec",
    "ServerlessExecutor",
    "diloco_train",
    "make_diloco_outer_loop",
    "make_diloco_run",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
