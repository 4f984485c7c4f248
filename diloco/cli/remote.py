"""`run` and `resume` on another backend than this machine: checks, supervision, and what is said at the end."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco.cli.app import FAILED, exit_code
from diloco.cli.output import print_document, print_json, say
from diloco.errors import DilocoError
from diloco.signals import Interrupted, Signals

if TYPE_CHECKING:
    from diloco.executors.base import ServerlessExecutor
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.spec import RunSettings


class RemoteLaunch(ABC):
    """One launch of a run. Subclasses say what is a backend's own."""

    alone: str
    """What becomes of a replica that dies and is not supervised."""

    def __init__(
        self, executor: ServerlessExecutor, settings: RunSettings, *, takeover: bool = False, as_json: bool = False
    ) -> None:
        self._executor = executor
        self._settings = settings
        self._takeover = takeover
        self._as_json = as_json
        self._console = Console(stderr=as_json, highlight=False)
        self._started = time.monotonic()
        self._checked = False

    @property
    @abstractmethod
    def storage_options(self) -> dict[str, Any]:
        """How this process reaches the run's bucket."""

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """How often the launcher looks."""

    @abstractmethod
    def check(self) -> None:
        """Raise DilocoError for what the backend itself knows to keep the run from starting; nothing is written."""

    @abstractmethod
    def stop_when(self) -> str | None:
        """Why the run must end now, if it must."""

    def give_up(self) -> None:  # noqa: B027 - most have nothing to do
        """A signal asks for the end: make what runs in other threads end soon. Called in the signal's handler."""

    def left(self) -> str:
        """What is left of the run after a signal, and how to go on."""
        return f"all jobs of this run are stopped. To go on: resume {self._settings.run_id}"

    @abstractmethod
    def print_end(self, report: RunReport) -> None:
        """Print how the run ended."""

    def run(self) -> int:
        """Launch, supervise, report; returns the exit code."""
        from diloco.run import run_replicas
        from diloco.status import make_view

        with Signals(self.give_up) as signals:
            try:
                self._check()
                with make_view(self._console) as view:
                    report: RunReport = signals.run(
                        run_replicas(
                            self._executor,
                            self._settings,
                            on_status=view.show,
                            stop_when=self.stop_when,
                            **self._common(),
                        )
                    )
            except Interrupted as stopped:
                return self._interrupted(stopped)
            except DilocoError as problem:
                if exit_code(problem) == FAILED and self._as_json:
                    print_document(self._failed(str(problem)))
                raise
        self.print_end(report)
        return 0 if report.succeeded else FAILED

    def detach(self) -> int:
        """Launch and leave; returns the exit code."""
        from diloco.detached import submit_replicas

        with Signals(self.give_up) as signals:
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
            f"run {run_id}: {len(handles)} jobs, left alone: {self.alone}; `resume {run_id}` supervises them;"
            f" `watch {run_id}`, `logs {run_id}`, `cancel {run_id}`, `collect {run_id}`",
        )
        if self._as_json:
            print_json({"run_id": run_id, "jobs": [handle.job_id for handle in handles]})
        return 0

    def say(self, text: str) -> None:
        """Print words for people."""
        say(self._console, text)

    def _common(self) -> dict[str, Any]:
        return {
            "storage_options": self.storage_options,
            "takeover": self._takeover,
            "on_note": self.say,
            "pace": self.pace,
        }

    def _check(self) -> None:
        """Find out all that keeps the run from starting, before anything is written."""
        from diloco.preflight import check_launch

        check_launch(self._executor, self._settings)
        self.check()
        self._checked = True

    def _interrupted(self, stopped: Interrupted) -> int:
        name = signal.Signals(stopped.number).name
        self.say(f"stopped by {name}; {self.left() if self._checked else 'nothing was started'}")
        if self._as_json:
            print_document(self._failed(f"stopped by {name}"))
        return 128 + stopped.number

    def _failed(self, error: str) -> RunReport:
        from diloco.report import failed_report

        return failed_report(self._settings, error, wall_seconds=time.monotonic() - self._started)
