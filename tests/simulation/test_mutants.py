"""The search finds what it is for: each mutant of the real code is caught, by an invariant and not by a crash."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import SPECIAL
from tests.simulation.simulation import simulate

if TYPE_CHECKING:
    from tests.simulation.mutation import Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.applied():
        for seed in range(mutant.budget):
            violation = simulate(SPECIAL[mutant.scenario](seed)).violation
            if violation is not None:
                break
        else:
            pytest.fail(f"survives {mutant.budget} schedules of {mutant.scenario!r}: {mutant.rule}")
    assert "crashes" not in violation, violation
    # Seen with `pytest -rP`.
    sys.stdout.write(f"{mutant.name}: {seed + 1} schedule(s) of {mutant.scenario!r}: {violation[:100]}\n")


def test_a_mutant_is_gone_afterwards() -> None:
    for mutant in MUTANTS:
        before = [vars(change.owner)[change.name] for change in mutant.changes]
        with mutant.applied():
            changed = [vars(change.owner)[change.name] for change in mutant.changes]
            assert all(now is not real for now, real in zip(changed, before, strict=True))
        assert [vars(change.owner)[change.name] for change in mutant.changes] == before
