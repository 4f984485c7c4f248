"""`plan`: what a run on a stack would create."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.cli.app import FAILED, app
from diloco.cli.options import (
    InstanceTypeOption,
    JsonOption,
    KeepAliveOption,
    OutputsOption,
    PricesOption,
    SpotOption,
    StackOption,
    types,
)
from diloco.cli.run import Codec, Reduce

if TYPE_CHECKING:
    from diloco.executors.sagemaker_checks import Findings
    from diloco.plan import Plan
    from diloco.stack import StackOutputs


@app.command()
def plan(
    stack: StackOption = None,
    outputs: OutputsOption = None,
    replicas: Annotated[int, typer.Option(help="Independent replicas of the model: training jobs.")] = 2,
    instance_type: InstanceTypeOption = None,
    spot: SpotOption = False,
    keep_alive: KeepAliveOption = 0,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    model: Annotated[str, typer.Option(help="tiny or small, whose size is known.")] = "tiny",
    parameters: Annotated[int | None, typer.Option(help="Trained parameters of another model.")] = None,
    fragments: Annotated[int, typer.Option(help="Parts of the model that are synchronised in turn.")] = 1,
    codec: Annotated[Codec, typer.Option(help="Wire format of pseudo-gradients.")] = Codec.fp32,
    reduce: Annotated[Reduce, typer.Option(help="Algorithm of a round's mean.")] = Reduce.auto,
    mean_codec: Annotated[Codec, typer.Option(help="Wire format of the means of --reduce shard.")] = Codec.fp32,
    mbit: Annotated[float, typer.Option(help="Bandwidth of one replica to S3 that is assumed, Mbit/s.")] = 2000.0,
    prices: PricesOption = None,
    check: Annotated[bool, typer.Option("--check", help="Also ask AWS about quotas, the role and the bucket.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Print what a run on a stack would create. Creates nothing. Exit code 1: it is known not to fit."""
    from diloco.cost import Prices
    from diloco.estimate import PARAMETERS, estimate
    from diloco.plan import lines, make_plan
    from diloco.spec import new_run_id
    from diloco.stack import read_outputs

    found = read_outputs(outputs, stack)
    chosen = types(instance_type)
    made = make_plan(
        found,
        run_id=run_id or new_run_id(),
        replicas=replicas,
        instance_type=None if instance_type is None else chosen[0],
        spot=spot,
        keep_alive_seconds=keep_alive,
    )
    costs = estimate(
        Prices.load(prices),
        replicas=replicas,
        instance_types=chosen,
        parameters=PARAMETERS.get(model) if parameters is None else parameters,
        fragments=fragments,
        codec=codec.value,
        mean_codec=mean_codec.value,
        reduce=reduce.value,
        mbit=mbit,
        warm=keep_alive > 0,
    )
    findings = _ask(made, found, chosen) if check else None
    problems = [*made.problems, *(findings.problems if findings is not None else [])]
    if as_json:
        document = made.document() | {"cost": costs.document(), "problems": problems}
        if findings is not None:
            document["checked"] = {
                "quotas": findings.quotas,
                "in_use": findings.in_use,
                "warnings": findings.warnings,
            }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        rows = [f"{name:<10}  {text}" for name, text in costs.rows(found.region)]
        if findings is not None:
            rows += [f"{'in force':<10}  {_headroom(findings, name)}" for name in findings.quotas]
            rows += [f"{'warning':<10}  {text}" for text in findings.warnings]
            rows += [f"{'problem':<10}  {text}" for text in findings.problems]
        console = Console(highlight=False)
        for line in [*lines(made), *rows]:
            console.print(line, markup=False, soft_wrap=True)
    return FAILED if problems else 0


def _headroom(findings: Findings, name: str) -> str:
    value, used = findings.quotas[name], findings.in_use.get(name)
    return f"{name}: {'unknown' if value is None else f'{value:g}'}{'' if used is None else f', {used} in use'}"


def _ask(made: Plan, outputs: StackOutputs, chosen: tuple[str, ...]) -> Findings:
    """Ask AWS what `run` would ask before it starts anything."""
    from diloco.executors.sagemaker_checks import check
    from diloco.executors.sagemaker_clients import Clients
    from diloco.sagemaker_run import job_settings

    settings = job_settings(
        outputs, made.run_id, instance_types=chosen, spot=made.spot, keep_alive=made.keep_alive_seconds
    )
    return check(Clients(outputs.region), settings, replicas=len(made.jobs), rendezvous_uri=made.rendezvous_uri)
