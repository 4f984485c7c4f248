"""What an Indexed Job and its pods say of each rank. Pure: objects in, as the API has them in JSON."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from diloco.executors.kubernetes_manifest import CONTAINER, RANK_LABELS
from diloco.executors.local import ERROR_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import Status

FAILURES_ANNOTATION = "batch.kubernetes.io/job-index-failure-count"
DISRUPTIONS_ANNOTATION = "batch.kubernetes.io/job-index-ignored-failure-count"
"""The Job controller's, on each pod: how many of its index's earlier pods ended so."""


@dataclass(frozen=True)
class RankState:
    """One rank: what the cluster says of it."""

    rank: int
    status: Status
    exit_code: int | None = None
    why: str | None = None
    """Of its end, or of its waiting."""
    pod: str | None = None
    """The newest one."""
    restarts: int = 0
    disruptions: int = 0
    """Evictions, drained nodes, reclaimed capacity."""


def rank_states(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], held: str | None = None) -> list[RankState]:
    """Every rank's state, in rank order. `held` is why the Job has no pods, if somebody said so."""
    status = job.get("status", {})
    succeeded, failed = indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes"))
    newest = newest_pods(pods)
    ending = outcome(job)
    found = []
    for rank in range(job["spec"]["completions"]):
        pod = newest.get(rank)
        if rank in succeeded:
            state = state_of(rank, "succeeded", pod, exit_code=0)
        elif rank in failed:
            state = state_of(rank, "failed", pod, why=why_ended(pod))
        elif ending is not None:
            state = state_of(rank, "cancelled", pod, why=ending[1])
        elif pod is None:
            state = state_of(rank, "pending", None, exit_code=None, why=held)
        elif pod["status"].get("phase") == "Running":
            state = state_of(rank, "running", pod, exit_code=None)
        elif pod["status"].get("phase") == "Pending":
            state = state_of(rank, "pending", pod, exit_code=None, why=why_waiting(pod))
        else:  # it has ended, and its successor is not there yet
            state = state_of(rank, "pending", pod, exit_code=None, why=f"restarts after: {why_ended(pod)}")
        found.append(state)
    return found


def state_of(
    rank: int, status: Status, pod: Mapping[str, Any] | None, *, exit_code: int | None = -1, why: str | None = None
) -> RankState:
    """A rank with what its pod says; its exit code too, unless one is given."""
    annotations = {} if pod is None else pod["metadata"].get("annotations", {})
    return RankState(
        rank,
        status,
        exit_code=terminated(pod).get("exitCode") if exit_code == -1 else exit_code,
        why=why,
        pod=None if pod is None else pod["metadata"]["name"],
        restarts=int(annotations.get(FAILURES_ANNOTATION, 0)),
        disruptions=int(annotations.get(DISRUPTIONS_ANNOTATION, 0)),
    )


def indexes(text: str | None) -> frozenset[int]:
    """The Job controller's way to write a set: `0,3-5`."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def newest_pods(pods: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The newest pod of each rank."""
    newest: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", failures(pod))):
        rank = rank_of(pod)
        if rank is not None:
            newest[rank] = pod
    return newest


def rank_of(pod: Mapping[str, Any]) -> int | None:
    """The rank of a run's pod, whatever wraps it; None for a pod that is no replica."""
    labels = pod["metadata"].get("labels", {})
    found = next((labels[name] for name in RANK_LABELS if name in labels), None)
    return None if found is None else int(found)


def failures(pod: Mapping[str, Any]) -> int:
    """How many pods of its index came before it."""
    annotations = pod["metadata"].get("annotations", {})
    return int(annotations.get(FAILURES_ANNOTATION, 0)) + int(annotations.get(DISRUPTIONS_ANNOTATION, 0))


def outcome(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """`Complete` or `Failed` with the reason in words, once the Job has ended or is bound to."""
    for condition in job.get("status", {}).get("conditions", ()):
        if condition["type"] in ("Complete", "Failed", "FailureTarget") and condition["status"] == "True":
            kind = "Complete" if condition["type"] == "Complete" else "Failed"
            return kind, condition.get("message") or condition.get("reason") or kind
    return None


def why_waiting(pod: Mapping[str, Any]) -> str | None:
    """Why a pod does not run yet, in the scheduler's or the kubelet's words."""
    status = pod["status"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason"))
    waiting = _container(pod).get("state", {}).get("waiting", {})
    if waiting.get("message"):
        return f"{waiting.get('reason')}: {waiting['message']}"
    reason: str | None = waiting.get("reason")
    return reason


def why_ended(pod: Mapping[str, Any] | None) -> str:
    """Why a pod ended: its own last error line, else what the kubelet says."""
    if pod is None:
        return "its pod is gone"
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"disrupted: {condition.get('message') or condition.get('reason')}"
    end = terminated(pod)
    lines = str(end.get("message", "")).splitlines()
    if end.get("reason") == "OOMKilled" and _error(lines) is None:
        return "killed for want of memory: give it more with --memory"
    return why_exited(end.get("exitCode"), lines, pod["status"].get("message"))


def why_exited(code: int | None, lines: Sequence[str], reason: str | None = None) -> str:
    """Why a process ended: the last error of its last lines, else the signal, else its exit code with `reason` or those
    lines.
    """
    if (error := _error(lines)) is not None:
        return error
    if code is not None and code > 128:
        with suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    reason = reason or " | ".join(line.strip() for line in lines[-3:] if line.strip())
    return f"exit code {code}" + (f": {reason}" if reason else "")


def terminated(pod: Mapping[str, Any] | None) -> dict[str, Any]:
    """How its container ended, empty while it has not."""
    found: dict[str, Any] = {} if pod is None else _container(pod).get("state", {}).get("terminated", {})
    return found


def _error(lines: Sequence[str]) -> str | None:
    found = (line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX))
    return next(found, None)


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, Any]] = pod["status"].get("containerStatuses", ())
    return next((each for each in found if each["name"] == CONTAINER), {})


def seconds_since_creation(job: Mapping[str, Any], now: datetime) -> float:
    """How old the Job is."""
    return (now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()
