"""The mean, bit for bit against plain numpy, and what is never averaged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from diloco.exchange import codec, layout
from diloco.exchange.codec import DATA_OFFSET
from diloco.exchange.flat import Flat
from diloco.exchange.formats import CODECS
from diloco.exchange.layout import Member
from diloco.exchange.records import Participant, Payload
from diloco.exchange.reduce import BadPayloadError, check_payload, gather_mean, shares
from diloco.exchange.shards import Division
from diloco.exchange.stores import MemoryStore
from tests.support.stores import RecordingStore
from tests.support.virtual import World

if TYPE_CHECKING:
    from diloco.exchange.store import Store

NUMEL = 101
CHUNK = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def upload(store: Store, rank: int, values: torch.Tensor, weight: int, wire: str = "fp32") -> Participant:
    encoded = codec.encode([values], CODECS[wire], chunk_bytes=CHUNK, layout="l", metadata={})
    World().complete(store.write(layout.payload(3, Member(rank, 1)), encoded.data))
    return Participant(rank=rank, attempt=1, weight=weight, payload=encoded.info)


def mean(
    store: Store, participants: list[Participant], own: tuple[Member, bytearray] | None = None, numel: int = NUMEL
) -> torch.Tensor:
    out = torch.full((numel,), torch.nan)
    division = Division(numel, participants[0].payload.codec, CHUNK, shards=1)
    World().complete(gather_mean(store, 3, participants, division, own=own, out=Flat([out])))
    return out


def by_hand(values: list[torch.Tensor], weights: list[int]) -> np.ndarray:
    total = None
    for value, weight in zip(values, weights, strict=True):
        term = value.numpy() * np.float32(weight / sum(weights))
        total = term if total is None else (total + term).astype(np.float32)
    assert total is not None
    assert total.dtype == np.float32
    return total


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("weights", [[1, 1], [7, 3, 5], [1, 1000, 10, 100]])
def test_the_mean_is_the_same_bits_as_by_hand(wire: str, weights: list[int]) -> None:
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), weight, wire) for rank, weight in enumerate(weights)]
    sent = [gradient(rank).to(DTYPES[wire]).float() for rank in range(len(weights))]
    expected = by_hand(sent, weights)
    assert mean(store, participants).numpy().tobytes() == expected.tobytes()


def test_the_order_of_ranks_decides_the_bits() -> None:
    """Else the test above could not see a wrong order."""
    values = [gradient(rank) for rank in range(3)]
    assert by_hand(values, [1, 1, 1]).tobytes() != by_hand(values[::-1], [1, 1, 1]).tobytes()
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(3)]
    assert not torch.equal(mean(store, participants), mean(store, participants[::-1]))


def test_shares_are_fp32_and_follow_the_weights() -> None:
    assert shares([1, 3]) == [0.25, 0.75]
    assert shares([5]) == [1.0]
    assert [np.float32(share) for share in shares([1, 2])] == shares([1, 2])


def test_one_participant_is_its_own_mean() -> None:
    store = MemoryStore()
    assert torch.equal(mean(store, [upload(store, 1, gradient(1), 9)]), gradient(1))


def test_ones_own_payload_is_not_fetched() -> None:
    store = RecordingStore(MemoryStore())
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(2)]
    own = codec.encode([gradient(1)], CODECS["fp32"], chunk_bytes=CHUNK, layout="l", metadata={})
    plain = mean(store, participants)
    store.operations.clear()
    assert torch.equal(mean(store, participants, own=(Member(1, 1), own.data)), plain)
    assert {key for _, key in store.operations} == {layout.payload(3, Member(0, 1))}


def test_long_payloads_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.exchange.reduce.BLOCK_BYTES", 3 * CHUNK + 1)
    store = RecordingStore(MemoryStore())
    participants = [upload(store, rank, gradient(rank), rank + 1) for rank in range(3)]
    store.operations.clear()
    expected = by_hand([gradient(rank) for rank in range(3)], [1, 2, 3])
    assert mean(store, participants).numpy().tobytes() == expected.tobytes()
    assert len(store.operations) == 3 * 3  # 404 bytes each, by three chunks


def corrupt(store: Store, rank: int, at: int) -> None:
    key = layout.payload(3, Member(rank, 1))
    data = bytearray(World().complete(store.read(key))[0])
    data[at] ^= 1
    World().complete(store.write(key, data))


@pytest.mark.parametrize("chunk", [0, 1, 6])
@pytest.mark.parametrize("block_bytes", [CHUNK, 8 * 2**20])
def test_a_corrupted_chunk_is_named(monkeypatch: pytest.MonkeyPatch, chunk: int, block_bytes: int) -> None:
    monkeypatch.setattr("diloco.exchange.reduce.BLOCK_BYTES", block_bytes)
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(3)]
    corrupt(store, 1, DATA_OFFSET + chunk * CHUNK + 5)
    with pytest.raises(BadPayloadError, match=rf"rank 1 \(attempt 1\): chunk {chunk} of its payload") as caught:
        mean(store, participants)
    assert caught.value.member == Member(1, 1)


def test_swapped_payloads_are_noticed() -> None:
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(2)]
    upload(store, 1, gradient(0), 1)
    with pytest.raises(BadPayloadError, match="rank 1"):
        mean(store, participants)


@pytest.mark.parametrize("size", [DATA_OFFSET + 4 * NUMEL - 1, DATA_OFFSET + 8, DATA_OFFSET, 3, 0])
def test_a_truncated_payload_is_named(size: int) -> None:
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(2)]
    key = layout.payload(3, Member(1, 1))
    World().complete(store.write(key, World().complete(store.read(key))[0][:size]))
    with pytest.raises(BadPayloadError, match="rank 1"):
        mean(store, participants)


def test_a_destroyed_frame_is_named() -> None:
    store = MemoryStore()
    participants = [upload(store, rank, gradient(rank), 1) for rank in range(2)]
    corrupt(store, 0, 3)
    with pytest.raises(BadPayloadError, match="rank 0"):
        mean(store, participants)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mine", [True, False])
def test_what_is_not_finite_is_named(value: float, mine: bool) -> None:
    store = MemoryStore()
    bad = gradient(1)
    bad[-1] = value
    participants = [upload(store, 0, gradient(0), 1), upload(store, 1, bad, 1)]
    encoded = codec.encode([bad], CODECS["fp32"], chunk_bytes=CHUNK, layout="l", metadata={})
    with pytest.raises(BadPayloadError, match=r"rank 1 .* holds NaN or Inf"):
        mean(store, participants, own=(Member(1, 1), encoded.data) if mine else None)


def info(**changes: object) -> Payload:
    plain = codec.encode([gradient(0)], CODECS["fp32"], chunk_bytes=CHUNK, layout="l", metadata={}).info
    return plain.model_copy(update=changes)


def objection(payload: Payload) -> str | None:
    return check_payload(payload, codec_name="fp32", numel=NUMEL, fragment_layout="l", chunk_bytes=CHUNK)


def test_a_good_payload_meets_no_objection() -> None:
    assert objection(info()) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"codec": "bf16"}, "is bf16, the run's codec is fp32"),
        ({"codec": "int1"}, "is int1"),
        ({"numel": NUMEL + 1}, "other names, shapes or dtypes"),
        ({"layout": "other"}, "other names, shapes or dtypes"),
        ({"chunk_bytes": 32}, "chunks of 32 bytes"),
        ({"chunks": ["c"]}, "1 chunks"),
        ({"chunks": []}, "0 chunks"),
        ({"size": 10}, "bytes|size|offset"),
        ({"size": DATA_OFFSET + 4 * NUMEL + 1}, "bytes|size|offset"),
        ({"data_offset": 0}, "bytes|size|offset"),
        ({"data_offset": -4}, "bytes|size|offset"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_before_it_is_fetched(changes: dict[str, object], why: str) -> None:
    found = objection(info(**changes))
    assert found is not None, changes
    assert re.search(why, found)
