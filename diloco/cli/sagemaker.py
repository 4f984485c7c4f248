"""`run` and `resume` on SageMaker: what is its own of a launch, and what is said at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.cli.output import print_document, say
from diloco.cli.remote import RemoteLaunch

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.executors.sagemaker_request import JobSettings
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.spec import RunSettings
    from diloco.stack import StackOutputs


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
        """Quotas, role, image and bucket."""
        from diloco.executors.sagemaker_checks import check

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

    def print_end(self, report: RunReport) -> None:
        """Print how the run ended and what it cost."""
        print_end(self._console, report, self._sagemaker, as_json=self._as_json)


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
