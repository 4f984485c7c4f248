"""`prune`: delete runs that are over."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli.app import app
from diloco.errors import ConfigurationError


@app.command()
def prune(
    parent: Annotated[
        str, typer.Argument(metavar="RENDEZVOUS_PARENT", help="Parent of runs: a stack's rendezvousUri.")
    ],
    run_id: Annotated[list[str] | None, typer.Option(help="Only this run; may be given again.")] = None,
    older_than: Annotated[float, typer.Option(metavar="DAYS", help="Only runs whose newest object is older.")] = 0.0,
    failed: Annotated[
        bool,
        typer.Option("--failed", help="Also runs without a result in which nothing was written for 28 days or more."),
    ] = False,
    keep_model: Annotated[bool, typer.Option("--keep-model", help="Leave the model and the result.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only say what would be deleted.")] = False,
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint; default: AWS's, or AWS_ENDPOINT_URL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> int:
    """Delete finished runs, with their models. A run in which anything may be alive is left alone."""
    from diloco.embedded import environment
    from diloco.prune import DAY, Selection, prune_runs
    from diloco.status import size

    if older_than < 0:
        raise ConfigurationError(f"--older-than {older_than:g} is below 0: use at least 0")
    selection = Selection(
        run_ids=frozenset(run_id or ()), older_than=older_than * DAY, failed=failed, keep_model=keep_model
    )
    with environment({} if endpoint_url is None else {"AWS_ENDPOINT_URL_S3": endpoint_url}):
        verdicts = asyncio.run(prune_runs(parent, selection, delete=yes))
    if as_json:
        document = {"deleted": yes, "runs": [verdict.document() for verdict in verdicts]}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    console = Console(stderr=as_json, highlight=False)
    doing = "deleted" if yes else "would delete"
    for verdict in verdicts:
        word = doing if verdict.delete else "left"
        said = f"{word} {verdict.run_id}: {verdict.reason}; {verdict.objects} objects, {size(verdict.bytes)}"
        console.print(said, markup=False, soft_wrap=True)
    if not verdicts:
        console.print(f"no runs in {parent}", markup=False, soft_wrap=True)
    elif not yes and any(verdict.delete for verdict in verdicts):
        console.print("nothing was deleted: --yes deletes", markup=False, soft_wrap=True)
    return 0
