"""Replicas as the indexes of one Kubernetes Job, or of another kind of object that wraps the same pods.

The cluster supervises: the Job controller restarts a rank that died and gives up one that can't be helped, and nothing
that matters is in this process. A Job is found again by its run's label. The run's state is in the bucket: a Job with a
failed index ends as Failed, though the run may have its result.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError
from diloco.executors import kubernetes_jobs as jobs
from diloco.executors import kubernetes_limits as limits
from diloco.executors.base import ReplicaHandle, ReplicaResult
from diloco.executors.kubernetes_clients import Clients, TakenError, ask
from diloco.executors.kubernetes_logs import LogReader
from diloco.executors.kubernetes_manifest import (
    QUEUE_LABEL,
    RENDEZVOUS_ANNOTATION,
    RUN_LABEL,
)
from diloco.executors.kubernetes_workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.kubernetes_manifest import PodSettings

_WAIT_EVERY = 0.5


class KubernetesExecutor:
    """A :class:`~diloco.executors.base.ServerlessExecutor` on a cluster.

    `look_every` are the seconds between two looks at the Job; `stop_seconds` how long a Job's deletion may take, beside
    its pods' grace period.
    """

    backend_name = "kubernetes"
    supports_inter_replica_network = True

    def __init__(
        self,
        settings: PodSettings,
        *,
        clients: Clients | None = None,
        look_every: float = 2.0,
        stop_seconds: float = 120.0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.workload = WORKLOADS[settings.workload]
        self.clients = clients or Clients()
        self._look_every = look_every
        self._stop_seconds = stop_seconds
        self._note = on_note or (lambda _text: None)
        self._seen_at: float | None = None
        self._states: dict[int, jobs.RankState] = {}
        self._cancelled = False

    def check(self, specs: Sequence[ReplicaSpec]) -> None:
        """Raise one ConfigurationError that lists all that the cluster would refuse. Asks nobody."""
        limits.check(self.settings, specs)

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
        """Create the run's Job, or adopt it if it is there; one that has ended is replaced.

        Raises DilocoError if the cluster refuses it, or for some ranks only: the cluster restarts those itself.
        """
        self.check(specs)
        if sorted(spec.rank for spec in specs) != list(range(specs[0].world_size)):
            named = ", ".join(str(spec.rank) for spec in specs)
            raise DilocoError(
                f"rank {named}: the cluster restarts single ranks, and has given it up: start the run again with"
                f" `resume {self.settings.run_id}`"
            )
        self._create(specs[0])
        self._look()
        return [self._handle(spec.rank) for spec in specs]

    def existing(self) -> list[ReplicaHandle]:
        """The ranks of the run's Job, whoever started it, in order; none if there is no Job. Raises DilocoError."""
        self._look()
        return [self._handle(rank) for rank in sorted(self._states)]

    def job(self) -> dict[str, Any] | None:
        """The run's Job as the API has it, found by its label. Raises DilocoError."""
        found = self.workload.find(self.clients, self.settings.namespace, self._selector)
        # A stack replaces its Job by one of another name: for a while both are there.
        newest = sorted(
            found, key=lambda job: ("deletionTimestamp" not in job["metadata"], job["metadata"]["creationTimestamp"])
        )
        return dict(newest[-1]) if newest else None

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaHandle]:
        """The same handles with their present status; the cluster is asked once in `look_every` seconds."""
        if self._seen_at is None or time.monotonic() - self._seen_at >= self._look_every:
            with suppress(DilocoError):  # what was known before is shown until the cluster answers again
                self._look()
        return [replace(handle, **self._known(handle.rank)) for handle in handles]

    def states(self) -> list[jobs.RankState]:
        """What was last said of each rank."""
        return [self._states[rank] for rank in sorted(self._states)]

    def stream_logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        """Lines of one rank's pods so far, oldest first; with `follow`, until it ends."""
        for line in self.log_reader(handle.rank).lines(follow=follow, ended=lambda: self._have_ended([handle])):
            yield line.text

    def log_reader(self, rank: int | None = None) -> LogReader:
        """Reads the logs of one rank, or of all."""
        return LogReader(self.clients.core, self.settings.namespace, self._selector, rank)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Delete the run's Job, if one of these ranks has not ended, and return once none of its pods is left.

        Raises DilocoError if some still are after their grace period.
        """
        if any(not handle.has_ended for handle in self.poll(handles)):
            self._cancelled = True
            self._delete()
            self._look()

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        """Wait for all to end; TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._have_ended(handles):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{len(handles)} replicas have not ended after {timeout:g} s")
            time.sleep(min(_WAIT_EVERY, self._look_every))
        return sorted((self._result(handle) for handle in self.poll(handles)), key=lambda result: result.rank)

    def scale(self, replicas: int, *, policy: str, min_replicas: int) -> int:
        """Change how many replicas the running Job has; returns how many it had.

        All three numbers change in one patch: the API takes a new `completions` only with an equal `parallelism`.
        Raises ConfigurationError where it can't work, DilocoError if there is no running Job.
        """
        self.workload.refuse_scale()
        job = self.job()
        if job is None or self.workload.outcome(job) is not None:
            raise DilocoError(f"run {self.settings.run_id} has no running Job: `resume` starts it again")
        present = int(job["spec"]["completions"])
        if policy == "strict":
            raise ConfigurationError(
                "a strict run needs exactly the ranks that it was started with: start it with --policy skip"
            )
        if QUEUE_LABEL in job["metadata"]["labels"]:
            raise ConfigurationError(
                "a queued run keeps its size, for which its quota was reserved: cancel, and resume"
            )
        if replicas < min_replicas:
            raise ConfigurationError(
                f"--replicas {replicas} is below the run's --min-replicas {min_replicas}: no round could be averaged"
            )
        change = {"completions": replicas, "parallelism": replicas, "maxFailedIndexes": replicas - min_replicas}
        ask(self.clients.batch.patch_namespaced_job, job["metadata"]["name"], self.settings.namespace, {"spec": change})
        self._look()
        return present

    @property
    def _selector(self) -> str:
        return f"{RUN_LABEL}={self.settings.run_id}"

    def _create(self, spec: ReplicaSpec) -> None:
        settings = self.settings
        manifest = self.workload.manifest(settings, spec)
        while True:
            job = self.job()
            if job is not None:
                self._check_owner(job, spec)
                name = job["metadata"]["name"]
                if "deletionTimestamp" not in job["metadata"] and self.workload.outcome(job) is None:
                    self._note(f"job {name} is there already, and goes on")
                    self.workload.complete(self.clients, settings.namespace, job, manifest)
                    return
                self._note(f"job {name} has ended: it is replaced")
                self._delete()
            try:
                self.workload.create(self.clients, settings.namespace, manifest)
            except TakenError:
                if self.job() is None:
                    raise  # not this project's
            except DilocoError as problem:
                if self.job() is None:
                    raise
                # One of several objects could not be made: none of them stays.
                self._delete()
                raise type(problem)(f"{problem}: what had been made of the run is deleted again") from None
            else:
                return

    def _check_owner(self, job: dict[str, Any], spec: ReplicaSpec) -> None:
        theirs = job["metadata"].get("annotations", {}).get(RENDEZVOUS_ANNOTATION)
        if theirs != spec.rendezvous_uri:
            raise ConfigurationError(
                f"the {self.workload.title} {self.settings.namespace}/{job['metadata']['name']} is another run's, at"
                f" {theirs}, not at {spec.rendezvous_uri}: choose another --run-id"
            )

    def _delete(self) -> None:
        """Delete the run's Job in the foreground, and wait until neither it nor a pod of it is there."""
        settings = self.settings
        grace = settings.grace_seconds
        job = self.job()
        if job is not None:
            grace = self.workload.template(job)["spec"].get("terminationGracePeriodSeconds", grace)
            self.workload.delete(self.clients, settings.namespace, job)
        deadline = time.monotonic() + grace + self._stop_seconds
        while (left := [pod["metadata"]["name"] for pod in self._pods()]) or self.job() is not None:
            if time.monotonic() >= deadline:
                raise DilocoError(f"still stopping: {', '.join(left) or settings.name}: look again with `status`")
            time.sleep(_WAIT_EVERY)

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(
            self.clients.core.list_namespaced_pod, self.settings.namespace, label_selector=self._selector
        )["items"]
        return found

    def _look(self) -> None:
        """Ask the cluster about the whole run. Raises DilocoError."""
        job = self.job()
        if job is None:
            why = "the Job was deleted" if not self._cancelled else None
            self._states = {
                rank: state if state.status in ("succeeded", "failed") else replace(state, status="cancelled", why=why)
                for rank, state in self._states.items()
            }
        else:
            pods = self._pods()
            now = self.workload.rank_states(job, pods, self._held(job, pods))
            gone = {
                rank: replace(state, status="cancelled", why="the run was scaled down")
                for rank, state in self._states.items()
                if rank >= len(now)
            }
            self._states = gone | {state.rank: state for state in now}
        self._seen_at = time.monotonic()

    def _held(self, job: dict[str, Any], pods: Sequence[Any]) -> str | None:
        """Why a Job without pods has none, in the words of whoever holds it."""
        if len(pods) >= self.workload.replicas(job) or self.workload.outcome(job) is not None:
            return None
        if (queued := self.workload.held(self.clients, job)) is not None:
            return queued
        events = ask(
            self.clients.core.list_namespaced_event,
            self.settings.namespace,
            field_selector=f"involvedObject.uid={job['metadata']['uid']},reason=FailedCreate",
        )["items"]
        newest = max(events, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return None if newest is None else f"its pods are refused: {newest['message']}"

    def _known(self, rank: int) -> dict[str, Any]:
        state = self._states.get(rank)
        if state is None:
            return {}
        waits = state.why if state.status == "pending" else None
        return {"status": state.status, "exit_code": state.exit_code, "waits": waits}

    def _handle(self, rank: int) -> ReplicaHandle:
        settings = self.settings
        selector = f"{self.workload.rank_label}={rank},{self._selector}"
        where = f"kubectl logs --namespace {settings.namespace} --selector {selector}"
        handle = ReplicaHandle(rank, self.backend_name, f"{settings.name}-{rank}", "pending", log_location=where)
        return replace(handle, **self._known(rank))

    def _have_ended(self, handles: Sequence[ReplicaHandle]) -> bool:
        return all(handle.has_ended for handle in self.poll(handles))

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        state = self._states[handle.rank]
        metrics = {"preemptions": state.disruptions, "cluster_restarts": state.restarts, "pod": state.pod}
        error = None if state.status == "succeeded" else state.why
        return ReplicaResult(handle.rank, state.status, state.exit_code, metrics, error)

    def age(self, job: dict[str, Any]) -> float:
        """Seconds since the Job was created."""
        return jobs.seconds_since_creation(job, datetime.now(UTC))
