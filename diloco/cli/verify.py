"""`verify`: whether every replica of a run held the same bits."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli.app import FAILED, app


@app.command()
def verify(
    uri: Annotated[str, typer.Argument(metavar="RENDEZVOUS_URI", help="The run's own prefix, with its id.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint; default: AWS's, or AWS_ENDPOINT_URL.")] = None,
) -> int:
    """Replay a run and say whether every replica held the same bits at every round. Exit code 1: they did not."""
    from diloco.embedded import environment
    from diloco.verify import verify_run

    with environment({} if endpoint_url is None else {"AWS_ENDPOINT_URL_S3": endpoint_url}):
        verdict, lines = asyncio.run(verify_run(uri))
    if as_json:
        sys.stdout.write(json.dumps(verdict, indent=1) + "\n")
    console = Console(stderr=as_json, highlight=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return 0 if verdict["same"] else FAILED
