"""`run` and `resume` on SageMaker: checks, supervision, and what is said at the end."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco.cli.app import FAILED, exit_code
from diloco.cli.output import print_document, say
from diloco.errors import DilocoError
from diloco.signals import Interrupted, Signals

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.executors.sagemaker_request import JobSettings
    from diloco.report import RunReport
    from diloco.spec import RunSettings
    from diloco.stack import StackOutputs


class SageMakerLaunch:
    """One launch of a run on SageMaker."""

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

        self._outputs = outputs
        self._settings = settings
        self._jobs = jobs
        self._takeover = takeover
        self._as_json = as_json
        self._console = Console(stderr=as_json, highlight=False)
        self._started = time.monotonic()
        self._executor = SageMakerExecutor(
            jobs,
            prices=Prices.load(prices),
            max_cost=max_cost,
            describe_every=describe_every(settings.replicas),
            on_note=lambda text: say(self._console, text),
        )

    def run(self) -> int:
        """Launch, supervise, report; returns the exit code."""
        from diloco.run import run_replicas
        from diloco.status import make_view

        with Signals() as signals:
            try:
                self._check()
                with make_view(self._console) as view:
                    report: RunReport = signals.run(
                        run_replicas(
                            self._executor,
                            self._settings,
                            on_status=view.show,
                            stop_when=self._executor.over_budget,
                            **self._common(),
                        )
                    )
            except Interrupted as stopped:
                return self._interrupted(stopped)
            except DilocoError as problem:
                if exit_code(problem) == FAILED and self._as_json:
                    print_document(self._failed(str(problem)))
                raise
        print_end(self._console, report, self._executor, as_json=self._as_json)
        return 0 if report.succeeded else FAILED

    def detach(self) -> int:
        """Launch and leave; returns the exit code."""
        from diloco.detached import submit_replicas

        with Signals() as signals:
            try:
                self._check()
                handles = signals.run(submit_replicas(self._executor, self._settings, **self._common()))
            except Interrupted as stopped:
                return self._interrupted(stopped)
        run_id = self._settings.run_id
        if not handles:
            say(self._console, f"run {run_id} has its result already: `collect {run_id}` shows it")
            return 0
        say(
            self._console,
            f"run {run_id}: {len(handles)} jobs, left alone: one that dies stays dead until `resume {run_id}`"
            f" supervises them; `status {run_id}`, `logs {run_id}`, `cancel {run_id}`, `collect {run_id}`",
        )
        if self._as_json:
            from diloco.cli.jobs import print_json

            print_json({"run_id": run_id, "jobs": [handle.job_id for handle in handles]})
        return 0

    def _common(self) -> dict[str, Any]:
        from diloco.sagemaker_run import pace, storage_options

        return {
            "storage_options": storage_options(self._outputs),
            "takeover": self._takeover,
            "on_note": lambda text: say(self._console, text),
            "pace": pace(self._settings.replicas),
        }

    def _check(self) -> None:
        """Find out all that keeps the run from starting, before anything is written."""
        from diloco.executors.sagemaker_checks import check
        from diloco.preflight import check_launch

        check_launch(self._executor, self._settings)
        findings = check(
            self._executor.clients,
            self._jobs,
            replicas=self._settings.replicas,
            rendezvous_uri=self._settings.uri,
        )
        for warning in findings.warnings:
            say(self._console, f"warning: {warning}")
        findings.raise_problems()

    def _interrupted(self, stopped: Interrupted) -> int:
        name, run_id = signal.Signals(stopped.number).name, self._settings.run_id
        say(self._console, f"stopped by {name}; all jobs of this run are stopped. To go on: resume {run_id}")
        if self._as_json:
            print_document(self._failed(f"stopped by {name}"))
        return 128 + stopped.number

    def _failed(self, error: str) -> RunReport:
        from diloco.report import RunReport

        return RunReport(
            run_id=self._settings.run_id,
            status="failed",
            rendezvous_uri=self._settings.uri,
            rounds_expected=self._settings.rounds,
            wall_seconds=round(time.monotonic() - self._started, 3),
            error=error,
        )


def print_end(console: Console, report: RunReport, executor: SageMakerExecutor, *, as_json: bool) -> None:
    """Print how a run ended and what it cost."""
    from diloco.report import summary

    console.print(summary(report))
    spent, unknown = executor.spent()
    missing = f", without {', '.join(sorted(unknown))}, whose price is unknown" if unknown else ""
    say(console, f"cost: about ${spent:.2f} of training{missing} (on-demand prices of {executor.prices.date})")
    if not report.succeeded:
        say(console, f"logs: logs {report.run_id}; to go on: resume {report.run_id}")
    if as_json:
        print_document(report)
