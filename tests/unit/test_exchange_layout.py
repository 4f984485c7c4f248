"""Keys: they sort as numbers do, they parse back, and alien names are recognised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.exchange import layout
from diloco.exchange.layout import Member

members = st.builds(Member, st.integers(0, 99_999), st.integers(1, 99_999))
numbers = st.integers(0, 99_999_999)


@given(st.lists(numbers, unique=True))
def test_numbered_keys_sort_as_their_numbers(rounds: list[int]) -> None:
    assert sorted(layout.commit(r) for r in rounds) == [layout.commit(r) for r in sorted(rounds)]
    assert sorted(layout.manifest(r) for r in rounds) == [layout.manifest(r) for r in sorted(rounds)]
    assert sorted(layout.headers(r) for r in rounds) == [layout.headers(r) for r in sorted(rounds)]


@given(st.lists(members, unique=True))
def test_members_keys_sort_as_members(found: list[Member]) -> None:
    assert sorted(layout.header(3, m) for m in found) == [layout.header(3, m) for m in sorted(found)]
    assert sorted(layout.claim(m) for m in found) == [layout.claim(m) for m in sorted(found)]


@given(members, numbers)
def test_keys_parse_back(member: Member, number: int) -> None:
    for key in (
        layout.claim(member),
        layout.beat(member),
        layout.header(number, member),
        layout.payload(number, member),
        layout.result(member),
        layout.error(member),
    ):
        assert layout.parse_member(key) == member
    assert layout.parse_number(layout.commit(number)) == number
    assert layout.parse_number(layout.manifest(number)) == number


@pytest.mark.parametrize(
    "key",
    [
        "",
        "members/00001/",
        "members/00001/1.json",
        "members/00001/abcde.json",
        "rounds/00000003/h/notes.txt",
        "rounds/00000003/h/00001-00002.json/more",
        "rounds/00000003/h/.00001-0000x.json",
        "rounds/00000003/h/copy of 00001-00002.json",
        "rounds/00000003/h/100001-00002.json",
    ],
)
def test_alien_names_are_no_members(key: str) -> None:
    assert layout.parse_member(key) is None


@pytest.mark.parametrize(
    "key",
    ["commits/3.json", "commits/00000003.json.bak", "commits/x00000003.json", "checkpoints/00000003/00001-00001/0.st"],
)
def test_alien_names_are_no_numbers(key: str) -> None:
    assert layout.parse_number(key) is None


def test_listed_prefixes_end_in_a_slash_and_hold_their_keys() -> None:
    member = Member(2, 3)
    for prefix, key in (
        (layout.claims(2), layout.claim(member)),
        (layout.BEATS, layout.beat(member)),
        (layout.MEMBERS, layout.claim(member)),
        (layout.headers(7), layout.header(7, member)),
        (layout.COMMITS, layout.commit(7)),
        (layout.CHECKPOINTS, layout.manifest(7)),
        (layout.CHECKPOINTS, layout.checkpoint_part(7, member, 0)),
        (layout.RESULTS, layout.result(member)),
        (layout.ERRORS, layout.error(member)),
        (layout.EVALUATIONS, layout.evaluation(7)),
    ):
        assert prefix.endswith("/")
        assert key.startswith(prefix)


def test_no_two_things_share_a_key() -> None:
    keys = [
        make(Member(rank, attempt))
        for rank in (0, 1, 11)
        for attempt in (1, 2, 11)
        for make in (
            layout.claim,
            layout.beat,
            layout.result,
            layout.error,
            lambda m: layout.header(1, m),
            lambda m: layout.header(11, m),
            lambda m: layout.payload(1, m),
            lambda m: layout.checkpoint_part(1, m, 0),
        )
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("run_id", "good"), [("a", True), ("a-b1", True), ("-a", False), ("a-", False), ("A", False)])
def test_run_ids(run_id: str, good: bool) -> None:
    assert (layout.RUN_ID.fullmatch(run_id) is not None) == good
    assert layout.RUN_ID.fullmatch("x" * 41) is None
