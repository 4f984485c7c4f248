"""The mean of a round's contributions, streamed: at any time one block of one contribution is in memory beside the
result.

The mean is Σ fp32(w_k / W) · payload_k, added in rank order, one multiplication and one addition a value. Each chunk
is checked against the digest in its header before it is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diloco.errors import CorruptObjectError, ObjectMissingError
from diloco.exchange import codec, formats, layout
from diloco.exchange.store import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from diloco.exchange.flat import Flat
    from diloco.exchange.records import Participant, Payload
    from diloco.exchange.store import Store


class BadPayloadError(CorruptObjectError):
    """One participant's payload can't be averaged."""

    def __init__(self, member: layout.Member, reason: str) -> None:
        super().__init__(f"{member}: {reason}")
        self.member = member
        self.reason = reason


def shares(weights: Sequence[int]) -> list[float]:
    """Each weight's share of the sum, rounded to fp32 (returned as Python floats that hold fp32 values exactly)."""
    total = sum(weights)
    return [float(torch.tensor(weight / total, dtype=torch.float32)) for weight in weights]


def check_payload(info: Payload, *, codec_name: str, numel: int, fragment_layout: str, chunk_bytes: int) -> str | None:
    """Why a payload that says this of itself can't be averaged here, or None. No I/O."""
    if info.codec != codec_name:
        return f"its payload is {info.codec}, the run's codec is {codec_name}"
    if info.numel != numel or info.layout != fragment_layout:
        return f"its payload has other names, shapes or dtypes ({info.numel} values, expected {numel})"
    body = formats.codec(codec_name).body_bytes(numel)
    if info.data_offset != codec.DATA_OFFSET or info.size != codec.DATA_OFFSET + body:
        return f"its payload of {info.size} bytes can't hold the {info.numel} values that its header promises"
    wanted = -(-body // chunk_bytes)
    if info.chunk_bytes != chunk_bytes or len(info.chunks) != wanted:
        return (
            f"its payload has {len(info.chunks)} chunks of {info.chunk_bytes} bytes, expected {wanted} of {chunk_bytes}"
        )
    return None


class MissingPayloadError(ObjectMissingError):
    """One participant's payload is not there: never written, or pruned."""

    def __init__(self, member: layout.Member, key: str) -> None:
        super().__init__(f"{member}: {key} is not there")
        self.member = member


async def gather_mean(
    store: Store,
    round_: int,
    participants: Sequence[Participant],
    *,
    own: tuple[layout.Member, bytearray] | None,
    out: Flat,
) -> None:
    """Average the participants' payloads into `out`.

    Needs at least one participant. `own` is this replica's payload object, which is not fetched. Raises
    BadPayloadError that names the member, and leaves `out` undefined.
    """
    for index, (participant, share) in enumerate(
        zip(participants, shares([p.weight for p in participants]), strict=True)
    ):
        info = participant.payload
        # As many whole chunks as go into a block, at least one.
        block_bytes = max(BLOCK_BYTES // info.chunk_bytes, 1) * info.chunk_bytes
        if own is not None and own[0] == participant.member:
            blocks = _own_blocks(own[1], info, block_bytes)
        else:
            blocks = _checked_blocks(store, layout.payload(round_, participant.member), participant, block_bytes)
        add = _Adder(participant, share, out, first=index == 0)
        async for block in blocks:
            add(block)


class _Adder:
    """Adds one contribution to the mean, block by block, in steps that stay in a core's cache."""

    def __init__(self, participant: Participant, share: float, out: Flat, *, first: bool) -> None:
        self._member = participant.member
        self._share, self._out, self._first = share, out, first
        wire = formats.codec(participant.payload.codec)
        self._step_bytes = wire.body_bytes(min(wire.step_values, participant.payload.numel))
        self._decode = codec.Decoder(wire, self._step_bytes)
        self._start = 0

    def __call__(self, block: memoryview) -> None:
        for offset in range(0, len(block), self._step_bytes):
            values = self._decode(block[offset : offset + self._step_bytes])[: self._out.numel - self._start]
            if not formats.finite(values):
                raise BadPayloadError(self._member, "its payload holds NaN or Inf")
            for target, part in self._out.pieces(self._start, values.mul_(self._share)):
                if self._first:
                    target.copy_(part)
                else:
                    target.add_(part)
            self._start += values.numel()


async def _own_blocks(data: bytearray, info: Payload, block_bytes: int) -> AsyncIterator[memoryview]:
    view = memoryview(data)
    for offset in range(info.data_offset, info.size, block_bytes):
        yield view[offset : offset + block_bytes]


async def _checked_blocks(
    store: Store, key: str, participant: Participant, block_bytes: int
) -> AsyncIterator[memoryview]:
    info = participant.payload
    body = info.data_offset
    try:
        # The framing comes with the first block: one request less for each payload.
        first = memoryview(await store.read(key, 0, min(body + block_bytes, info.size)))
        codec.check_frame(bytes(first[:body]), info, key)
        yield await _checked(store, key, participant, 0, first[body:])
        start = block_bytes
        async for block in store.stream(key, body + block_bytes, info.size, block_bytes):
            yield await _checked(store, key, participant, start, memoryview(block))
            start += len(block)
    except BadPayloadError:
        raise
    except ObjectMissingError as problem:
        raise MissingPayloadError(participant.member, key) from problem
    except CorruptObjectError as problem:
        raise BadPayloadError(participant.member, str(problem)) from problem


async def _checked(store: Store, key: str, participant: Participant, start: int, block: memoryview) -> memoryview:
    """The block of a payload's body that begins at `start`, with the chunks that the header promises.

    One that differs is read once more before it is judged: a bit can flip on the way.
    """
    if _bad_chunk(participant.payload, start, block) is None:
        return block
    at = participant.payload.data_offset + start
    again = memoryview(await store.read(key, at, at + len(block)))
    bad = _bad_chunk(participant.payload, start, again)
    if bad is not None:
        raise BadPayloadError(participant.member, f"chunk {bad} of its payload is not what its header says")
    return again


def _bad_chunk(info: Payload, start: int, block: memoryview) -> int | None:
    for offset in range(0, len(block), info.chunk_bytes):
        number = (start + offset) // info.chunk_bytes
        if codec.digest(block[offset : offset + info.chunk_bytes]) != info.chunks[number]:
            return number
    return None
