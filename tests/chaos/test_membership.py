"""Processes that are stopped and go on, and two processes with one rank."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from diloco.errors import ExitCode
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.rounds import ABSENT, LATE
from tests.chaos.harness import Run, header, held, payload, stopped, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.exchange.records import Beat

    NewRun = Callable[..., Run]


def test_a_replica_stopped_past_every_waiting_time_is_left_out_and_catches_up(new_run: NewRun) -> None:
    run = new_run(rounds=6)
    others = [run.start(rank, acts=[held(5, header(5, 2))]) for rank in (0, 1)]
    sleeper = run.start(2, points=[stopped("before", "create", payload(2, 2))])
    sleeper.wait_until_stopped()
    assert 2 in run.left_out(2)
    assert 2 in run.left_out(3)  # it was stopped for longer than the others wait for the dead
    sleeper.signal(signal.SIGCONT)
    assert run.end(*others, sleeper) == [0, 0, 0]
    run.check(reported={0: 1, 1: 1, 2: 1})
    assert Member(2, 1) not in run.participants(2)


def test_observers_that_were_stopped_declare_nobody_dead(new_run: NewRun) -> None:
    """Two wait for the third, and all are stopped for longer than any waiting time."""
    run = new_run(rounds=4, exchange={"grace": 8, "dead_after": 3})
    processes = [run.start(rank) for rank in (0, 1)]
    processes.append(run.start(2, acts=[held(2, "go")]))
    beats = [until(partial(_waits_for_rank_2, run, rank), f"rank {rank} to wait for rank 2") for rank in (0, 1)]
    for process in processes:
        process.signal(signal.SIGSTOP)
        process.wait_until_stopped()
    time.sleep(9)  # longer than both: the fault itself, not a wait for something
    for process in processes:
        process.signal(signal.SIGCONT)
    for beat in beats:
        until(partial(_goes_on, run, beat), f"rank {beat.rank} to be back")
    run.create("go", b"")
    assert run.end(*processes) == [0, 0, 0]
    assert [member.rank for member in run.participants(2)] == [0, 1, 2]
    run.check(reported={0: 1, 1: 1, 2: 1})


def _goes_on(run: Run, before: Beat) -> bool:
    beat = run.beat(before.rank)
    return beat is not None and beat.counter > before.counter + 2


def _waits_for_rank_2(run: Run, rank: int) -> Beat | None:
    beat = run.beat(rank)
    return beat if beat is not None and beat.round == 2 and beat.waiting_for == ["rank 2"] else None


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_a_zombie_and_its_replacement_count_once_and_the_zombie_is_fenced(new_run: NewRun, policy: str) -> None:
    """The first attempt wakes up between its payload and its header, in a round that its replacement is in as well."""
    run = new_run(rounds=4, exchange={"policy": policy})
    others = [run.start(rank, acts=[held(2, "go")]) for rank in (0, 1)]
    zombie = run.start(2, points=[stopped("before", "create", header(2, 2))])
    zombie.wait_until_stopped()
    replacement = run.start(2)
    run.wait_for(header(2, 2, attempt=2))
    zombie.signal(signal.SIGCONT)
    assert zombie.end() == ExitCode.FENCED
    run.create("go", b"")
    assert run.end(*others, replacement) == [0, 0, 0]
    assert run.participants(2) == [Member(0, 1), Member(1, 1), Member(2, 2)]
    run.check(reported={0: 1, 1: 1, 2: 2})
    assert "attempt 2" in run.error(2).error
    assert run.read(layout.result(Member(2, 1))) is None


def test_a_straggler_is_left_out_after_the_grace_period_then_waited_for_by_nobody(new_run: NewRun) -> None:
    """Its beats go on: only its contributions are late. The grace period is the adaptive one, half a minute at first,
    and short once the others have been seen to come at once."""
    run = new_run(rounds=8, exchange={"grace": None, "dead_after": 60})
    together = [held(round_, header(round_, 2)) for round_ in (0, 1, 7)]
    others = [run.start(rank, acts=together) for rank in (0, 1)]
    straggler = run.start(2, acts=[held(2, layout.commit(5))])
    assert [run.left_out(round_).get(2) for round_ in range(6)] == [None, None, LATE, LATE, ABSENT, ABSENT]
    assert run.end(*others, straggler) == [0, 0, 0]
    run.check(reported={0: 1, 1: 1, 2: 1})
    said = others[0].text()
    assert "left out: rank 2 (late)" in said
    waited = dict(re.findall(r"round (\d): enough are there, grace period ([\d.]+) s for rank 2", said))
    assert 1 <= float(waited["2"]) < 30
    assert waited.keys() <= {"0", "1", "2", "3", "7"}


def test_strict_names_rank_and_round_of_a_straggler_on_every_replica(new_run: NewRun) -> None:
    run = new_run(replicas=3, exchange={"policy": "strict", "timeout": 6})
    together = [held(round_, header(round_, 2)) for round_ in (0, 1)]
    others = [run.start(rank, acts=together) for rank in (0, 1)]
    straggler = run.start(2, acts=[held(2, layout.error(Member(0, 1))), held(2, layout.error(Member(1, 1)))])
    assert run.end(*others, straggler) == [1, 1, 1]
    for rank in (0, 1):
        assert "round 2 was not completed within 6 s, still waiting for rank 2" in run.error(rank).error
    # It comes when all headers are there, so that round is committed; in the next one it is alone.
    assert "round 3 was not completed within 6 s, still waiting for rank 0, rank 1" in run.error(2).error
