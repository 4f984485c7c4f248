"""Plain data parallelism on the tokens of a run, in one process: what the replicas' loss is compared with."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from diloco.errors import DilocoError
from diloco.training.config import TrainConfig
from diloco.training.loop import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence


def train_baseline(config: TrainConfig, *, world_size: int, steps: int, seed: int) -> dict[str, Any]:
    """Take `steps` steps on the gradient averaged over what ranks 0 to `world_size` - 1 would see at each.

    The model, its first parameters, the schedule and the evaluation are those of a run with the same settings. Returns
    `baseline_eval_loss` and `baseline_initial_eval_loss` (nats per token) and `seconds`. Raises
    :class:`~diloco.errors.ConfigurationError` as the trainer does.
    """
    started = time.monotonic()
    job = prepare(config, world_size=world_size, steps=steps, seed=seed)
    initial = job.evaluate()
    for step in range(steps):
        for rank in range(world_size):
            loss = job.loss(job.data.batch(step, rank)) / world_size
            loss.backward()  # type: ignore[no-untyped-call]
        job.optimizer_step(step)
    return {
        "baseline_eval_loss": job.evaluate(),
        "baseline_initial_eval_loss": initial,
        "seconds": time.monotonic() - started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says and print the result as one JSON line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco.training.baseline", description=__doc__)
    parser.add_argument("--kwargs-json", default="{}", help="the trainer's settings, a JSON object")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        kwargs = json.loads(options.kwargs_json)
    except ValueError as problem:
        parser.error(f"--kwargs-json is not JSON: {problem}")
    if not isinstance(kwargs, dict):
        parser.error("--kwargs-json must be a JSON object")
    try:
        config = TrainConfig.from_kwargs(kwargs)
        result = train_baseline(config, world_size=options.world_size, steps=options.steps, seed=options.seed)
    except DilocoError as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
