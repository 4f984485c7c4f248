"""What the commands do on SageMaker: launches, status, logs, and the rest for a run that some launcher started."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from diloco.cli.app import FAILED
from diloco.cli.output import print_document, print_json, print_log_line, say
from diloco.cli.remote import RemoteLaunch
from diloco.errors import ConfigurationError, DilocoError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from diloco.exchange.launchers import LauncherWatch
    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaHandle
    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.executors.sagemaker_request import JobSettings
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.spec import RunSettings
    from diloco.spec_record import SpecRecord
    from diloco.stack import StackOutputs
    from diloco.status import RunStatus

T = TypeVar("T")

WATCH_EVERY = 5.0


class SageMakerLaunch(RemoteLaunch):
    """One launch of a run on SageMaker."""

    alone = "one that dies stays dead"

    def __init__(
        self,
        outputs: StackOutputs,
        settings: RunSettings,
        jobs: JobSettings,
        *,
        prices: Path | None = None,
        max_cost: float | None = None,
        takeover: bool = False,
        as_json: bool = False,
    ) -> None:
        from diloco.cost import Prices
        from diloco.executors.sagemaker import SageMakerExecutor
        from diloco.sagemaker_run import describe_every

        self._sagemaker = SageMakerExecutor(
            jobs,
            prices=Prices.load(prices),
            max_cost=max_cost,
            describe_every=describe_every(settings.replicas),
            on_note=self.say,
        )
        super().__init__(self._sagemaker, settings, takeover=takeover, as_json=as_json)
        self._outputs = outputs
        self._jobs = jobs

    @property
    def storage_options(self) -> dict[str, Any]:
        """How this process reaches the run's bucket."""
        from diloco.sagemaker_run import storage_options

        return storage_options(self._outputs)

    @property
    def pace(self) -> Pace:
        """How often the launcher looks."""
        from diloco.sagemaker_run import pace

        return pace(self._settings.replicas)

    def check(self) -> None:
        """Quotas, role, image and bucket, and whether the budget is used up already."""
        from diloco.executors.sagemaker_checks import check

        earlier = self._sagemaker.existing()
        if self._sagemaker.over_budget() is not None and all(handle.has_ended for handle in earlier):
            raise ConfigurationError(
                f"run {self._settings.run_id} has cost about ${self._sagemaker.spent()[0]:.2f} already: give a"
                f" --max-cost above that, which counts from the run's first job"
            )
        findings = check(
            self._sagemaker.clients,
            self._jobs,
            replicas=self._settings.replicas,
            rendezvous_uri=self._settings.uri,
        )
        for warning in findings.warnings:
            self.say(f"warning: {warning}")
        findings.raise_problems()

    def stop_when(self) -> str | None:
        """The budget is used up."""
        return self._sagemaker.over_budget()

    def give_up(self) -> None:
        """A submission that is under way ends, and stops what it has submitted."""
        self._sagemaker.give_up()

    def left(self) -> str:
        """What is left of the run after a signal, and how to go on."""
        run_id = self._settings.run_id
        try:
            handles = self._sagemaker.existing()
        except DilocoError as problem:
            return f"what is left of the run can't be seen ({problem}): look again with `status {run_id}`"
        running = [handle.job_id for handle in handles if not handle.has_ended]
        if running:
            return (
                f"{len(running)} of its jobs still run or are stopping ({', '.join(running)}): `status {run_id}` shows"
                f" them, `cancel {run_id}` stops them, `resume {run_id}` supervises them"
            )
        if not handles:
            return f"no job was started. To start: the same command with --run-id {run_id}"
        return super().left()

    def print_end(self, report: RunReport) -> None:
        """Print how the run ended and what it cost."""
        print_end(self._console, report, self._sagemaker, as_json=self._as_json)


def print_end(console: Console, report: RunReport, executor: SageMakerExecutor, *, as_json: bool) -> None:
    """Print how a run ended and what it cost."""
    from diloco.report import summary

    console.print(summary(report))
    say(console, f"{_cost(executor, ' of training')} (on-demand prices of {executor.prices.date})")
    if not report.succeeded:
        say(console, f"logs: logs {report.run_id}; to go on: resume {report.run_id}")
    if as_json:
        print_document(report)


