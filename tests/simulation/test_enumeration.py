"""Two replicas, two rounds: every point at which one may be killed × every schedule with at most two deviations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.simulation.enumeration import kills, small
from tests.simulation.search import enumerate_all

if TYPE_CHECKING:
    from concurrent.futures import Executor

PARTS = 9
STRICT, ALONE = kills(small("strict")), kills(small("skip"))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kill_and_every_schedule_with_two_deviations(
    pool: Executor, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [*STRICT, None][part::PARTS]
    found = enumerate_all(pool, small("strict"), points, 2)
    assert not found.violations, str(found)
    with capsys.disabled():
        sys.stdout.write(f"\n{found.schedules} schedules with {len(points)} of {len(STRICT) + 1} kills (one is none)\n")


@pytest.mark.parametrize(("most", "killed"), [(2, False), (1, True)])
def test_replicas_that_may_go_on_alone(
    pool: Executor, most: int, killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = enumerate_all(pool, small("skip"), ALONE if killed else [None], most)
    assert not found.violations, str(found)
    with capsys.disabled():
        sys.stdout.write(f"\n{found.schedules} schedules of replicas that may go on alone\n")


@pytest.mark.parametrize("killed", [False, True])
def test_a_sharded_reduction(pool: Executor, killed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run = small("strict", "shard")
    points = kills(run)
    found = enumerate_all(pool, run, points if killed else [None], 1 if killed else 2)
    assert not found.violations, str(found)
    with capsys.disabled():
        sys.stdout.write(f"\n{found.schedules} schedules of a sharded reduction, {len(points)} kills\n")


def test_replicas_are_killed_at_each_change_of_the_store() -> None:
    for points in (STRICT, ALONE):
        assert {kill.rank for kill in points} == {0, 1}
        assert len(points) > 20
