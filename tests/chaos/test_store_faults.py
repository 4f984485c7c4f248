"""An S3 that answers late, wrongly, by half or never, and one that denies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ExitCode
from diloco.exchange import layout
from diloco.exchange.layout import Member
from tests.chaos.harness import Run, header, held, payload, until
from tests.support.faults import FaultProxy, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.embedded import EmbeddedS3

    NewRun = Callable[..., Run]


@pytest.fixture
def proxy(embedded_s3: EmbeddedS3) -> Iterator[FaultProxy]:
    with FaultProxy(embedded_s3.endpoint_url) as proxy:
        yield proxy


def strict(new_run: NewRun, proxy: FaultProxy, **changes: Any) -> Run:
    exchange = {"policy": "strict"} | changes.pop("exchange", {})
    return new_run(replicas=2, endpoint=proxy.endpoint_url, exchange=exchange, **changes)


def ends_well(run: Run, **trainer: Any) -> None:
    processes = [run.start(rank, **trainer) for rank in range(run.replicas)]
    assert run.end(*processes) == [0] * run.replicas
    run.check(reported=dict.fromkeys(range(run.replicas), 1))


def meets(proxy: FaultProxy, run: Run, *faults: tuple[str, str, str], **more: Any) -> list[Rule]:
    """Faults as (fault, operation, key below the run)."""
    return [proxy.add(Rule(fault, operation, f"{run.run_id}/{key}", **more)) for fault, operation, key in faults]


def all_struck(rules: list[Rule]) -> None:
    assert [rule for rule in rules if not rule.hits] == []


# botocore repeats a request once by itself, so each fault strikes three times: the third reaches our own retries.
@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "reset", "hang"])
def test_what_may_get_better_is_tried_again(new_run: NewRun, proxy: FaultProxy, code: str) -> None:
    run = strict(new_run, proxy, rounds=5)
    rules = meets(
        proxy,
        run,
        (code, "PUT", payload(1, 0)),
        (code, "PUT", header(1, 1)),
        (code, "LIST", f"rounds/{2:08d}/h/"),
        (code, "PUT", layout.commit(2)),
        (code, "GET", payload(3, 1)),
        (code, "PUT", layout.checkpoint_part(2, Member(1, 1), 0)),
        (code, "PUT", layout.RESULT),
        times=1 if code == "hang" else 3,
    )
    ends_well(run, operation_timeout=1.0)
    all_struck(rules)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "and that of the client's own retry"])
def test_the_answer_to_a_create_is_lost_and_the_object_known_by_its_nonce(
    new_run: NewRun, proxy: FaultProxy, times: int
) -> None:
    run = strict(new_run, proxy, rounds=4)
    rules = meets(
        proxy,
        run,
        ("lost", "PUT", layout.claim(Member(0, 1))),
        ("lost", "PUT", layout.RUN),
        ("lost", "PUT", layout.manifest(0)),
        ("lost", "PUT", payload(1, 0)),
        ("lost", "PUT", header(1, 1)),
        ("lost", "PUT", layout.commit(2)),
        ("lost", "PUT", layout.manifest(2)),
        ("lost", "PUT", header(4, 0)),
        ("lost", "PUT", layout.RESULT),
        times=times,
    )
    ends_well(run)
    all_struck(rules)
    assert len(run.keys(layout.MEMBERS)) == 2  # nobody took its own claim for another's


def test_the_answer_to_the_end_of_an_upload_in_parts_is_lost(new_run: NewRun, proxy: FaultProxy) -> None:
    run = strict(new_run, proxy, rounds=2, width=1620, exchange={"checkpoint_every": 10})
    rules = meets(
        proxy,
        run,
        ("SlowDown", "BEGIN", payload(0, 0)),
        ("reset", "PART", payload(0, 1)),
        ("lost", "COMPLETE", payload(1, 0)),
        times=3,
    )
    ends_well(run, missing=["obstore"])
    all_struck(rules)


def test_large_transfers_through_obstore_meet_faults(new_run: NewRun, proxy: FaultProxy) -> None:
    run = strict(new_run, proxy, rounds=3, width=1620, exchange={"checkpoint_every": 10})
    rules = meets(
        proxy,
        run,
        ("SlowDown", "PUT", payload(0, 0)),
        ("reset", "PUT", payload(0, 1)),
        ("lost", "PUT", payload(1, 0)),
        ("cut", "PUT", payload(1, 1)),
        ("truncate", "GET", payload(2, 0)),
        ("reset", "GET", payload(2, 1)),
    )
    ends_well(run)
    all_struck(rules)


def test_bodies_that_are_cut_truncated_slow_or_late(new_run: NewRun, proxy: FaultProxy) -> None:
    run = strict(new_run, proxy, rounds=6, width=64)
    rules = meets(
        proxy,
        run,
        ("cut", "PUT", payload(1, 0)),
        ("cut", "PUT", layout.commit(1)),
        ("truncate", "GET", payload(2, 0)),
        ("truncate", "GET", payload(2, 1)),
        ("truncate", "LIST", f"rounds/{3:08d}/h/"),
        ("truncate", "GET", layout.commit(3)),
        ("slow", "GET", payload(4, 0)),
        ("slow", "PUT", payload(4, 1)),
        ("delay", "PUT", header(5, 0)),
        ("delay", "LIST", f"rounds/{5:08d}/h/"),
        times=2,
    )
    ends_well(run)
    # Whoever commits round 3 does not read its record.
    all_struck([rule for rule in rules if not rule.key.endswith(layout.commit(3))])


def test_a_run_survives_a_store_that_is_away_for_a_while(new_run: NewRun, proxy: FaultProxy) -> None:
    run = strict(new_run, proxy, rounds=6)
    processes = [run.start(rank, acts=[held(2, "go")]) for rank in range(2)]
    run.commit(1)
    proxy.rate, proxy.faults = 1.0, ("SlowDown", "reset", "ServiceUnavailable")
    run.create("go", b"")
    until(lambda: sum(proxy.counts.values()) >= 30, "30 faults")
    proxy.rate = 0.0
    assert run.end(*processes) == [0, 0]
    run.check(reported={0: 1, 1: 1})


def test_a_run_among_random_faults(new_run: NewRun, proxy: FaultProxy) -> None:
    proxy.rate = 0.1
    run = strict(new_run, proxy, rounds=8)
    ends_well(run)
    assert len(proxy.counts) >= 5, proxy.counts
    assert sum(proxy.counts.values()) >= 20, proxy.counts


@pytest.mark.parametrize("fault", ["hang", "SlowDown"])
def test_a_store_that_stays_away_ends_in_one_error_that_names_the_key(
    new_run: NewRun, proxy: FaultProxy, fault: str
) -> None:
    run = strict(new_run, proxy, exchange={"retry_for": 1, "timeout": 6})
    meets(proxy, run, (fault, "PUT", payload(1, 1)), times=float("inf"))
    # Rank 0 does not count how long the other one takes to start.
    first = run.start(0, acts=[held(0, header(0, 1))])
    second = run.start(1, operation_timeout=1.0)
    assert run.end(first, second) == [ExitCode.FAILED, ExitCode.LOST_RENDEZVOUS]
    assert f"{run.uri}/{payload(1, 1)}: no answer to a create" in run.error(1).error
    assert "given up after" in run.error(1).error
    assert "round 1 was not completed within 6 s, still waiting for rank 1" in run.error(0).error
    assert "Traceback" not in second.text()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("ExpiredToken", "the credentials have expired: renew them"),
        ("InvalidAccessKeyId", "the access key id is unknown"),
        ("AccessDenied", "access denied on create: these credentials need s3:PutObject there"),
        ("NoSuchBucket", "the bucket does not exist"),
    ],
)
def test_what_can_not_get_better_ends_at_once(new_run: NewRun, proxy: FaultProxy, fault: str, says: str) -> None:
    """With a budget of minutes for retries, of which nothing is used."""
    run = strict(new_run, proxy, exchange={"retry_for": 600, "timeout": 600})
    [rule] = meets(proxy, run, (fault, "PUT", payload(1, 1)), times=float("inf"))
    _, denied = [run.start(rank) for rank in range(2)]
    assert denied.end() == ExitCode.LOST_RENDEZVOUS
    said = run.error(1).error
    assert says in said
    assert (f"{run.uri}: " if fault == "NoSuchBucket" else f"{run.uri}/{payload(1, 1)}") in said
    assert rule.hits == 1


def test_a_bucket_that_is_not_there_is_named(new_run: NewRun) -> None:
    run = new_run(replicas=1)
    run.uri = f"s3://no-such-bucket/{run.run_id}"
    process = run.start(0)
    assert process.end() == ExitCode.LOST_RENDEZVOUS
    last = process.text().strip().splitlines()[-1]
    assert last.startswith(f"diloco: error: {run.uri}: the bucket does not exist")