def _cost(executor: SageMakerExecutor, of: str = "") -> str:
    spent, unknown = executor.spent()
    missing = f", without {', '.join(sorted(unknown))}, whose price is unknown" if unknown else ""
    return f"cost: about ${spent:.2f}{of}{missing}"


class FoundRun:
    """A run that some launcher started, by its id. Raises ConfigurationError if there is none of that name."""

    def __init__(
        self, run_id: str, outputs: StackOutputs, *, prices: Path | None = None, max_cost: float | None = None
    ) -> None:
        from diloco.cost import Prices
        from diloco.executors.sagemaker import SageMakerExecutor
        from diloco.sagemaker_run import job_settings, read_spec

        self.run_id = run_id
        self._outputs = outputs
        self._prices, self._max_cost = prices, max_cost
        self._spec: SpecRecord = asyncio.run(read_spec(outputs, run_id))
        self._executor: SageMakerExecutor = SageMakerExecutor(
            job_settings(outputs, run_id), prices=Prices.load(prices), describe_every=2.0
        )
        self._console = Console(highlight=False)

    def status(self, *, as_json: bool) -> int:
        """Show jobs, and what the replicas say; returns the exit code."""
        handles = self._executor.existing()
        shown = self._read(handles)
        if as_json:
            print_json(self._document(handles, shown))
        else:
            self._console.print(self._table(handles, shown))
        return FAILED if any(handle.status == "failed" for handle in handles) else 0

    def watch(self) -> int:
        """Show the status until the run has ended; returns the exit code."""
        from diloco import preflight
        from diloco.exchange.launchers import LauncherWatch
        from diloco.status import make_view

        handles = self._jobs()
        view = make_view(self._console, lambda shown: self._table(handles, shown))
        launcher = LauncherWatch()
        with view:
            while True:
                shown = self._read(handles)
                view.show(shown)
                if self._is_over(handles, launcher):
                    break
                time.sleep(WATCH_EVERY)
                handles = self._executor.look_again(self._spec.replicas)
        self._console.print(self._table(handles, shown))
        has_result = asyncio.run(self._ask(preflight.has_result))
        said = f"has its result: `collect {self.run_id}`" if has_result else f"has no result: `resume {self.run_id}`"
        say(self._console, f"run {self.run_id} {said}")
        return 0 if has_result else FAILED

    def logs(self, *, rank: int | None, follow: bool) -> None:
        """Print the logs, merged by time."""
        from diloco.exchange.launchers import LauncherWatch
        from diloco.executors.sagemaker_logs import LogReader

        if rank is not None and not 0 <= rank < self._spec.replicas:
            raise ConfigurationError(f"--rank {rank}: run {self.run_id} has ranks 0 to {self._spec.replicas - 1}")
        self._jobs()
        launcher = LauncherWatch()
        printed = False

        def ended() -> bool:
            handles = self._executor.look_again(self._spec.replicas)
            return self._is_over([handle for handle in handles if rank in (None, handle.rank)], launcher)

        prefix = self._executor.settings.name_prefix + ("" if rank is None else f"{rank}-s")
        for line in LogReader(self._executor.clients.logs, prefix).lines(follow=follow, ended=ended):
            printed = True
            print_log_line(self._console, line.rank, line.text)
        if not printed:
            note = "nothing is logged yet: a container starts 3 to 5 minutes after its job; --follow waits"
            say(Console(stderr=True, highlight=False), note)

    def cancel(self) -> None:
        """Stop its launcher, its jobs, and what they keep warm."""
        from diloco.sagemaker_run import cancel_run

        stopped = asyncio.run(cancel_run(self._outputs, self.run_id, self._executor))
        count = f"{len(stopped)} jobs stopped" if stopped else "no job of it was running"
        say(self._console, f"run {self.run_id}: {count}; nothing of it runs or is kept warm")

    def collect(self, *, timeout: float | None, as_json: bool) -> int:
        """Wait for its end, release what is kept warm, and report; returns the exit code."""
        from diloco.sagemaker_run import report_of

        handles = self._jobs()
        started = time.monotonic()
        results = self._executor.collect(handles, timeout=timeout)
        self._executor.release(handles)
        report = asyncio.run(report_of(self._outputs, self.run_id, results, wall_seconds=time.monotonic() - started))
        print_end(Console(stderr=as_json, highlight=False), report, self._executor, as_json=as_json)
        return 0 if report.succeeded else FAILED

    def resume(self, *, takeover: bool, as_json: bool) -> int:
        """Supervise it; returns the exit code."""
        from diloco.sagemaker_run import restore

        restored = asyncio.run(restore(self._outputs, self.run_id, self._executor.job(self._jobs()[0])))
        return SageMakerLaunch(
            self._outputs,
            restored.settings,
            restored.jobs,
            prices=self._prices,
            max_cost=self._max_cost,
            takeover=takeover,
            as_json=as_json,
        ).run()

    def _jobs(self) -> list[ReplicaHandle]:
        """The newest job of each rank. Raises ConfigurationError if there is none at all."""
        handles = self._executor.existing()
        if not handles:
            raise ConfigurationError(
                f"run {self.run_id} has no job in {self._outputs.region}: its launcher has not submitted any yet, or"
                f" SageMaker has forgotten them; start it with the same command and --run-id {self.run_id}"
            )
        return handles

    def _is_over(self, handles: Sequence[ReplicaHandle], launcher: LauncherWatch) -> bool:
        """Whether none of these jobs runs or will: one that failed may be relaunched by a launcher."""
        if not all(handle.has_ended for handle in handles):
            return False
        if all(handle.status == "succeeded" for handle in handles):
            return True
        return not asyncio.run(self._ask(launcher.supervised))

    async def _ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """What a question to the run's bucket is answered."""
        from diloco.sagemaker_run import open_run

        store = open_run(self._outputs, self.run_id)
        try:
            return await question(store)
        finally:
            await store.close()

    def _read(self, handles: Sequence[ReplicaHandle]) -> RunStatus:
        from diloco.sagemaker_run import run_status

        described = [self._executor.job(handle) for handle in handles]
        created = (job["CreationTime"].timestamp() for job in described if "CreationTime" in job)
        age = time.time() - min(created, default=time.time())
        return asyncio.run(self._ask(lambda store: run_status(store, self._spec, handles, age)))

    def _table(self, handles: Sequence[ReplicaHandle], shown: RunStatus) -> RenderableType:
        from diloco.executors import sagemaker_jobs as jobs
        from diloco.status import status_table

        columns = ("rank", "job", "on", "status", "warm pool", "why")
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
        for handle in handles:
            job = self._executor.job(handle)
            state = f"{job['TrainingJobStatus']} ({job['SecondaryStatus']})"
            pool = jobs.warm_pool(job) or "-"
            why = Text(jobs.why(job) or "")
            table.add_row(str(handle.rank), handle.job_id, jobs.instance_type(job), state, pool, why)
        return Group(status_table(shown), "", table, "", _cost(self._executor))

    def _document(self, handles: Sequence[ReplicaHandle], shown: RunStatus) -> dict[str, Any]:
        from diloco.executors import sagemaker_jobs as jobs

        spent, unknown = self._executor.spent()
        described = [self._executor.job(handle) for handle in handles]
        return {
            "run_id": self.run_id,
            "round": shown.round,
            "rounds": shown.rounds,
            "dollars": round(spent, 4),
            "unknown_prices": sorted(unknown),
            "jobs": [
                {
                    "rank": handle.rank,
                    "job": handle.job_id,
                    "status": handle.status,
                    "secondary_status": job["SecondaryStatus"],
                    "exit_code": handle.exit_code,
                    "instance_type": jobs.instance_type(job),
                    "warm_pool": jobs.warm_pool(job),
                    "interruptions": jobs.interruptions(job),
                    "error": jobs.why(job),
                    "phase": replica.phase,
                    "step": None if replica.beat is None else replica.beat.step,
                    "round": None if replica.beat is None else replica.beat.round,
                    "waiting_for": [] if replica.beat is None else replica.beat.waiting_for,
                }
                for handle, job, replica in zip(handles, described, shown.replicas, strict=True)
            ],
        }
