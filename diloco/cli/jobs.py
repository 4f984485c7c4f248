"""Commands for runs that some launcher started: status, watch, logs, cancel, collect, resume, scale, list.

All of them find the run by its id alone, from any machine: SageMaker's jobs by their names and tags, a cluster's by its
label, the rest in the bucket.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli.app import FAILED, app
from diloco.cli.options import (
    Backend,
    BackendOption,
    ContextOption,
    JsonOption,
    KubeconfigOption,
    MaxCostOption,
    NamespaceOption,
    OutputsOption,
    PricesOption,
    RunIdArgument,
    StackOption,
    TakeoverOption,
    seconds,
)
from diloco.cli.output import print_json, say
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from diloco.cli.kubernetes import ClusterPlace, FoundRun
    from diloco.executors.base import ReplicaHandle
    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.stack import StackOutputs

WATCH_EVERY = 5.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


@app.command()
def status(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    prices: PricesOption = None,
    as_json: JsonOption = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> int:
    """Show a run's jobs and what its replicas say. Exit code 1: one of its jobs has failed."""
    if backend is Backend.kubernetes:
        return _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).status(as_json=as_json)
    found, executor = _find(run_id, stack, outputs, prices=prices)
    handles = executor.existing()
    table = asyncio.run(_status(found, run_id, executor, handles))
    if as_json:
        print_json(_document(run_id, executor, handles))
    else:
        Console(highlight=False).print(table)
    return FAILED if any(handle.status == "failed" for handle in handles) else 0


@app.command()
def watch(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> int:
    """Show a run's status until all of its jobs have ended. Exit code 1: one of them failed."""
    if backend is Backend.kubernetes:
        return _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).watch()
    from rich.live import Live

    found, executor = _find(run_id, stack, outputs)
    handles = executor.existing()
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            live.update(asyncio.run(_status(found, run_id, executor, handles)), refresh=True)
            if all(handle.has_ended for handle in handles):
                return FAILED if any(handle.status == "failed" for handle in handles) else 0
            time.sleep(WATCH_EVERY)
            handles = executor.existing()


@app.command()
def logs(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    rank: Annotated[int | None, typer.Option(help="Of this rank only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until all jobs have ended.")] = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Print the logs of all ranks, merged by time."""
    if backend is Backend.kubernetes:
        _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).logs(rank=rank, follow=follow)
        return
    from diloco.executors.sagemaker_logs import LogReader

    _, executor = _find(run_id, stack, outputs)
    prefix = executor.settings.name_prefix + ("" if rank is None else f"{rank}-s")
    console = Console(highlight=False)

    def ended() -> bool:
        return all(handle.has_ended for handle in executor.existing())

    for line in LogReader(executor.clients.logs, prefix).lines(follow=follow, ended=ended):
        console.print(
            Text.assemble((f"[{line.rank}] ", _COLOURS[line.rank % len(_COLOURS)]), line.text), soft_wrap=True
        )


@app.command()
def cancel(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Stop a run: its launcher, its jobs, and the instances that they keep warm."""
    if backend is Backend.kubernetes:
        _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).cancel()
        return
    from diloco.sagemaker_run import cancel_run

    found, executor = _find(run_id, stack, outputs)
    stopped = asyncio.run(cancel_run(found, run_id, executor))
    say(Console(highlight=False), f"run {run_id}: {len(stopped)} jobs stopped; nothing of it runs or is kept warm")


@app.command()
def collect(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    timeout: Annotated[
        int | None, typer.Option(parser=seconds, metavar="TIME", help="How long to wait for the jobs' end.")
    ] = None,
    prices: PricesOption = None,
    as_json: JsonOption = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> int:
    """Wait for the end of a run, release its instances, and report. Exit code 1: it has no result."""
    if backend is Backend.kubernetes:
        return _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).collect(
            timeout=timeout, as_json=as_json
        )
    from diloco.cli.sagemaker import print_end
    from diloco.sagemaker_run import report_of

    found, executor = _find(run_id, stack, outputs, prices=prices)
    handles = executor.existing()
    started = time.monotonic()
    results = executor.collect(handles, timeout=timeout)
    executor.release(handles)
    report = asyncio.run(report_of(found, run_id, results, wall_seconds=time.monotonic() - started))
    print_end(Console(stderr=as_json, highlight=False), report, executor, as_json=as_json)
    return 0 if report.succeeded else FAILED


@app.command()
def resume(
    run_id: RunIdArgument,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    takeover: TakeoverOption = False,
    max_cost: MaxCostOption = None,
    prices: PricesOption = None,
    as_json: JsonOption = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> int:
    """Supervise a run that was started before: adopt the jobs that run, relaunch those that ended without a result."""
    if backend is Backend.kubernetes:
        return _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).resume(
            takeover=takeover, as_json=as_json
        )
    from diloco.cli.sagemaker import SageMakerLaunch
    from diloco.sagemaker_run import restore

    found, executor = _find(run_id, stack, outputs)
    handles = executor.existing()
    restored = asyncio.run(restore(found, run_id, executor.job(handles[0]) if handles else None))
    return SageMakerLaunch(
        found,
        restored.settings,
        restored.jobs,
        prices=prices,
        max_cost=max_cost,
        takeover=takeover,
        as_json=as_json,
    ).run()


