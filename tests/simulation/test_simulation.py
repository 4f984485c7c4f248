"""Random schedules with faults: nothing that must never happen happens, and every run reaches its end."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from diloco.errors import DivergedError, ObjectMissingError
from tests.simulation.scenario import AT_OPERATION, IN_ROUND, SPECIAL, Fault, Scenario, scenario
from tests.simulation.search import search
from tests.simulation.simulation import Simulation, simulate

if TYPE_CHECKING:
    from concurrent.futures import Executor

SCHEDULES = 20_000
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(pool: Executor, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    size = SCHEDULES // PARTS
    found = search(pool, "mix", part * size, (part + 1) * size)
    assert not found.violations, str(found)
    assert found.schedules == size
    # The search means something only if all of this was met.
    expected = {*AT_OPERATION, *IN_ROUND, "pruning", "a checkpoint is loaded", "a wrong checkpoint", "an empty round"}
    expected |= {f"ends: {name}" for name in ("FencedError", "DivergedError", "StoreUnreachableError")}
    expected |= {f"left out: {why}" for why in ("late", "diverged", "abstained")}
    assert not expected - found.seen.keys(), f"never met: {sorted(expected - found.seen.keys())}"
    with capsys.disabled():
        sys.stdout.write(f"\n{found.schedules} random schedules; {dict(found.seen.most_common())}\n")


@pytest.mark.parametrize("name", sorted(SPECIAL.keys() - {"mix"}))
def test_rare_situations(pool: Executor, name: str) -> None:
    found = search(pool, name, 0, 500)
    assert not found.violations, str(found)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 101])
def test_a_seed_replays_step_by_step(seed: int) -> None:
    first, second = (simulate(scenario(seed), traced=True) for _ in range(2))
    assert first.trace
    assert first.trace == second.trace


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--mutant", "a commit without min_replicas"], 1)])
def test_the_command_replays_a_seed(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "tests.simulation", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "started" in done.stdout.splitlines()[0] or "create" in done.stdout
    assert "seed 0: " in done.stdout
    assert ("are needed" if code else "every invariant held") in done.stdout.splitlines()[-1]


def test_a_bit_that_flips_after_the_last_digest_is_not_in_the_result() -> None:
    """A bit of rank 0's parameters flips after the digest of the last round was taken: rank 0 must not write the
    model, since what it holds is not what it voted for.
    """
    flips = Scenario(0, rounds=2, training=0.1, faults=(Fault("flip", 0, round=1),))
    violation = simulate(flips).violation
    assert violation is None, violation


def test_one_that_diverged_in_another_fragment_catches_up_from_a_checkpoint() -> None:
    """Rank 2 diverges in fragment 0 and then misses the round of fragment 1. It catches up from its own state, which
    replays fragment 1 only, and abstains in the next round of fragment 0: there its digest differs.
    """
    faults = (Fault("diverge", 2, round=0), Fault("slow", 2, round=1, seconds=2.0))
    assert DivergedError not in ends(Scenario(2, fragments=2, rounds=5, training=0.1, grace=1.0, faults=faults))


def test_an_own_state_that_goes_while_it_is_looked_for_is_not_missed() -> None:
    """The older attempt of a rank still saves its inner state, and deletes the one before, while the newer one has
    listed them and is about to read.
    """
    faults = (Fault("zombie", 1, nth=90), Fault("delay", 1, "read", "inner", seconds=0.8))
    run = Scenario(0, world_size=2, min_replicas=1, rounds=6, inner=True, training=0.5, faults=faults)
    assert ObjectMissingError not in ends(run)


def ends(run: Scenario) -> set[type]:
    """How the processes of a run end."""
    simulation = Simulation(run)
    violation = simulate(run, simulation=simulation).violation
    assert violation is None, violation
    return {type(process.problem) for process in simulation.processes}
