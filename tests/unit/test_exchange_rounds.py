"""Who is in a round: a table of cases, and what holds for every set of headers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Header, Payload
from diloco.exchange.rounds import (
    ABSENT,
    CAUGHT_UP,
    NOT_FINITE,
    Ended,
    HeaderReader,
    Proposal,
    Rules,
    Waiting,
    decide,
)
from diloco.exchange.stores import MemoryStore
from tests.support.stores import RecordingStore
from tests.support.virtual import World

SKIP = Rules("skip", world_size=3, min_replicas=2)
STRICT = Rules("strict", world_size=3, min_replicas=2)
PAYLOAD = Payload(codec="fp32", numel=2, size=1032, data_offset=1024, chunk_bytes=64, chunks=["c"], layout="l")


def header(rank: int, base: str = "base", *, attempt: int = 1, abstains: str | None = None, **changes: Any) -> Header:
    fields: dict[str, Any] = {
        "kind": "contribution" if abstains is None else "abstention",
        "round": 5,
        "fragment": 0,
        "rank": rank,
        "attempt": attempt,
        "weight": 10 if abstains is None else 0,
        "base_digest": base,
        "reason": abstains,
        "payload": PAYLOAD if abstains is None else None,
    }
    return Header.model_validate(fields | changes)


def judge(
    rules: Rules,
    *headers: Header,
    waited_for: set[int] | None = None,
    grace_over: bool = False,
    rejected: dict[Member, str] | None = None,
) -> Proposal | Waiting | Ended:
    return decide(
        rules,
        {h.rank: h for h in headers},
        rejected=rejected or {},
        waited_for={0, 1, 2} if waited_for is None else waited_for,
        grace_over=grace_over,
    )


def ranks(decision: object) -> list[int]:
    assert isinstance(decision, Proposal), decision
    return [participant.rank for participant in decision.participants]


def left_out(decision: object) -> dict[int, str]:
    assert isinstance(decision, Proposal), decision
    return {out.rank: out.reason for out in decision.left_out}


def test_all_there() -> None:
    for rules in (SKIP, STRICT):
        decision = judge(rules, header(2), header(0), header(1))
        assert ranks(decision) == [0, 1, 2]
        assert left_out(decision) == {}


@pytest.mark.parametrize("rules", [SKIP, STRICT])
def test_nobody_there(rules: Rules) -> None:
    decision = judge(rules)
    assert isinstance(decision, Waiting)
    assert not decision.enough
    assert "rank 1" in decision.waiting_for


def test_min_replicas_holds_on_the_first_check_and_after_the_grace() -> None:
    for grace_over in (False, True):
        decision = judge(SKIP, header(0), waited_for={0}, grace_over=grace_over)
        assert decision == Waiting(["min_replicas (1 of 2)"], enough=False)


def test_skip_waits_for_those_waited_for_until_the_grace_is_over() -> None:
    assert judge(SKIP, header(0), header(2)) == Waiting(["rank 1"], enough=True)
    decision = judge(SKIP, header(0), header(2), grace_over=True)
    assert ranks(decision) == [0, 2]
    assert left_out(decision) == {1: "late"}
    assert isinstance(decision, Proposal)
    assert decision.left_out[0].attempt is None


def test_skip_does_not_wait_for_whom_nobody_waits_for() -> None:
    decision = judge(SKIP, header(0), header(2), waited_for={0, 2})
    assert ranks(decision) == [0, 2]
    assert left_out(decision) == {1: ABSENT}
    assert isinstance(decision, Proposal)
    assert decision.reason == "nobody else is waited for, without rank 1"


def test_strict_waits_for_every_rank_whatever_the_grace() -> None:
    decision = judge(STRICT, header(0), header(2), waited_for=set(), grace_over=True)
    assert decision == Waiting(["rank 1"], enough=False)


def test_a_tie_waits_even_beyond_the_grace() -> None:
    rules = Rules("skip", world_size=4, min_replicas=2)
    tied = [header(0, "a"), header(1, "a"), header(2, "b"), header(3, "b")]
    decision = judge(rules, *tied, grace_over=True)
    assert isinstance(decision, Waiting)
    assert not decision.enough
    assert "tie" in decision.waiting_for[0]
    assert ranks(judge(rules, *tied, header(4, "b"))) == [2, 3, 4]


def test_another_digest_is_left_out_and_named() -> None:
    decision = judge(SKIP, header(0, "a"), header(1, "bbbbbbbbbbbbbbbb"), header(2, "a"))
    assert ranks(decision) == [0, 2]
    assert left_out(decision) == {1: "diverged: started from bbbbbbbbbbbb, not a"}
    assert isinstance(decision, Proposal)
    assert (decision.base_digest, decision.left_out[0].attempt) == ("a", 1)


def test_the_most_held_digest_wins_whoever_comes_first() -> None:
    decision = judge(SKIP, header(0, "z"), header(1, "a"), header(2, "a"))
    assert ranks(decision) == [1, 2]


def test_an_abstention_counts_and_is_named() -> None:
    decision = judge(SKIP, header(0), header(1, abstains=CAUGHT_UP), waited_for={0, 1})
    assert ranks(decision) == [0]
    assert left_out(decision) == {1: f"abstained: {CAUGHT_UP}", 2: ABSENT}


def test_all_abstain() -> None:
    for rules in (SKIP, STRICT):
        decision = judge(rules, *(header(rank, abstains=CAUGHT_UP) for rank in range(3)))
        assert ranks(decision) == []
        assert set(left_out(decision)) == {0, 1, 2}


def test_strict_ends_on_nan_naming_the_rank() -> None:
    decision = judge(STRICT, header(0), header(1, abstains=NOT_FINITE), header(2))
    assert decision == Ended(f"rank 1 (attempt 1) abstains: {NOT_FINITE}")


def test_strict_ends_on_a_difference_naming_both_sides() -> None:
    decision = judge(STRICT, header(0, "aa"), header(1, "bb"), header(2, "aa"))
    assert decision == Ended("replicas hold different parameters: ranks 0, 2 hold aa; ranks 1 hold bb")


def test_strict_accepts_who_has_just_caught_up() -> None:
    decision = judge(STRICT, header(0), header(1, abstains=CAUGHT_UP), header(2))
    assert ranks(decision) == [0, 2]


def test_a_rejected_payload_is_left_out_under_skip_and_ends_strict() -> None:
    rejected = {Member(1, 1): "chunk 0 of its payload is not what its header says"}
    decision = judge(SKIP, header(0), header(1), header(2), rejected=rejected)
    assert ranks(decision) == [0, 2]
    assert left_out(decision) == {1: rejected[Member(1, 1)]}
    ended = judge(STRICT, header(0), header(1), header(2), rejected=rejected)
    assert ended == Ended(f"rank 1 (attempt 1): {rejected[Member(1, 1)]}")


def test_rejecting_one_attempt_does_not_touch_the_next() -> None:
    rejected = {Member(1, 1): "bad"}
    assert ranks(judge(SKIP, header(0), header(1, attempt=2), header(2), rejected=rejected)) == [0, 1, 2]


def test_a_joiner_beyond_the_world_is_taken() -> None:
    assert ranks(judge(SKIP, header(0), header(1), header(2), header(7))) == [0, 1, 2, 7]


headers_of_a_round = st.dictionaries(
    st.integers(0, 6),
    st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.sampled_from([None, CAUGHT_UP, NOT_FINITE])),
).map(lambda found: {rank: header(rank, b, attempt=a, abstains=why) for rank, (b, a, why) in found.items()})


@settings(max_examples=1000)
@given(
    headers=headers_of_a_round,
    policy=st.sampled_from(["skip", "strict"]),
    min_replicas=st.integers(1, 4),
    waited_for=st.sets(st.integers(0, 6)),
    grace_over=st.booleans(),
    rejected_ranks=st.sets(st.integers(0, 6)),
)
def test_what_holds_for_every_proposal(
    headers: dict[int, Header],
    policy: Any,
    min_replicas: int,
    waited_for: set[int],
    grace_over: bool,
    rejected_ranks: set[int],
) -> None:
    rules = Rules(policy, world_size=4, min_replicas=min_replicas)
    rejected = {headers[rank].member: "bad" for rank in rejected_ranks & headers.keys()}
    decision = decide(rules, headers, rejected=rejected, waited_for=waited_for, grace_over=grace_over)
    # Neither the order of listing nor anything else but the headers themselves decides.
    again = decide(
        rules, dict(reversed(headers.items())), rejected=rejected, waited_for=waited_for, grace_over=grace_over
    )
    if isinstance(decision, Waiting):
        assert decision.waiting_for
        return
    if isinstance(decision, Ended):
        assert policy == "strict"
        return
    assert again == decision
    taken = [p.rank for p in decision.participants]
    assert taken == sorted(set(taken))
    counted = [h for h in headers.values() if h.member not in rejected]
    holders = [h for h in counted if h.base_digest == decision.base_digest]
    assert len(holders) >= min_replicas
    for other in {h.base_digest for h in counted} - {decision.base_digest}:
        assert len([h for h in counted if h.base_digest == other]) < len(holders)
    for participant in decision.participants:
        its = headers[participant.rank]
        assert (its.kind, its.base_digest) == ("contribution", decision.base_digest)
        assert participant == participant.model_copy(
            update={"attempt": its.attempt, "weight": its.weight, "payload": its.payload}
        )
        assert participant.member not in rejected
    out = [o.rank for o in decision.left_out]
    assert len(out) == len(set(out))
    assert set(out).isdisjoint(taken)
    assert headers.keys() <= set(out) | set(taken)
    if policy == "strict":
        assert set(range(4)) <= headers.keys()
    elif not grace_over:
        assert waited_for <= headers.keys()


def read(store: MemoryStore, reader: HeaderReader | None = None) -> tuple[dict[int, Header], HeaderReader]:
    reader = reader or HeaderReader(store, 5, 0)
    return World().complete(reader.read())[0], reader


def put(store: MemoryStore, found: Header, key: str | None = None, data: bytes | None = None) -> str:
    key = key or layout.header(5, found.member)
    World().complete(store.write(key, found.to_json() if data is None else data))
    return key


def test_headers_are_read() -> None:
    store = MemoryStore()
    for rank in (2, 0):
        put(store, header(rank))
    headers, reader = read(store)
    assert {rank: h.rank for rank, h in headers.items()} == {0: 0, 2: 2}
    assert reader.refused == {}


def test_the_highest_attempt_of_a_rank_counts() -> None:
    store = MemoryStore()
    for attempt in (2, 10, 9):
        put(store, header(1, attempt=attempt))
    assert {rank: h.attempt for rank, h in read(store)[0].items()} == {1: 10}


def test_a_later_attempt_is_seen_by_a_later_read() -> None:
    store = MemoryStore()
    put(store, header(1, attempt=1))
    _, reader = read(store)
    put(store, header(1, attempt=2))
    assert read(store, reader)[0][1].attempt == 2


@pytest.mark.parametrize(
    ("alien", "why"),
    [
        (header(1, round=4), "says that it is of round 4"),
        (header(1, fragment=2), "is of fragment 2, not 0"),
        (header(1, kind="vote"), "a vote has no place in this round"),
        (header(1, payload=None), "without payload or weight"),
        (header(1, weight=0), "without payload or weight"),
        (header(1, weight=-3), "without payload or weight"),
    ],
)
def test_a_header_that_contradicts_its_place_is_refused(alien: Header, why: str) -> None:
    store = MemoryStore()
    put(store, header(0))
    key = put(store, alien)
    headers, reader = read(store)
    assert list(headers) == [0]
    assert list(reader.refused) == [key]
    assert why in reader.refused[key]


def test_files_that_are_no_headers_are_refused_by_key() -> None:
    store = MemoryStore()
    put(store, header(0))
    keys = {
        put(store, header(1), data=b"no JSON"),
        put(store, header(2), data=b""),
        put(store, header(3), key=f"{layout.headers(5)}notes.txt", data=b"hello"),
        put(store, header(3), key=layout.header(5, Member(4, 1))),
    }
    headers, reader = read(store)
    assert list(headers) == [0]
    assert set(reader.refused) == keys


def test_each_header_is_fetched_once() -> None:
    store = RecordingStore(MemoryStore())
    world = World()
    reader = HeaderReader(store, 5, 0)
    world.complete(store.inner.write(layout.header(5, Member(0, 1)), header(0).to_json()))
    for _ in range(3):
        world.complete(reader.read())
    assert [operation for operation, _ in store.operations] == ["list", "read", "list", "list"]