@app.command()
def scale(
    run_id: RunIdArgument,
    replicas: Annotated[int, typer.Option(help="How many replicas it shall have from now on.")],
    stack: StackOption = None,
    outputs: OutputsOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Change how many replicas a running run on a cluster has; it must be one of --policy skip."""
    _on_cluster(run_id, stack, outputs, namespace, kubeconfig, context).scale(replicas)


@app.command("list")
def list_(
    stack: StackOption = None,
    outputs: OutputsOption = None,
    as_json: JsonOption = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """List the stack's or the namespace's runs that have jobs, the newest first."""
    if backend is Backend.kubernetes:
        from diloco.cli.kubernetes import print_runs

        print_runs(_place(stack, outputs, namespace, kubeconfig, context), as_json=as_json)
        return
    from diloco.sagemaker_run import list_runs
    from diloco.stack import read_outputs

    runs = list_runs(read_outputs(outputs, stack))
    if as_json:
        print_json(runs)
        return
    table = Table("run", "started", "jobs", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for run in runs:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(run["jobs"].items()))
        table.add_row(run["run_id"], run["started"], counts)
    Console(highlight=False).print(table if runs else "no runs")


def _place(
    stack: str | None, outputs: Path | None, namespace: str | None, kubeconfig: Path | None, context: str | None
) -> ClusterPlace:
    from diloco.cli.kubernetes import ClusterPlace
    from diloco.stack import read_outputs

    found = None if stack is None and outputs is None else read_outputs(outputs, stack)
    return ClusterPlace.find(found, namespace=namespace, kubeconfig=kubeconfig, context=context)


def _on_cluster(
    run_id: str,
    stack: str | None,
    outputs: Path | None,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
) -> FoundRun:
    from diloco.cli.kubernetes import FoundRun

    return FoundRun(run_id, _place(stack, outputs, namespace, kubeconfig, context))


def _find(
    run_id: str, stack: str | None, outputs: Path | None, *, prices: Path | None = None
) -> tuple[StackOutputs, SageMakerExecutor]:
    from diloco.cost import Prices
    from diloco.exchange.layout import RUN_ID
    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.sagemaker_run import job_settings
    from diloco.stack import read_outputs

    if not RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"{run_id!r} is no run id: use lower-case letters, digits and hyphens")
    found = read_outputs(outputs, stack)
    executor = SageMakerExecutor(job_settings(found, run_id), prices=Prices.load(prices), describe_every=2.0)
    return found, executor


async def _status(
    outputs: StackOutputs, run_id: str, executor: SageMakerExecutor, handles: Sequence[ReplicaHandle]
) -> RenderableType:
    from rich.console import Group

    from diloco.executors import sagemaker_jobs as jobs
    from diloco.sagemaker_run import open_run, read_spec, run_status
    from diloco.status import status_table

    spec = await read_spec(outputs, run_id)
    described = [executor.job(handle) for handle in handles]
    started = min((job["CreationTime"].timestamp() for job in described if "CreationTime" in job), default=time.time())
    store = open_run(outputs, run_id)
    try:
        shown = await run_status(store, spec, handles, time.time() - started)
    finally:
        await store.close()
    table = Table("rank", "job", "on", "status", "warm pool", "why", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for handle, job in zip(handles, described, strict=True):
        state = f"{job['TrainingJobStatus']} ({job['SecondaryStatus']})"
        pool = jobs.warm_pool(job) or "-"
        table.add_row(str(handle.rank), handle.job_id, jobs.instance_type(job), state, pool, Text(jobs.why(job) or ""))
    spent, _ = executor.spent()
    return Group(status_table(shown), "", table, "", f"cost: about ${spent:.2f}")


def _document(run_id: str, executor: SageMakerExecutor, handles: Sequence[ReplicaHandle]) -> dict[str, Any]:
    from diloco.executors import sagemaker_jobs as jobs

    spent, unknown = executor.spent()
    return {
        "run_id": run_id,
        "dollars": round(spent, 4),
        "unknown_prices": sorted(unknown),
        "jobs": [
            {
                "rank": handle.rank,
                "job": handle.job_id,
                "status": handle.status,
                "secondary_status": executor.job(handle)["SecondaryStatus"],
                "exit_code": handle.exit_code,
                "instance_type": jobs.instance_type(executor.job(handle)),
                "warm_pool": jobs.warm_pool(executor.job(handle)),
                "interruptions": jobs.interruptions(executor.job(handle)),
                "error": jobs.why(executor.job(handle)),
            }
            for handle in handles
        ],
    }
