"""Replay a schedule: `python -m tests.simulation SEED` prints the trace of its steps; 1 if an invariant is violated."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import SPECIAL
from tests.simulation.simulation import simulate


def main() -> int:
    """Run one seed."""
    mutants = {mutant.name: mutant for mutant in MUTANTS}
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Replay one simulated run.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--scenario", choices=sorted(SPECIAL), help="default: mix, or the mutant's")
    parser.add_argument("--mutant", choices=sorted(mutants), metavar="NAME", help="break the code first")
    parser.add_argument("--quiet", action="store_true", help="only how it went")
    options = parser.parse_args()
    mutant = mutants.get(options.mutant)
    name = options.scenario or (mutant.scenario if mutant is not None else "mix")
    with mutant.applied() if mutant is not None else nullcontext():
        outcome = simulate(SPECIAL[name](options.seed), traced=not options.quiet)
    said = f"{outcome.steps} steps: {outcome.violation or 'every invariant held'}"
    sys.stdout.write("\n".join([*outcome.trace, str(outcome.scenario), said, ""]))
    return int(outcome.violation is not None)


if __name__ == "__main__":
    sys.exit(main())
