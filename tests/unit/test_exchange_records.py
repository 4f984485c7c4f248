"""Records: what is written is read back, and what is not one of ours is refused by key and field."""

from __future__ import annotations

import json

import pytest

from diloco.errors import CorruptObjectError
from diloco.exchange.records import Beat, Claim, Header, Record, RunRecord
from tests.support.virtual import run_record

CLAIM = Claim(rank=1, attempt=2, host="here", pid=3)


def changed(record: Record, **fields: object) -> bytes:
    return json.dumps(json.loads(record.to_json()) | fields).encode()


@pytest.mark.parametrize("record", [CLAIM, run_record(), Beat(rank=0, attempt=1, counter=5, phase="training")])
def test_records_round_trip(record: Record) -> None:
    assert type(record).from_json(record.to_json(), "key") == record


def test_each_create_once_record_has_a_nonce_of_its_own() -> None:
    nonces = {Claim(rank=1, attempt=2, host="here", pid=3).nonce for _ in range(100)}
    assert len(nonces) == 100
    assert all(len(nonce) == 32 for nonce in nonces)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (changed(CLAIM, colour="red"), "colour: "),
        (changed(CLAIM, format=2), "format: "),
        (changed(CLAIM, rank="one"), "rank: "),
        (b"", "document: "),
        (b"\xff\x00", "document: "),
        (b"[]", "document: "),
        (CLAIM.to_json()[:-20], "document: "),
    ],
    ids=["unknown field", "newer format", "wrong type", "empty", "no text", "no object", "cut short"],
)
def test_what_is_no_claim_is_refused_by_key_and_field(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptObjectError, match=rf"^members/00001/00002\.json is not a valid Claim: {problem}"):
        Claim.from_json(data, "members/00001/00002.json")


def test_a_missing_field_is_named() -> None:
    fields = json.loads(run_record().to_json())
    del fields["chunk_bytes"]
    with pytest.raises(CorruptObjectError, match=r"chunk_bytes: Field required"):
        RunRecord.from_json(json.dumps(fields).encode(), "run.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_are_finite(number: str) -> None:
    text = Beat(rank=0, attempt=1, counter=5, phase="training", loss=1.5).to_json().decode()
    with pytest.raises(CorruptObjectError, match="loss"):
        Beat.from_json(text.replace("1.5", number).encode(), "beat")


def test_records_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        CLAIM.rank = 5  # type: ignore[misc]


def test_an_alien_kind_of_header_is_refused() -> None:
    header = Header(kind="vote", round=1, fragment=0, rank=0, attempt=1, weight=0, base_digest="d")
    with pytest.raises(CorruptObjectError, match="kind: "):
        Header.from_json(changed(header, kind="order"), "key")
