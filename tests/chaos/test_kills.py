"""SIGKILL at every named point of a replica's life: the others go on, the next attempt holds the same bits."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Literal

import pytest

from diloco.exchange import layout
from diloco.exchange.layout import Member
from tests.chaos.harness import KILLED, Run, header, held, killed, payload, stopped, until
from tests.support.faults import FaultProxy, Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.embedded import EmbeddedS3

    NewRun = Callable[..., Run]


LAST = 4
"""The last round of :func:`survivors`."""


def survivors(run: Run) -> list[Any]:
    """Ranks 0 and 1; in the last round they wait for what the second attempt of rank 2 contributes."""
    return [run.start(rank, acts=[held(LAST, header(LAST, 2, 2))]) for rank in (0, 1)]


def comes_back(run: Run, others: list[Any]) -> None:
    """Start rank 2 again: it catches up, contributes to the last round, and all hold the same bits."""
    again = run.start(2)
    assert run.end(*others, again) == [0, 0, 0]
    run.check(reported={0: 1, 1: 1, 2: 2})
    assert {member.rank: member.attempt for member in run.participants(LAST)}[2] == 2


@pytest.mark.parametrize(
    ("point", "takes_part"),
    [
        pytest.param(killed("before", "create", payload(2, 2)), False, id="before its upload"),
        pytest.param(killed("before", "create", header(2, 2)), False, id="between payload and header"),
        pytest.param(killed("after", "create", header(2, 2)), True, id="after its header"),
    ],
)
def test_survivors_finish_the_round_of_a_replica_killed(
    new_run: NewRun, point: dict[str, Any], *, takes_part: bool
) -> None:
    run = new_run(rounds=LAST + 1)
    others = survivors(run)
    victim = run.start(2, points=[point])
    assert victim.end() == KILLED
    assert (Member(2, 1) in run.participants(2)) is takes_part
    assert (run.read(payload(2, 2)) is not None) is (point["key"] == header(2, 2))
    comes_back(run, others)


@pytest.mark.parametrize("when", ["before", "after"])
def test_survivors_average_the_shard_of_an_owner_that_is_killed(
    new_run: NewRun, when: Literal["before", "after"]
) -> None:
    mean = layout.mean(2, 0)  # in round 2 the third participant's
    run = new_run(rounds=LAST + 1, width=300, exchange={"reduce": "shard"})
    others = survivors(run)
    victim = run.start(2, points=[killed(when, "create", mean)])
    assert victim.end() == KILLED
    assert Member(2, 1) in run.participants(2)
    comes_back(run, others)
    assert run.read(layout.mean(2, 2)) is not None, "a payload of several shards"


@pytest.mark.parametrize(
    ("width", "operation", "missing"),
    [(16, "PUT", []), (1620, "PUT", []), (1620, "PART", ["obstore"])],
    ids=["in one request", "through obstore", "in parts"],
)
def test_survivors_finish_the_round_of_a_replica_killed_during_its_upload(
    new_run: NewRun, embedded_s3: EmbeddedS3, width: int, operation: str, missing: list[str]
) -> None:
    upload = Rule("stall", operation, f"*/{payload(2, 2)}")
    with FaultProxy(embedded_s3.endpoint_url, [upload]) as proxy:
        run = new_run(rounds=LAST + 1, width=width, exchange={"checkpoint_every": 10})
        others = survivors(run)
        victim = run.start(2, endpoint=proxy.endpoint_url, missing=missing)
        assert upload.hit.wait(60)
        victim.signal(signal.SIGKILL)
        assert victim.end() == KILLED
        assert Member(2, 1) not in run.participants(2)
        assert run.read(payload(2, 2)) is None
        comes_back(run, others)


def finish_with_restarts(run: Run, victim: int, *points: dict[str, Any], other: dict[str, Any] | None = None) -> None:
    """A strict run of two, of which one dies at each of the points, an attempt each, and is started again at once."""
    partner = run.start(1 - victim, points=[] if other is None else [other])
    for point in points:
        process = run.start(victim, points=[point])
        assert process.end() == KILLED
    if other is not None:
        partner.wait_until_stopped()
        partner.signal(signal.SIGCONT)
    again = run.start(victim)
    assert run.end(partner, again) == [0, 0]
    run.check(reported={1 - victim: 1, victim: len(points) + 1})


def two(new_run: NewRun, **changes: Any) -> Run:
    return new_run(replicas=2, exchange={"policy": "strict"}, **changes)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replica_killed_around_its_commit_comes_back(new_run: NewRun, when: str) -> None:
    run = two(new_run)
    # Rank 0 stands still once its header is there, so that the commit falls to rank 1.
    finish_with_restarts(
        run, 1, killed(when, "create", layout.commit(2)), other=stopped("after", "create", header(2, 0))
    )
    assert run.commit(2).committed_by_attempt == 1 if when == "after" else run.commit(2).committed_by in (0, 1)
    assert Member(1, 1) in run.participants(2) or when == "before"


def test_a_replica_killed_while_it_averages_comes_back(new_run: NewRun) -> None:
    finish_with_restarts(two(new_run), 1, killed("before", "read", payload(2, 0)))


def test_a_replica_killed_between_the_other_ones_commit_and_its_apply_comes_back(new_run: NewRun) -> None:
    run = two(new_run)
    partner = run.start(0)
    # It stands still once its header is there, so that the commit falls to rank 0.
    victim = run.start(1, points=[stopped("after", "create", header(2, 1)), killed("after", "read", layout.commit(2))])
    victim.wait_until_stopped()
    assert run.commit(2).committed_by == 0
    victim.signal(signal.SIGCONT)
    assert victim.end() == KILLED
    assert run.end(partner, run.start(1)) == [0, 0]
    run.check(reported={0: 1, 1: 2})


def test_a_replica_killed_while_it_writes_a_checkpoint_leaves_the_one_before(new_run: NewRun) -> None:
    """Before the parts, between two parts, between parts and manifest, after the manifest; each of the next attempts
    starts from what is there. Rank 1 writes checkpoints 2, 6, 10, … of a run of two that has one every two rounds."""
    run = two(new_run, rounds=18, fragments=2)
    finish_with_restarts(
        run,
        1,
        killed("before", "write", layout.checkpoint_part(2, Member(1, 1), 0)),
        killed("before", "write", layout.checkpoint_part(6, Member(1, 2), 1)),
        killed("before", "create", layout.manifest(10)),
        killed("after", "create", layout.manifest(14)),
    )
    assert run.read(layout.checkpoint_part(14, Member(1, 4), 0)) is not None


def test_a_replica_killed_around_its_vote_comes_back(new_run: NewRun) -> None:
    run = two(new_run, rounds=3)
    finish_with_restarts(
        run, 1, killed("before", "create", header(3, 1)), killed("after", "create", header(3, 1, attempt=2))
    )


def test_the_writer_of_the_model_killed_before_between_and_after_model_and_result(new_run: NewRun) -> None:
    """Rank 0 writes. While it is away the other may do so in its place, so the later points have a run each."""
    for point in (
        killed("before", "write_file", f"{layout.MODEL}/*"),
        killed("before", "create", layout.RESULT),
        killed("after", "create", layout.RESULT),
    ):
        run = two(new_run, rounds=2)
        finish_with_restarts(run, 0, point)


def test_the_writer_of_the_model_killed_during_the_upload_is_replaced(new_run: NewRun, embedded_s3: EmbeddedS3) -> None:
    """Nobody starts it again: the other one notices that it is dead, and writes the model."""
    upload = Rule("stall", "PUT", f"*/{layout.MODEL}/*")
    with FaultProxy(embedded_s3.endpoint_url, [upload]) as proxy:
        run = two(new_run, rounds=2)
        writer, other = run.start(0, endpoint=proxy.endpoint_url), run.start(1)
        assert upload.hit.wait(60)
        writer.signal(signal.SIGKILL)
        assert run.end(writer, other) == [KILLED, 0]
        run.check(reported={1: 1})


def test_all_replicas_killed_at_once_resume_from_a_checkpoint(new_run: NewRun) -> None:
    run = new_run(rounds=10, fragments=2)
    processes = [run.start(rank, acts=[held(7, "never")]) for rank in range(3)]
    commits = [run.commit(round_) for round_ in range(7)]
    # The rounds before checkpoint 2 are deleted once 2 and 4 are confirmed: from then on a checkpoint must be loaded.
    until(lambda: run.read(payload(0, 0)) is None, "the first round to be pruned")
    for process in processes:
        process.signal(signal.SIGKILL)
    assert run.end(*processes) == [KILLED] * 3
    assert run.read(layout.commit(7)) is None
    again = [run.start(rank) for rank in range(3)]
    assert run.end(*again) == [0, 0, 0]
    run.check(reported={0: 2, 1: 2, 2: 2})
    assert [run.commit(round_) for round_ in range(7)] == commits
    assert {member.attempt for member in run.participants(9)} == {2}
