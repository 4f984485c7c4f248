"""`plan`: what a run on a stack would create."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli.app import FAILED, app
from diloco.cli.options import (  # noqa: TC001 - typer reads the annotations
    JsonOption,
    KeepAliveOption,
    OutputsOption,
    SpotOption,
    StackOption,
)


@app.command()
def plan(
    stack: StackOption = None,
    outputs: OutputsOption = None,
    replicas: Annotated[int, typer.Option(help="Independent replicas of the model: training jobs.")] = 2,
    instance_type: Annotated[str | None, typer.Option(help="Of each job: ml.g5.2xlarge, …")] = None,
    spot: SpotOption = False,
    keep_alive: KeepAliveOption = 0,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Print what a run on a stack would create. Creates nothing. Exit code 1: it is known not to fit."""
    from diloco.plan import lines, make_plan
    from diloco.spec import new_run_id
    from diloco.stack import read_outputs

    made = make_plan(
        read_outputs(outputs, stack),
        run_id=run_id or new_run_id(),
        replicas=replicas,
        instance_type=instance_type,
        spot=spot,
        keep_alive_seconds=keep_alive,
    )
    if as_json:
        sys.stdout.write(json.dumps(made.document(), indent=1) + "\n")
    else:
        console = Console(highlight=False)
        for line in lines(made):
            console.print(line, markup=False, soft_wrap=True)
    return FAILED if made.problems else 0
