"""`run --local`: everything that lives around the replicas of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco.cli.app import FAILED, exit_code
from diloco.cli.output import print_document, resume_command, say
from diloco.errors import DilocoError, ExitCode
from diloco.signals import Interrupted, Signals

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from diloco.embedded import EmbeddedS3
    from diloco.local_run import RunFolder
    from diloco.report import RunReport
    from diloco.spec import RunSettings


class LocalLaunch:
    """One `run --local`: everything that lives around the replicas, in the order in which it must be undone."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        embedded: bool,
        endpoint_url: str | None,
        takeover: bool,
        baseline: bool,
        as_json: bool,
    ) -> None:
        from diloco.local_run import RunFolder

        self._settings = settings
        self._embedded = embedded
        self._endpoint_url = endpoint_url
        # The embedded S3 lives in the folder whose lock this launcher holds: no other one can be alive.
        self._takeover = takeover or embedded
        self._baseline = baseline
        self._as_json = as_json
        self._console = Console(stderr=as_json, highlight=False)
        self._folder: RunFolder = RunFolder.of(settings.run_id)
        self._started = time.monotonic()
        self._report: RunReport | None = None

    def run(self) -> int:
        """Run it and return the exit code."""
        from diloco.local_run import check_packages
        from diloco.preflight import preflight

        preflight(self._settings)
        check_packages()
        with Signals() as signals:
            try:
                with ExitStack() as stack:
                    report = self._run_in(stack, signals)
            except Interrupted as stopped:
                return self._interrupted(stopped)
            except DilocoError as problem:
                if exit_code(problem) == FAILED and self._as_json:
                    print_document(self._failed(str(problem)))
                raise
        self._print(report)
        return 0 if report.succeeded else FAILED

    def _run_in(self, stack: ExitStack, signals: Signals) -> RunReport:
        from diloco.embedded import EmbeddedS3, environment

        lock = stack.enter_context(self._folder.lock())
        if self._embedded:
            s3 = EmbeddedS3(self._folder.s3, log=self._folder.logs / "s3.log", hold=[lock])
            stack.callback(s3.stop)
            s3.start()
            stack.enter_context(environment(s3.env))
        elif self._endpoint_url is not None:
            stack.enter_context(environment({"AWS_ENDPOINT_URL_S3": self._endpoint_url}))
        report: RunReport = signals.run(self._beside(s3, self._train(lock)) if self._embedded else self._train(lock))
        return report

    async def _beside(self, s3: EmbeddedS3, training: Coroutine[Any, Any, RunReport]) -> RunReport:
        """Train while the embedded S3 lives; DilocoError at once when it has ended."""
        task = asyncio.ensure_future(training)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.5)
                if not task.done() and not s3.alive:
                    log = _shown(self._folder.logs / "s3.log")
                    raise DilocoError(
                        f"the embedded S3 has ended (its log: {log}): the same command with --run-id resumes"
                    )
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _train(self, lock: int) -> RunReport:
        from diloco.executors.local import LocalProcessExecutor
        from diloco.local_run import copy_model, train_baseline
        from diloco.run import run_replicas
        from diloco.status import make_view

        executor = LocalProcessExecutor(log_dir=self._folder.logs, hold=[lock])
        with make_view(self._console) as view:
            report = await run_replicas(
                executor, self._settings, takeover=self._takeover, on_status=view.show, on_note=self._say
            )
        self._report = report
        if self._embedded and report.model_uri is not None:
            try:
                await copy_model(report.model_uri, self._folder.model)
            except (DilocoError, OSError) as problem:
                error = (
                    f"the model is in {report.model_uri}, but could not be copied to {self._folder.model}: {problem}"
                )
                report = report.model_copy(update={"error": error})
        if self._baseline and report.succeeded:
            self._say("training the baseline: one process, gradients averaged at every step")
            try:
                loss: float | None = await train_baseline(self._settings, self._folder, hold=lock)
                changes: dict[str, Any] = {"baseline_eval_loss": loss}
            except DilocoError as problem:
                changes = {"baseline_eval_loss": None, "error": str(problem)}
            report = report.model_copy(update=changes)
        return report.model_copy(update={"wall_seconds": round(time.monotonic() - self._started, 3)})

    def _interrupted(self, stopped: Interrupted) -> int:
        name = signal.Signals(stopped.number).name
        self._say(f"stopped by {name}; all replicas are gone. To resume:\n  {resume_command(self._settings.run_id)}")
        if self._as_json:
            print_document(self._failed(f"stopped by {name}"))
        return 128 + stopped.number

    def _failed(self, error: str) -> RunReport:
        from diloco.report import failed_report

        if self._report is not None:  # the run itself was over
            return self._report.model_copy(update={"error": error})
        return failed_report(self._settings, error, wall_seconds=time.monotonic() - self._started)

    def _print(self, report: RunReport) -> None:
        from diloco.report import summary

        self._console.print(summary(report))
        if self._embedded and report.model_uri is not None:
            self._say(f"model: {_shown(self._folder.model)}")
        if not report.succeeded:
            self._say(f"logs: {_shown(self._folder.logs)}")
            if f"exit code {ExitCode.BAD_CONFIGURATION:d}" not in (report.error or ""):
                self._say(f"To resume:\n  {resume_command(self._settings.run_id)}")
        if self._as_json:
            print_document(report)

    def _say(self, text: str) -> None:
        say(self._console, text)


def _shown(path: Path) -> str:
    """A path as the user would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
