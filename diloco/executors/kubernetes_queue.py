"""What Kueue says of an object that it holds. https://kueue.sigs.k8s.io/docs/concepts/workload/"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diloco.errors import DilocoError
from diloco.executors.kubernetes_clients import try_to
from diloco.executors.kubernetes_manifest import QUEUE_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.executors.kubernetes_clients import Clients

_KUEUE = "kueue.x-k8s.io"


def why_suspended(clients: Clients, job: Mapping[str, Any]) -> str | None:
    """Why a suspended object is held, in Kueue's words; None for one that is not suspended."""
    if not job["spec"].get("suspend"):
        return None
    queue = job["metadata"]["labels"].get(QUEUE_LABEL)
    if queue is None:
        return f"the {job.get('kind', 'Job')} is suspended: `kubectl patch` it with suspend false"
    for version in ("v1beta2", "v1beta1"):
        with suppress(DilocoError):
            found = try_to(
                clients.custom.list_namespaced_custom_object,
                _KUEUE,
                version,
                job["metadata"]["namespace"],
                "workloads",
                label_selector=f"{_KUEUE}/job-uid={job['metadata']['uid']}",
            )
            for workload in (found or {}).get("items", ()):
                for condition in workload.get("status", {}).get("conditions", ()):
                    if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                        return f"queue {queue}: {condition['message']}"
    return f"queue {queue}: waits for its turn"
