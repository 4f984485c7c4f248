"""Logs of a run's pods, merged by time: no line twice and none missed over reconnections and restarted ranks.

The API stamps each line with nanoseconds, but resumes by whole seconds only, so what was seen of a pod is counted by
stamp. https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#get-read-log-of-the-specified-pod
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.errors import DilocoError
from diloco.executors.kubernetes_clients import TIMEOUT, ask, explained
from diloco.executors.kubernetes_jobs import failures, rank_of
from diloco.executors.kubernetes_manifest import CONTAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOK_EVERY = 1.0
"""Seconds between two looks at logs that are followed."""


@dataclass(frozen=True)
class LogLine:
    """One line; `stamp` is RFC 3339 in UTC with nine decimals, so it sorts as text."""

    stamp: str
    rank: int
    text: str


class LogReader:
    """Reads pods that `selector` names, of one rank or of all."""

    def __init__(self, core: Any, namespace: str, selector: str, rank: int | None = None) -> None:
        self._core = core
        self._namespace = namespace
        self._selector = selector
        self._rank = rank
        self._seen: dict[str, tuple[str, int]] = {}
        """Pod's uid → the newest stamp, and how many lines had it. Volcano gives successors the same name."""
        self._finished: set[str] = set()

    def lines(self, *, follow: bool, ended: Callable[[], bool], look_every: float = LOOK_EVERY) -> Iterator[LogLine]:
        """Lines so far, merged; with `follow`, go on until `ended`. Raises DilocoError if the API can't be read.

        While it is followed, an API that does not answer is asked again.
        """
        while True:
            over = not follow or ended()  # looked at before reading: what was written last is read below
            try:
                yield from self._new()
            except DilocoError:
                if over:
                    raise
            if over:
                return
            time.sleep(look_every)

    def _new(self) -> list[LogLine]:
        """All lines that were not read yet, of all pods, by time."""
        pods = ask(self._core.list_namespaced_pod, self._namespace, label_selector=self._selector)["items"]
        found: list[LogLine] = []
        for pod in sorted(pods, key=failures):
            uid, rank = pod["metadata"]["uid"], rank_of(pod)
            if rank is None or self._rank not in (None, rank):
                continue
            if uid in self._finished or pod["status"].get("phase") == "Pending":
                continue
            found += self._read(uid, pod["metadata"]["name"], rank)
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                self._finished.add(uid)
        return sorted(found, key=lambda line: line.stamp)

    def _read(self, uid: str, pod: str, rank: int) -> list[LogLine]:
        newest, count = self._seen.get(uid, ("", 0))
        since = {"since_seconds": _seconds_since(newest)} if newest else {}
        lines: list[LogLine] = []
        skipped = 0
        for text in self._log(pod, **since).splitlines():
            stamp, _, line = text.partition(" ")
            if stamp < newest:
                continue
            if stamp == newest and skipped < count:
                skipped += 1
                continue
            lines.append(LogLine(stamp, rank, line))
        if lines:
            last = lines[-1].stamp
            same = sum(1 for line in lines if line.stamp == last)
            self._seen[uid] = last, same + (count if last == newest else 0)
        return lines

    def _log(self, pod: str, **since: int) -> str:
        from kubernetes.client import ApiException  # type: ignore[import-untyped]
        from urllib3.exceptions import HTTPError

        try:
            answer = self._core.read_namespaced_pod_log(
                pod,
                self._namespace,
                container=CONTAINER,
                timestamps=True,
                _preload_content=False,
                _request_timeout=TIMEOUT,
                **since,
            )
            data: bytes = answer.data
        except ApiException as problem:
            if problem.status in (400, 404):  # not started yet, or gone
                return ""
            raise explained(problem) from None
        except HTTPError as problem:
            raise DilocoError(f"the log of {pod} can't be read: {problem}") from None
        return data.decode(errors="replace")


def _seconds_since(stamp: str) -> int:
    """How far to go back, with a margin for clocks that differ; what was seen before is left out by its stamp."""
    from datetime import UTC, datetime

    moment = datetime.fromisoformat(stamp[:26] + "+00:00")
    return max(1, int((datetime.now(UTC) - moment).total_seconds()) + 60)
