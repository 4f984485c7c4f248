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
    from collections.abc import AsyncIterator, Mapping, Sequence

    from diloco.exchange.flat import Flat
    from diloco.exchange.records import Participant, Payload
    from diloco.exchange.shards import Division, Shard
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
    division: Division,
    *,
    own: tuple[layout.Member, bytearray] | None,
    out: Flat,
    shards: Sequence[Shard] | None = None,
    at_hand: Mapping[tuple[layout.Member, int], bytes] | None = None,
) -> None:
    """Average the participants' payloads, or those `shards` of them, into the same places of `out`.

    Needs at least one participant. `own` is this replica's whole payload and `at_hand` are others' objects by member
    and shard: these are not fetched. Raises BadPayloadError that names the member, and leaves `out` undefined.
    """
    each = list(zip(participants, shares([p.weight for p in participants]), strict=True))
    plans = [
        (_Plan(round_, participant, division, shard), share)
        for shard in (division.shards if shards is None else shards)
        for participant, share in each
    ]
    held = {plan: data for plan, _ in plans if (data := plan.found(at_hand or {})) is not None}
    mine = own[0] if own is not None else None
    absent = [plan for plan, _ in plans if plan.member != mine and plan not in held]
    fetched = store.fetch([one for plan in absent for one in plan.ranges])
    try:
        for plan, share in plans:
            add = _Adder(plan, share, out, first=plan.member == participants[0].member)
            if own is not None and plan.member == mine:
                blocks = _own_blocks(own[1], plan)
            else:
                blocks = _checked_blocks(store, plan, _cut(held[plan], plan) if plan in held else fetched)
            async for block in blocks:
                await store.meanwhile(partial(add, block))
    except Exception:
        await fetched.aclose()
        raise


class _Plan:
    """In which ranges one shard of a payload is fetched: whole chunks, as many as go into a block. The payload's
    framing comes with the first shard's first, which saves a request.
    """

    def __init__(self, round_: int, participant: Participant, division: Division, shard: Shard) -> None:
        info = participant.payload
        self.participant, self.member, self.shard = participant, participant.member, shard
        self.key = division.key(round_, self.member, shard)
        self.frame = 0 if shard.index else info.data_offset
        """Bytes before the shard's first chunk."""
        block = max(BLOCK_BYTES // info.chunk_bytes, 1) * info.chunk_bytes
        self._size = size = self.frame + shard.body_stop - shard.body_start
        self.ranges = [Range(self.key, at, min(at + block, size)) for at in range(self.frame, size, block)]
        if self.ranges:
            self.ranges[0] = Range(self.key, 0, self.ranges[0].end)

    def body(self, at: int) -> int:
        """Which byte of the payload's body is at that one of the object."""
        return self.shard.body_start + max(at - self.frame, 0)

    def found(self, at_hand: Mapping[tuple[layout.Member, int], bytes]) -> bytes | None:
        """The object among those at hand. One of another length is none: the store is asked."""
        data = at_hand.get((self.member, self.shard.index))
        return data if data is not None and len(data) == self._size else None


class Writer:
    """Decodes blocks one after another into the values `[start, stop)` of `out`, in steps that stay in a core's
    cache.
    """

    def __init__(self, wire: formats.Codec, out: Flat, start: int, stop: int) -> None:
        self._out, self._at, self._stop = out, start, stop
        self._step_bytes = wire.body_bytes(min(wire.step_values, stop - start))
        self._decode = codec.Decoder(wire, self._step_bytes)

    def __call__(self, block: memoryview) -> None:
        """Decode one more block: whole ones of the codec's."""
        for offset in range(0, len(block), self._step_bytes):
            values = self._decode(block[offset : offset + self._step_bytes])[: self._stop - self._at]
            self._put(values)
            self._at += values.numel()

    def _put(self, values: torch.Tensor) -> None:
        for target, part in self._out.pieces(self._at, values):
            target.copy_(part)


class _Adder(Writer):
    """Adds one contribution to the mean."""

    def __init__(self, plan: _Plan, share: float, out: Flat, *, first: bool) -> None:
        super().__init__(formats.codec(plan.participant.payload.codec), out, plan.shard.start, plan.shard.stop)
        self._member, self._share, self._first = plan.member, share, first

    def _put(self, values: torch.Tensor) -> None:
        if not formats.finite(values):
            raise BadPayloadError(self._member, "its payload holds NaN or Inf")
        values.mul_(self._share)
        if self._first:
            super()._put(values)
        else:
            for target, part in self._out.pieces(self._at, values):
                target.add_(part)


async def _own_blocks(data: bytearray, plan: _Plan) -> AsyncIterator[memoryview]:
    view, body = memoryview(data), plan.participant.payload.data_offset
    for one in plan.ranges:
        yield view[body + plan.body(one.start) : body + plan.body(one.end)]


async def _cut(data: bytes, plan: _Plan) -> AsyncIterator[memoryview]:
    """An object that was read whole, in the ranges of the plan."""
    for one in plan.ranges:
        yield memoryview(data)[one.start : one.end]


async def _checked_blocks(
    store: Store, plan: _Plan, fetched: AsyncIterator[bytes] | AsyncIterator[memoryview]
) -> AsyncIterator[memoryview]:
    try:
        for one in plan.ranges:
            block = memoryview(await anext(fetched))
            if one.start < plan.frame:
                codec.check_frame(bytes(block[: plan.frame]), plan.participant.payload, plan.key)
                block = block[plan.frame :]
            yield await _checked(store, plan, max(one.start, plan.frame), block)
    except BadPayloadError:
        raise
    except ObjectMissingError as problem:
        raise MissingPayloadError(plan.member, plan.key) from problem
    except CorruptObjectError as problem:
        raise BadPayloadError(plan.member, str(problem)) from problem


async def _checked(store: Store, plan: _Plan, at: int, block: memoryview) -> memoryview:
    """The block that begins at byte `at` of the object, with the chunks that the header promises.

    One that differs is read once more before it is judged: a bit can flip on the way.
    """
    info, start = plan.participant.payload, plan.body(at)
    if await store.meanwhile(partial(_bad_chunk, info, start, block)) is None:
        return block
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
