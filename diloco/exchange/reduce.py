"""The mean of a round's contributions, streamed: at any time a few blocks are in memory beside the result, one that is
added and those that the store fetches meanwhile, across contributions.

The mean is Σ fp32(w_k / W) · payload_k, added in rank order, one multiplication and one addition a value. Each chunk
is checked against the digest in its header before it is added.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from diloco.errors import CorruptObjectError, ObjectMissingError
from diloco.exchange import codec, formats, layout
from diloco.exchange.store import BLOCK_BYTES, Range

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
    plans = [_Plan(round_, participant) for participant in participants]
    fetched = store.fetch([one for plan in plans if own is None or own[0] != plan.member for one in plan.ranges])
    try:
        for index, (plan, share) in enumerate(zip(plans, shares([p.weight for p in participants]), strict=True)):
            add = _Adder(plan.participant, share, out, first=index == 0)
            if own is not None and own[0] == plan.member:
                blocks = _own_blocks(own[1], plan)
            else:
                blocks = _checked_blocks(store, plan, fetched)
            async for block in blocks:
                await store.meanwhile(partial(add, block))
    except Exception:
        await fetched.aclose()
        raise


class _Plan:
    """In which ranges one payload is fetched: whole chunks, as many as go into a block. The framing comes with the
    first, which saves a request.
    """

    def __init__(self, round_: int, participant: Participant) -> None:
        info = participant.payload
        self.participant, self.member = participant, participant.member
        self.key = layout.payload(round_, self.member)
        block = max(BLOCK_BYTES // info.chunk_bytes, 1) * info.chunk_bytes
        starts = range(info.data_offset, info.size, block)
        self.ranges = [Range(self.key, at, min(at + block, info.size)) for at in starts]
        if self.ranges:
            self.ranges[0] = Range(self.key, 0, self.ranges[0].end)


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


async def _own_blocks(data: bytearray, plan: _Plan) -> AsyncIterator[memoryview]:
    view, body = memoryview(data), plan.participant.payload.data_offset
    for one in plan.ranges:
        yield view[max(one.start, body) : one.end]


async def _checked_blocks(store: Store, plan: _Plan, fetched: AsyncIterator[bytes]) -> AsyncIterator[memoryview]:
    body = plan.participant.payload.data_offset
    try:
        for one in plan.ranges:
            block = memoryview(await anext(fetched))
            if one.start == 0:
                codec.check_frame(bytes(block[:body]), plan.participant.payload, plan.key)
                block = block[body:]
            yield await _checked(store, plan, max(one.start - body, 0), block)
    except BadPayloadError:
        raise
    except ObjectMissingError as problem:
        raise MissingPayloadError(plan.member, plan.key) from problem
    except CorruptObjectError as problem:
        raise BadPayloadError(plan.member, str(problem)) from problem


async def _checked(store: Store, plan: _Plan, start: int, block: memoryview) -> memoryview:
    """The block of a payload's body that begins at `start`, with the chunks that the header promises.

    One that differs is read once more before it is judged: a bit can flip on the way.
    """
    info = plan.participant.payload
    if await store.meanwhile(partial(_bad_chunk, info, start, block)) is None:
        return block
    at = info.data_offset + start
    again = memoryview(await store.read(plan.key, at, at + len(block)))
    bad = _bad_chunk(info, start, again)
    if bad is not None:
        raise BadPayloadError(plan.member, f"chunk {bad} of its payload is not what its header says")
    return again


def _bad_chunk(info: Payload, start: int, block: memoryview) -> int | None:
    for offset in range(0, len(block), info.chunk_bytes):
        number = (start + offset) // info.chunk_bytes
        if codec.digest(block[offset : offset + info.chunk_bytes]) != info.chunks[number]:
            return number
    return None
