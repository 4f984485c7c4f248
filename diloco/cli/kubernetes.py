"""What the commands do on a cluster: launches, status, logs, and the rest for a run that some launcher started."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from diloco.cli.app import FAILED
from diloco.cli.output import print_document, print_json, print_log_line, say
from diloco.cli.remote import RemoteLaunch
from diloco.embedded import environment
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from diloco.executors.kubernetes import KubernetesExecutor
    from diloco.executors.kubernetes_clients import Clients
    from diloco.executors.kubernetes_manifest import PodSettings
    from diloco.kubernetes_run import Restored
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.spec import RunSettings
    from diloco.stack import StackOutputs

WATCH_EVERY = 5.0


class KubernetesLaunch(RemoteLaunch):
    """One launch of a run on a cluster."""

    alone = "the cluster restarts those that die"

    def __init__(
        self,
        settings: RunSettings,
        pods: PodSettings,
        clients: Clients,
        *,
        takeover: bool = False,
        as_json: bool = False,
    ) -> None:
        from diloco.executors.kubernetes import KubernetesExecutor

        # The Job controller restarts ranks; a launcher that did so as well would count twice.
        settings = settings.model_copy(update={"max_restarts": 0})
        executor = KubernetesExecutor(pods, clients=clients, on_note=self.say)
        super().__init__(executor, settings, takeover=takeover, as_json=as_json)
        self._pods = pods

    @property
    def storage_options(self) -> dict[str, Any]:
        """How this process reaches the run's bucket."""
        from diloco.kubernetes_run import storage_options

        return storage_options(self._pods.region)

    @property
    def pace(self) -> Pace:
        """How often the launcher looks."""
        from diloco.kubernetes_run import PACE

        return PACE

    def check(self) -> None:
        """The API server itself checks the Job when it is created, as a whole or not at all."""

    def stop_when(self) -> str | None:
        """Nothing: the cluster's quotas are its own."""
        return None

    def print_end(self, report: RunReport) -> None:
        """Print how the run ended."""
        print_end(self._console, report, as_json=self._as_json)


def launch_on_cluster(
    settings: RunSettings,
    outputs: StackOutputs | None,
    *,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    takeover: bool,
    detach: bool,
    as_json: bool,
    image_uri: str | None,
    service_account: str | None,
    region: str | None,
    **pods: Any,
) -> int:
    """Launch a run with what the options say, else the stack's outputs; returns the exit code.

    Raises ConfigurationError.
    """
    from diloco.executors.kubernetes_manifest import PodSettings
    from diloco.kubernetes_run import launcher_environment

    if outputs is not None:
        image_uri = image_uri or outputs.image_uri
        service_account = service_account or outputs.service_account
        region = region or outputs.region
    if image_uri is None:
        raise ConfigurationError("--image registry/name@sha256:… is needed without --stack or --outputs")
    place = ClusterPlace.find(outputs, namespace=namespace, kubeconfig=kubeconfig, context=context)
    made = PodSettings(
        run_id=settings.run_id,
        namespace=place.namespace,
        image_uri=image_uri,
        service_account=service_account or PodSettings.service_account,
        region=region,
        **pods,
    )
    with environment(launcher_environment(made.endpoint_url)):
        launch = KubernetesLaunch(settings, made, place.clients, takeover=takeover, as_json=as_json)
        return launch.detach() if detach else launch.run()


def print_end(console: Console, report: RunReport, *, as_json: bool) -> None:
    """Print how a run ended."""
    from diloco.report import summary

    console.print(summary(report))
    if not report.succeeded:
        say(console, f"logs: logs {report.run_id}; to go on: resume {report.run_id}")
    if as_json:
        print_document(report)


@dataclass(frozen=True)
class ClusterPlace:
    """A namespace of a cluster that can be talked to."""

    clients: Clients
    namespace: str

    @classmethod
    def find(
        cls, outputs: StackOutputs | None, *, namespace: str | None, kubeconfig: Path | None, context: str | None
    ) -> Self:
        """The stack's cluster and namespace, unless the options name others. Raises ConfigurationError."""
        from diloco.executors.kubernetes_clients import Clients

        eks = None
        if outputs is not None and outputs.cluster_name is not None and kubeconfig is None and context is None:
            eks = (outputs.cluster_name, outputs.region)
        clients = Clients(kubeconfig, context, eks=eks)
        if namespace is None and outputs is not None:
            namespace = outputs.namespace
        return cls(clients, namespace or Clients.namespace(kubeconfig, context))


