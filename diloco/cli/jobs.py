"""Commands for runs that some launcher started: status, watch, logs, cancel, collect, resume, scale, list.

All of them find the run by its id alone, from any machine: SageMaker's jobs by their names and tags, a cluster's by its
label, the rest in the bucket.
"""

from __future__ import annotations

from typing import Annotated

import typer

from diloco.cli.app import app
from diloco.cli.options import (
    Backend,
    JsonOption,
    MaxCostOption,
    PricesOption,
    RunIdArgument,
    TakeoverOption,
    seconds,
)
from diloco.cli.output import print_runs
from diloco.cli.place import Place, located
from diloco.errors import DilocoError


@app.command()
@located()
def status(place: Place, run_id: RunIdArgument, prices: PricesOption = None, as_json: JsonOption = False) -> int:
    """Show a run's jobs and what its replicas say. Exit code 1: one of its jobs has failed."""
    return place.find(run_id, prices=prices).status(as_json=as_json)


@app.command()
@located()
def watch(place: Place, run_id: RunIdArgument) -> int:
    """Show a run's status until its jobs have ended for good. Exit code 1: it has no result."""
    return place.find(run_id).watch()


@app.command()
@located()
def logs(
    place: Place,
    run_id: RunIdArgument,
    rank: Annotated[int | None, typer.Option(help="Of this rank only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the jobs have ended for good.")] = False,
) -> None:
    """Print the logs of all ranks, merged by time."""
    place.find(run_id).logs(rank=rank, follow=follow)


@app.command()
@located()
def cancel(place: Place, run_id: RunIdArgument) -> None:
    """Stop a run: its launcher, its jobs, and the instances that they keep warm."""
    place.find(run_id).cancel()


@app.command()
@located()
def collect(
    place: Place,
    run_id: RunIdArgument,
    timeout: Annotated[
        int | None, typer.Option(parser=seconds, metavar="TIME", help="How long to wait for the jobs' end.")
    ] = None,
    prices: PricesOption = None,
    as_json: JsonOption = False,
) -> int:
    """Wait for the end of a run, release its instances, and report. Exit code 1: it has no result."""
    try:
        return place.find(run_id, prices=prices).collect(timeout=timeout, as_json=as_json)
    except TimeoutError as problem:
        raise DilocoError(f"{problem}: the run goes on; collect it again, or `cancel {run_id}`") from None


@app.command()
@located()
def resume(
    place: Place,
    run_id: RunIdArgument,
    takeover: TakeoverOption = False,
    max_cost: MaxCostOption = None,
    prices: PricesOption = None,
    as_json: JsonOption = False,
) -> int:
    """Supervise a run that was started before: adopt the jobs that run, relaunch those that ended without a result."""
    return place.find(run_id, prices=prices, max_cost=max_cost).resume(takeover=takeover, as_json=as_json)


@app.command()
@located(Backend.kubernetes)
def scale(
    place: Place,
    run_id: RunIdArgument,
    replicas: Annotated[int, typer.Option(help="How many replicas it shall have from now on.")],
) -> None:
    """Change how many replicas a running run on a cluster has; it must be one of --policy skip."""
    place.on_this_cluster(run_id).scale(replicas)


@app.command("list")
@located()
def list_(place: Place, as_json: JsonOption = False) -> None:
    """List the stack's or the namespace's runs that have jobs, the newest first."""
    if place.on_cluster:
        from diloco.kubernetes_run import list_runs as list_on_cluster

        cluster = place.cluster()
        print_runs(list_on_cluster(cluster.clients, cluster.namespace), "replicas", as_json=as_json)
    else:
        from diloco.sagemaker_run import list_runs

        print_runs(list_runs(place.read_outputs()), "jobs", as_json=as_json)
