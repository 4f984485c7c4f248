"""Replicas as SageMaker training jobs, one single-instance job a rank.

Nothing that matters is in this process: the jobs are found again by their names, known by their tags, and the run's
state is in the bucket. SageMaker itself starts an interrupted spot job again, as the same job; what has ended for good
is relaunched by :mod:`diloco.run` as the rank's next submission.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco.cost import Prices, dollars
from diloco.errors import ConfigurationError, DilocoError
from diloco.executors import sagemaker_errors as errors
from diloco.executors import sagemaker_jobs as jobs
from diloco.executors import sagemaker_limits as limits
from diloco.executors.base import ReplicaHandle, ReplicaResult
from diloco.executors.sagemaker_clients import Clients
from diloco.executors.sagemaker_logs import GROUP, LogReader
from diloco.executors.sagemaker_request import parse_job_name
from diloco.executors.sagemaker_submit import AT_ONCE, Submitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.sagemaker_request import JobSettings

_WAIT_EVERY = 1.0


class SageMakerExecutor:
    """A :class:`~diloco.executors.base.ServerlessExecutor` on SageMaker.

    `describe_every` are the seconds between two looks at a job; `max_cost` are the dollars after which
    :meth:`over_budget` says so; the others are :class:`Submitter`'s.
    """

    backend_name = "sagemaker"
    supports_inter_replica_network = False

    def __init__(
        self,
        settings: JobSettings,
        *,
        clients: Clients | None = None,
        prices: Prices | None = None,
        max_cost: float | None = None,
        describe_every: float = 10.0,
        on_note: Callable[[str], None] | None = None,
        **submitting: Any,
    ) -> None:
        self.settings = settings
        self.clients = clients or Clients(settings.region)
        self._submitter = Submitter(self.clients, settings, on_note=on_note, **submitting)
        self.prices = prices or Prices.load()
        self._max_cost = max_cost
        self._describe_every = describe_every
        self._described: dict[str, tuple[float, dict[str, Any]]] = {}
        """What was last said of each job of the run, and when (monotonic seconds)."""
        self._cancelled: set[str] = set()

    def check(self, specs: Sequence[ReplicaSpec]) -> None:
        """Raise one ConfigurationError that lists all that SageMaker would refuse, or one for a cost that can't be
        watched. Asks nobody.
        """
        limits.check(self.settings, specs)
        unknown = [kind for kind in self.settings.instance_types if self.prices.per_hour(kind) is None]
        if self._max_cost is not None and unknown:
            raise ConfigurationError(
                f"--max-cost {self._max_cost:g}: the price of {', '.join(unknown)} is not in the table of "
                f"{self.prices.date}, so what the run costs would not be seen: give --prices FILE with it, or leave "
                "--max-cost out"
            )

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
        """Submit a job for each rank, or adopt the one that this run already has; all, or none.

        Raises DilocoError that names the rank, the reason, and what is left running.
        """
        self.check(specs)
        names = self._submitter.submit_all(specs)
        return [self._handle(spec.rank, name) for spec, name in zip(specs, names, strict=True)]

    def existing(self) -> list[ReplicaHandle]:
        """The newest job of each rank that this run ever had, from any machine, in rank order. Raises DilocoError."""
        found = self._submitter.names()
        now = time.monotonic()
        earlier = [name for names in found.values() for name in names[:-1]]
        self._describe_all([name for name in earlier if self._is_due(name, now)])  # for what they cost
        return self.poll([self._handle(rank, names[-1]) for rank, names in found.items()])

    def look_again(self, replicas: int) -> list[ReplicaHandle]:
        """The newest job of each rank, those that another launcher has submitted since :meth:`existing` included; lists
        nothing.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        known = self.poll([self._handle(rank, name) for rank, name in self._submitter.newest.items()])
        open_ranks = {*range(replicas)} - {handle.rank for handle in known}
        open_ranks |= {handle.rank for handle in known if handle.status in ("failed", "cancelled")}
        for rank in sorted(open_ranks):
            with suppress(BotoCoreError, ClientError):
                while self._submitter.follow(rank) is not None:
                    pass
        return self.poll([self._handle(rank, name) for rank, name in self._submitter.newest.items()])

    def give_up(self) -> None:
        """Make a launch that is under way in another thread end soon, as if a rank could not be submitted: at once,
        also in a signal's handler.
        """
        self._submitter.give_up()

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaHandle]:
        """The same handles with their present status; a job is described once in `describe_every` seconds."""
        now = time.monotonic()
        self._describe_all([handle.job_id for handle in handles if self._is_due(handle.job_id, now)])
        return [self._updated(handle) for handle in handles]

    def stream_logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        """Lines of one job's log so far, all its starts; with `follow`, until it ends."""
        reader = LogReader(self.clients.logs, f"{handle.job_id}/")
        for line in reader.lines(follow=follow, ended=lambda: self._has_ended([handle])):
            yield line.text

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Stop them, release what they keep warm, and return once nothing of them runs. Raises DilocoError if some
        still do after SageMaker's own bound.
        """
        running = [handle.job_id for handle in self.poll(handles) if not handle.has_ended]
        self._cancelled.update(running)
        left = self._submitter.stop(running)
        self._describe_all(running)
        self.release([handle for handle in handles if handle.job_id in running])
        if left:
            raise DilocoError(f"still stopping: {', '.join(left)}: look again with `status`")

    def release(self, handles: Sequence[ReplicaHandle]) -> list[str]:
        """Give back the instances that are kept warm after these jobs; returns the jobs' names. Raises DilocoError."""
        from botocore.exceptions import BotoCoreError, ClientError

        warm = [handle.job_id for handle in handles if jobs.warm_pool(self._job(handle.job_id)) == "Available"]
        for name in warm:
            try:
                self.clients.sagemaker.update_training_job(
                    TrainingJobName=name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
                )
            except (BotoCoreError, ClientError) as problem:
                raise errors.explained(problem) from None
        self._describe_all(warm)
        return warm

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        """Wait for all to end; TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_ended(handles):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{len(handles)} jobs have not ended after {timeout:g} s")
            time.sleep(min(_WAIT_EVERY, self._describe_every))
        return sorted((self._result(handle) for handle in handles), key=lambda result: result.rank)

    def job(self, handle: ReplicaHandle) -> dict[str, Any]:
        """What was last said of a job (:mod:`diloco.executors.sagemaker_jobs` reads it). Raises DilocoError."""
        return self._job(handle.job_id)

    def spent(self) -> tuple[float, frozenset[str]]:
        """Dollars so far of all jobs of the run that are known here, and the types whose price is not."""
        known = [job for _, job in self._described.values()]
        return dollars(self.prices, [(jobs.instance_type(job), jobs.billed_seconds(job)) for job in known])

    def over_budget(self) -> str | None:
        """Why the run must end, once it has cost `max_cost`."""
        spent, _ = self.spent()
        if self._max_cost is None or spent < self._max_cost:
            return None
        return (
            f"the run has cost about ${spent:.2f} and --max-cost is ${self._max_cost:g}: its jobs were stopped; the"
            " same run id with more goes on"
        )

    def _handle(self, rank: int, name: str) -> ReplicaHandle:
        return ReplicaHandle(
            rank,
            self.backend_name,
            name,
            "pending",
            log_location=f"{GROUP}: {name}/",
            adopted=name in self._submitter.adopted,
        )

    def _updated(self, handle: ReplicaHandle) -> ReplicaHandle:
        if handle.job_id not in self._described:
            return handle  # SageMaker could not be asked yet
        job = self._described[handle.job_id][1]
        return replace(handle, status=jobs.status(job), exit_code=jobs.exit_code(job))

    def _is_due(self, name: str, now: float) -> bool:
        if name not in self._described:
            return True
        at, job = self._described[name]
        return not jobs.has_ended(job) and now - at >= self._describe_every

    def _describe_all(self, names: Sequence[str]) -> None:
        """Describe jobs; one that can't be now keeps what was said before."""
        from botocore.exceptions import BotoCoreError, ClientError

        def describe(name: str) -> None:
            try:
                job = self._submitter.describe(name)
            except (BotoCoreError, ClientError):
                return
            if job is None:  # deleted by somebody: it will not come back
                job = self._deleted(name)
            self._described[name] = time.monotonic(), job

        if len(names) == 1:
            describe(names[0])
        elif names:
            with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
                list(pool.map(describe, names))

    def _deleted(self, name: str) -> dict[str, Any]:
        known = self._described.get(name)
        gone = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped", "TrainingJobName": name}
        return {
            "ResourceConfig": {"InstanceType": self.settings.instance_types[0]},
            **(known[1] if known else {}),
            **gone,
        }

    def _job(self, name: str) -> dict[str, Any]:
        if name not in self._described:
            self._describe_all([name])
        if name not in self._described:
            raise DilocoError(f"SageMaker does not tell anything of {name}: check the network and the credentials")
        return self._described[name][1]

    def _has_ended(self, handles: Sequence[ReplicaHandle]) -> bool:
        return all(handle.has_ended for handle in self.poll(handles))

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        job = self._job(handle.job_id)
        status = jobs.status(job)
        error = jobs.why(job)
        if status == "cancelled" and handle.job_id not in self._cancelled:
            error = f"{handle.job_id} was stopped by somebody else"
        parsed = parse_job_name(handle.job_id)
        metrics = {
            "preemptions": jobs.interruptions(job),
            "job": handle.job_id,
            "submission": parsed[1] if parsed is not None else None,
            "instance_type": jobs.instance_type(job),
            "billed_seconds": jobs.billed_seconds(job),
            "model_artifacts": job.get("ModelArtifacts", {}).get("S3ModelArtifacts") or None,
        }
        return ReplicaResult(handle.rank, status, jobs.exit_code(job), metrics, error)