class FoundRun:
    """A run on a cluster, by its id. Raises ConfigurationError if it has no Job there."""

    def __init__(self, run_id: str, place: ClusterPlace) -> None:
        from diloco.exchange.layout import RUN_ID
        from diloco.executors.kubernetes import KubernetesExecutor
        from diloco.kubernetes_run import found_job, restore

        if not RUN_ID.fullmatch(run_id):
            raise ConfigurationError(f"{run_id!r} is no run id: use lower-case letters, digits and hyphens")
        self.clients = place.clients
        self.job = found_job(self.clients, place.namespace, run_id)
        self.restored: Restored = restore(self.job)
        self.executor: KubernetesExecutor = KubernetesExecutor(self.restored.pods, clients=self.clients)
        self._console = Console(highlight=False)

    @property
    def run_id(self) -> str:
        """Its name."""
        return self.restored.settings.run_id

    def status(self, *, as_json: bool) -> int:
        """Show ranks, pods, and what the replicas say; returns the exit code."""
        handles = self.executor.existing()
        shown = asyncio.run(self._table())
        if as_json:
            print_json(self._document())
        else:
            self._console.print(shown)
        return FAILED if any(handle.status == "failed" for handle in handles) else 0

    def watch(self) -> int:
        """Show the status until all ranks have ended; returns the exit code."""
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                handles = self.executor.existing()
                live.update(asyncio.run(self._table()), refresh=True)
                if all(handle.has_ended for handle in handles):
                    return FAILED if any(handle.status == "failed" for handle in handles) else 0
                time.sleep(WATCH_EVERY)

    def logs(self, *, rank: int | None, follow: bool) -> None:
        """Print the logs, merged by time."""

        def ended() -> bool:
            handles = self.executor.existing()
            mine = [handle for handle in handles if rank is None or handle.rank == rank]
            return all(handle.has_ended for handle in mine)

        for line in self.executor.log_reader(rank).lines(follow=follow, ended=ended):
            print_log_line(self._console, line.rank, line.text)

    def cancel(self) -> None:
        """Stop its launcher and its pods."""
        from diloco.kubernetes_run import cancel_run

        with self._reached():
            stopped = asyncio.run(cancel_run(self.restored, self.executor))
        say(self._console, f"run {self.run_id}: {len(stopped)} replicas stopped; no pod of it is left")

    def collect(self, *, timeout: float | None, as_json: bool) -> int:
        """Wait for the end, and report; returns the exit code."""
        from diloco.kubernetes_run import report_of

        started = time.monotonic()
        results = self.executor.collect(self.executor.existing(), timeout=timeout)
        with self._reached():
            report = asyncio.run(report_of(self.restored, results, wall_seconds=time.monotonic() - started))
        print_end(Console(stderr=as_json, highlight=False), report, as_json=as_json)
        return 0 if report.succeeded else FAILED

    def resume(self, *, takeover: bool, as_json: bool) -> int:
        """Supervise it; one whose Job has ended without a result is started again. Returns the exit code."""
        with self._reached():
            return KubernetesLaunch(
                self.restored.settings, self.restored.pods, self.clients, takeover=takeover, as_json=as_json
            ).run()

    def scale(self, replicas: int) -> None:
        """Change how many replicas it has."""
        from diloco.kubernetes_run import scale_run

        before = scale_run(self.restored, self.executor, replicas)
        say(self._console, f"run {self.run_id}: {before} replicas before, {replicas} now")

    def _reached(self) -> Any:
        """The environment in which the run's bucket is reached."""
        from diloco.kubernetes_run import endpoint_of, launcher_environment

        return environment(launcher_environment(endpoint_of(self.job)))

    async def _table(self) -> RenderableType:
        from diloco.kubernetes_run import open_run, run_status
        from diloco.status import status_table

        with self._reached():
            store = open_run(self.restored)
            try:
                shown = await run_status(store, self.restored, self.executor, self.executor.age(self.job))
            finally:
                await store.close()
        table = Table("rank", "pod", "status", "disruptions", "why", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for state in self.executor.states():
            table.add_row(
                str(state.rank), state.pod or "-", state.status, str(state.disruptions), Text(state.why or "")
            )
        return Group(status_table(shown), "", table)

    def _document(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "namespace": self.restored.pods.namespace,
            "job": self.job["metadata"]["name"],
            "replicas": [
                {
                    "rank": state.rank,
                    "pod": state.pod,
                    "status": state.status,
                    "exit_code": state.exit_code,
                    "restarts": state.restarts,
                    "disruptions": state.disruptions,
                    "why": state.why,
                }
                for state in self.executor.states()
            ],
        }
