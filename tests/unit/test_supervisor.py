"""What follows from the end of a rank's process, as tables; time and chance are given."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.errors import ExitCode
from diloco.supervisor import Action, Backoff, Supervisor

SKIP: dict[str, Any] = {"policy": "skip", "min_replicas": 1}


class NoChance(random.Random):
    def random(self) -> float:
        return 0.0


def supervisor(ranks: int = 2, **changes: Any) -> Supervisor:
    values: dict[str, Any] = {
        "ranks": range(ranks),
        "policy": "strict",
        "min_replicas": ranks,
        "max_restarts": 3,
        "chance": NoChance(),
    }
    return Supervisor(**(values | changes))


@pytest.mark.parametrize(
    ("code", "action", "text"),
    [
        (0, "done", "finished"),
        (1, "relaunch", "restart 1 of 3 in 1 s: exit code 1: why"),
        (ExitCode.LOST_RENDEZVOUS, "relaunch", "restart 1 of 3 in 1 s: exit code 69: why"),
        (ExitCode.INTERRUPTED, "relaunch", "restart 1 of 3 in 1 s: exit code 143: why"),
        (137, "relaunch", "restart 1 of 3 in 1 s: exit code 137: why"),
        (-9, "relaunch", "restart 1 of 3 in 1 s: exit code -9: why"),
        (3, "relaunch", "restart 1 of 3 in 1 s: exit code 3: why"),
        (None, "relaunch", "restart 1 of 3 in 1 s: it ended: why"),
        (ExitCode.FENCED, "fenced", "fenced: why"),
        (ExitCode.BAD_CONFIGURATION, "fail", "rank 1 ended with exit code 78: why"),
        (ExitCode.USAGE, "fail", "rank 1 ended with exit code 2: why"),
    ],
)
@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_what_an_exit_code_leads_to(policy: str, code: int | None, action: Action, text: str) -> None:
    it = supervisor(policy=policy, min_replicas=1)
    decision = it.decide(1, code, "why", now=100.0)
    assert (decision.action, decision.text) == (action, text)
    assert decision.at == (101.0 if action == "relaunch" else None)
    assert it.failure() == (text if action == "fail" else None)
    assert it.due(1e9) == ([1] if action == "relaunch" else [])


@pytest.mark.parametrize(
    ("restart", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 30.0), (7, 30.0), (5000, 30.0)]
)
def test_the_backoff_doubles_up_to_its_most(restart: int, seconds: float) -> None:
    assert Backoff().seconds(restart, NoChance()) == seconds
    drawn = {Backoff().seconds(restart, random.Random(seed)) for seed in range(50)}
    assert len(drawn) == 50
    assert 0.75 * seconds <= min(drawn) < 0.8 * seconds
    assert 0.95 * seconds < max(drawn) <= seconds


def test_a_rank_is_relaunched_later_each_time_and_then_given_up() -> None:
    it = supervisor()
    now, waits = 0.0, []
    for restart in (1, 2, 3):
        at = it.decide(1, 137, "killed", now).at
        assert at is not None
        assert it.due(at - 0.001) == []
        assert it.due(at) == [1]
        assert it.state(1) == "waiting"
        assert it.restarts(1) == restart - 1
        it.relaunched(1)
        assert it.due(at) == []
        assert it.state(1) == "running"
        waits.append(at - now)
        now = at + 100
    assert waits == [1.0, 2.0, 4.0]
    last = it.decide(1, 137, "killed", now)
    assert (last.action, last.text) == ("fail", "rank 1 ended with exit code 137: killed (restarted 3 times)")
    assert it.due(1e9) == []


def test_restarts_are_counted_for_each_rank_alone() -> None:
    it = supervisor(max_restarts=1)
    for rank in (0, 1):
        assert it.decide(rank, 1, "died", 0.0).action == "relaunch"
    assert it.due(1.0) == [0, 1]
    it.relaunched(0)
    assert it.due(1.0) == [1]


def test_strict_fails_with_the_first_rank_that_is_given_up() -> None:
    it = supervisor(3, max_restarts=0, min_replicas=1)
    assert it.decide(2, 1, "died", 0.0).text == "rank 2 ended with exit code 1: died"
    assert it.failure() == "rank 2 ended with exit code 1: died"


def test_skip_goes_on_while_enough_can_take_part() -> None:
    it = supervisor(4, policy="skip", min_replicas=2, max_restarts=1)
    assert it.decide(0, 1, "died", 0.0).action == "relaunch"
    it.relaunched(0)
    first = it.decide(0, 69, "no store", 5.0)
    assert (first.action, first.text) == ("out", "given up after 1 restart: exit code 69: no store")
    assert it.decide(1, 76, "newer", 5.0).action == "fenced"  # its newer attempt takes part
    assert it.decide(2, 1, "died", 5.0).action == "relaunch"  # and one that waits for its restart will
    it.relaunched(2)
    assert it.decide(2, 1, "died again", 9.0).action == "out"
    it.decide(3, 1, "died", 9.0)
    it.relaunched(3)
    assert it.failure() is None
    last = it.decide(3, 137, "killed", 12.0)
    assert last.action == "fail"
    assert last.text == (
        "rank 0 ended with exit code 69: no store (restarted 1 time);"
        " rank 2 ended with exit code 1: died again (restarted 1 time);"
        " rank 3 ended with exit code 137: killed (restarted 1 time) (left: 1, --min-replicas 2)"
    )


def test_a_done_rank_still_counts() -> None:
    it = supervisor(**SKIP, max_restarts=0)
    it.decide(0, 0, None, 0.0)
    assert it.decide(1, 1, "died", 0.0).action == "out"
    assert it.failure() is None


def test_a_bad_configuration_is_the_reason_whatever_else_died() -> None:
    it = supervisor(3, max_restarts=0)
    it.decide(0, 1, "died", 0.0)
    it.decide(1, 78, "no such model", 0.0)
    it.decide(2, 78, "no such data", 0.0)
    assert it.failure() == "rank 1 ended with exit code 78: no such model"


def test_idle_once_nothing_runs_or_will() -> None:
    it = supervisor(4, **SKIP, max_restarts=1)
    it.decide(0, 0, None, 0.0)
    it.decide(1, 76, "replaced by attempt 2", 0.0)
    it.decide(2, 1, "died", 0.0)
    it.relaunched(2)
    it.decide(2, 1, "died", 0.0)
    assert not it.idle, "rank 3 runs"
    it.decide(3, 1, "died", 0.0)
    assert not it.idle, "rank 3 will run"
    it.relaunched(3)
    it.decide(3, 0, None, 0.0)
    assert it.idle
    assert it.failure() is None
    assert it.explain() == (
        "rank 1 was fenced: replaced by attempt 2; rank 2 ended with exit code 1: died (restarted 1 time)"
    )


def test_nothing_to_explain_when_all_are_done() -> None:
    it = supervisor()
    it.decide(0, 0, None, 0.0)
    it.decide(1, 0, None, 0.0)
    assert (it.idle, it.explain()) == (True, None)
