"""Whose turn it is to write a checkpoint."""

from __future__ import annotations

from diloco.exchange.layout import Member
from diloco.exchange.records import Commit, Participant, Payload
from diloco.exchange.rota import Rota

PAYLOAD = Payload(codec="fp32", numel=1, layout="x", size=1, data_offset=0, chunk_bytes=1, chunks=["0"])


def commit(round_: int, *members: Member) -> Commit:
    return Commit(
        round=round_,
        fragment=0,
        base_digest="b",
        algorithm="gather",
        participants=[Participant(rank=m.rank, attempt=m.attempt, weight=1, payload=PAYLOAD) for m in members],
        left_out=[],
        committed_by=0,
        committed_by_attempt=1,
        reason="",
    )


def writers(rota: Rota, *rounds: list[Member]) -> list[Member | None]:
    return [rota.writer(commit(round_, *members)) for round_, members in enumerate(rounds)]


A, B, C = Member(0, 1), Member(1, 1), Member(2, 1)
ALL = [A, B, C]


def test_every_k_rounds_in_turn_and_none_at_the_end() -> None:
    assert writers(Rota(2, 8), *[ALL] * 8) == [None, B, None, C, None, A, None, None]


def test_of_the_last_round_with_participants() -> None:
    assert writers(Rota(2, 8), [A, C], [], ALL, []) == [None, C, None, C]
    assert writers(Rota(2, 8), [], []) == [None, None]


def test_another_one_takes_over_from_a_writer_that_is_gone_and_only_once() -> None:
    gone, back = [A, C], [A, Member(1, 2), C]
    assert writers(Rota(4, 20), ALL, ALL, ALL, ALL, gone, gone, back) == [None, None, None, B, C, None, None]


def test_a_writer_that_was_replaced_is_gone() -> None:
    assert writers(Rota(4, 20), ALL, ALL, ALL, ALL, [A, Member(1, 2), C]) == [None, None, None, B, C]


def test_an_empty_round_replaces_nobody() -> None:
    assert writers(Rota(4, 20), ALL, ALL, ALL, ALL, [], ALL) == [None, None, None, B, None, None]
