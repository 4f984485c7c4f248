"""Submitting ranks: one job for each, however often it is tried, and none left behind.

A rank's jobs are numbered; the number is in the name, and SageMaker lets a name exist once. So a second launcher, or
the same one after a lost answer, is told that the name is taken, recognises its run's tags, and adopts the job. Numbers
of jobs that have ended are skipped. Several launchers at once waste only calls: they end up with the same jobs.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError
from diloco.executors import sagemaker_errors as errors
from diloco.executors import sagemaker_jobs as jobs
from diloco.executors.sagemaker_request import identity, job_name, parse_job_name, training_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.sagemaker_clients import Clients
    from diloco.executors.sagemaker_request import JobSettings

RATE = 4.5
"""CreateTrainingJob calls a second. SageMaker publishes no figure; 5 is what accounts see."""
SETTLE_SECONDS = 120.0
"""How long a refusal that may pass by itself is tried again."""
AT_ONCE = 4
"""Calls at the same time, but for creations, which are serial."""
STOP_SECONDS = 240.0
"""How long a job may take to stop: SageMaker itself waits 120 s for the container, and then uploads."""


class Submitter:
    """Submits the ranks of one run. Times are in seconds, `rate` is in calls a second."""

    def __init__(
        self,
        clients: Clients,
        settings: JobSettings,
        *,
        rate: float = RATE,
        settle_seconds: float = SETTLE_SECONDS,
        settle_every: float = 1.0,
        stop_seconds: float = STOP_SECONDS,
        look_every: float = 2.0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._rate = rate
        self._settle_seconds = settle_seconds
        self._settle_every = settle_every
        self._stop_seconds = stop_seconds
        self._look_every = look_every
        self._note = on_note or (lambda _text: None)
        self._chance = random.Random()
        self._next_at = 0.0
        self.adopted: set[str] = set()
        """Jobs that were there already."""
        self._given_up = threading.Event()
        self._listed = False
        self._newest: dict[int, int] = {}
        self._types: dict[int, tuple[str, ...]] = {}
        """Each rank's instance types, the one to try next first."""

    def names(self) -> dict[int, list[str]]:
        """All jobs of the run that SageMaker lists, by rank, in the order of their submission. Raises DilocoError."""
        from botocore.exceptions import BotoCoreError, ClientError

        found: dict[int, list[tuple[int, str]]] = {}
        try:
            pages = self._clients.sagemaker.get_paginator("list_training_jobs").paginate(
                NameContains=self._settings.name_prefix[:63], PaginationConfig={"PageSize": 100}
            )
            for page in pages:
                for entry in page["TrainingJobSummaries"]:
                    name = entry["TrainingJobName"]
                    parsed = parse_job_name(name)
                    if parsed is not None and name == job_name(self._settings, *parsed):
                        found.setdefault(parsed[0], []).append((parsed[1], name))
        except (BotoCoreError, ClientError) as problem:
            raise errors.explained(problem) from None
        self._listed = True
        self._newest |= {rank: max(each)[0] for rank, each in found.items()}
        return {rank: [name for _, name in sorted(each)] for rank, each in sorted(found.items())}

    @property
    def newest(self) -> dict[int, str]:
        """Each rank's newest job that is known here, whether it runs or not."""
        return {rank: job_name(self._settings, rank, number) for rank, number in sorted(self._newest.items())}

    def follow(self, rank: int) -> str | None:
        """The name of the rank's next job, if another launcher has submitted it: asked for by its name, since names
        count up. Raises botocore's errors.
        """
        number = self._newest.get(rank, 0) + 1
        name = job_name(self._settings, rank, number)
        if self.describe(name) is None:
            return None
        self._newest[rank] = number
        return name

    def give_up(self) -> None:
        """Make a submission that is under way in another thread, and each later one, end soon: it stops what it has
        submitted and raises DilocoError. May be called in a signal's handler.
        """
        self._given_up.set()

    def submit_all(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        """Submit or adopt a job for each rank, or none: if one can't be, the others are stopped.

        Raises DilocoError that says which rank, why, and what is left.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        if not self._listed:
            self.names()
        names: list[str] = []
        tried: list[str] = []  # the name that is being submitted may exist though its answer was lost
        try:
            for spec in specs:
                names.append(self._submit(spec, tried))  # noqa: PERF401 - what was submitted must be known
        except (BotoCoreError, ClientError, DilocoError) as problem:
            reason = problem if isinstance(problem, DilocoError) else errors.explained(problem)
            rank = specs[len(names)].rank
            if self._given_up.is_set() and names:
                self._note(f"stopping the {len(names)} jobs that were submitted")
            left = self.stop([*names, *tried[-1:]])
            raise type(reason)(f"rank {rank} could not be submitted: {reason} ({_left(len(names), left)})") from None
        except BaseException:
            self.stop([*names, *tried[-1:]])
            raise
        return names

    def stop(self, names: Sequence[str]) -> list[str]:
        """Stop jobs and wait for their end; those that have ended, or are not there, are ignored. Returns those that
        still run.
        """
        left = list(dict.fromkeys(names))
        if not left:
            return []
        deadline = time.monotonic() + self._stop_seconds
        with ThreadPoolExecutor(min(AT_ONCE, len(left))) as pool:
            asked = list(pool.map(self._ask_to_stop, left))
            left = [name for name, running in zip(left, asked, strict=True) if running]
            while left and time.monotonic() < deadline:
                over = list(pool.map(self._is_over, left))
                left = [name for name, ended in zip(left, over, strict=True) if not ended]
                if left:
                    time.sleep(self._look_every)
        return left

    def describe(self, name: str) -> dict[str, Any] | None:
        """A job, or None if there is none of that name. Raises botocore's errors."""
        from botocore.exceptions import ClientError

        try:
            return dict(self._clients.sagemaker.describe_training_job(TrainingJobName=name))
        except ClientError as problem:
            if errors.is_missing(problem):
                return None
            raise

    def _submit(self, spec: ReplicaSpec, tried: list[str]) -> str:
        rank, newest = spec.rank, self._newest
        number = newest.get(rank, 0)
        if number:
            adopted = self._adopted(spec, number)
            if adopted is not None:
                return adopted
        deadline = time.monotonic() + self._settle_seconds
        while True:
            number += 1
            name = job_name(self._settings, rank, number)
            tried.append(name)
            if self._create(spec, number, deadline):
                newest[rank] = number
                return name
            try:
                adopted = self._adopted(spec, number)
            except ConfigurationError:
                tried.pop()  # another run's: it is not this one's to stop
                raise
            if adopted is not None:
                newest[rank] = number
                self._note(f"rank {rank}: {name} is there already, and goes on")
                return adopted

    def _create(self, spec: ReplicaSpec, number: int, deadline: float) -> bool:
        """Create a job; False if its name is taken."""
        from botocore.exceptions import ClientError

        types = self._types.get(spec.rank, self._settings.instance_types)
        request = training_job(self._settings.rotated(types), spec, number)
        wait = self._settle_every
        while True:
            self._keep_the_rate()
            try:
                self._clients.creating.create_training_job(**request)
            except ClientError as problem:
                if errors.code(problem) == "ResourceInUse":
                    return False
                passing = errors.is_settling(problem) or errors.is_throttled(problem)
                if not passing or time.monotonic() + wait > deadline:
                    raise
                self._note(f"rank {spec.rank}: {errors.text(problem)}: trying again")
                self._pause(wait * (0.75 + 0.5 * self._chance.random()))
                wait = min(wait * 2, 15.0)
            else:
                return True

    def _adopted(self, spec: ReplicaSpec, number: int) -> str | None:
        """The name of that job if it is this run's and still runs; None if it has ended or is gone.

        Raises ConfigurationError for one of another run.
        """
        name = job_name(self._settings, spec.rank, number)
        job = self.describe(name)
        if job is None:
            return None
        self._check_owner(spec, job)
        if job["TrainingJobStatus"] == "Stopping":
            self._note(f"rank {spec.rank}: waiting for {name} to stop")
            self.stop([name])
            job = self.describe(name) or job
        if not jobs.has_ended(job):
            self.adopted.add(name)
            return name
        if jobs.failure(job) == "capacity":
            self._types[spec.rank] = _after(self._settings.instance_types, jobs.instance_type(job))
        return None

    def _check_owner(self, spec: ReplicaSpec, job: dict[str, Any]) -> None:
        answer = self._clients.sagemaker.get_paginator("list_tags").paginate(ResourceArn=job["TrainingJobArn"])
        tags = {tag["Key"]: tag["Value"] for page in answer for tag in page["Tags"]}
        for key, mine in identity(self._settings, spec).items():
            if tags.get(key) != mine:
                raise ConfigurationError(
                    f"the job name {job['TrainingJobName']} is taken by another run ({key} is {tags.get(key)!r}, not"
                    f" {mine!r}): choose another --run-id"
                )

    def _keep_the_rate(self) -> None:
        now = time.monotonic()
        self._pause(self._next_at - now)
        # Launchers that start together, from one scheduler say, must not stay in step.
        self._next_at = max(now, self._next_at) + (0.8 + 0.4 * self._chance.random()) / self._rate

    def _pause(self, seconds: float) -> None:
        """Sleep; DilocoError once the submission is given up."""
        if self._given_up.wait(max(0.0, seconds)):
            raise DilocoError("the submission was given up")

    def _ask_to_stop(self, name: str) -> bool:
        """Ask for the end of a job; False if there is nothing to wait for."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._clients.sagemaker.stop_training_job(TrainingJobName=name)
        except ClientError as problem:
            if errors.is_missing(problem):
                return False
            return not self._is_over(name)
        except BotoCoreError:
            return True
        return True

    def _is_over(self, name: str) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            job = self.describe(name)
        except (BotoCoreError, ClientError):
            return False
        return job is None or jobs.has_ended(job)


def _after(types: tuple[str, ...], used: str) -> tuple[str, ...]:
    """The types in the order to try them next: those after the one that had no capacity first."""
    if used not in types:
        return types
    at = types.index(used) + 1
    return types[at:] + types[:at]


def _left(before: int, left: Sequence[str]) -> str:
    stopped = f"the {before} submitted before it were stopped, " if before else ""
    if left:
        return f"{stopped}still stopping: {', '.join(left)}; see them with `status`, stop them with `cancel`"
    return f"{stopped}nothing is left running"
