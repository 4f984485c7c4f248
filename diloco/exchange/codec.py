"""Payloads: how a fragment's tensors become one object, and how its bytes become fp32 again, in one of the wire formats
of :mod:`diloco.exchange.formats`.

A payload is a safetensors file (https://huggingface.co/docs/safetensors) with one flat tensor, so that any
safetensors reader opens it and loading can't execute code. Its JSON header is padded to a fixed size, so the tensor's
bytes always begin at :data:`DATA_OFFSET` and can be fetched by ranges. Encoding is deterministic; decoding to fp32 is
exact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from diloco.errors import CorruptObjectError
from diloco.exchange.formats import codec
from diloco.exchange.records import Payload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.exchange.formats import Codec

DATA_OFFSET = 1024
TENSOR = "pseudo_gradient"
_DIGEST = "blake3"


@dataclass(frozen=True)
class Encoded:
    """A payload object in memory, and what its header says of it."""

    data: bytearray
    info: Payload
    finite: bool
    """Whether every value that it decodes to is finite."""


def _frame(codec_: Codec, numel: int, metadata: dict[str, str]) -> bytes:
    tensor = {"dtype": codec_.tag, "shape": codec_.shape(numel), "data_offsets": [0, codec_.body_bytes(numel)]}
    header = json.dumps({"__metadata__": metadata, TENSOR: tensor}, separators=(",", ":")).encode()
    room = DATA_OFFSET - 8
    if len(header) > room:
        raise ValueError(f"{len(header)} bytes of payload header, room for {room}")
    return room.to_bytes(8, "little") + header.ljust(room)


def check_frame(frame: bytes, info: Payload, key: str) -> None:
    """Raise CorruptObjectError unless the first :data:`DATA_OFFSET` bytes of a payload are those of the tensor that
    its header promises.
    """
    codec_ = codec(info.codec)
    if info.data_offset != DATA_OFFSET or info.size != DATA_OFFSET + codec_.body_bytes(info.numel):
        raise CorruptObjectError(f"{key}: {info.size} bytes for {info.numel} values in {info.codec}")
    try:
        length = int.from_bytes(frame[:8], "little")
        header = json.loads(frame[8 : 8 + length])
    except (ValueError, RecursionError):
        raise CorruptObjectError(f"{key}: not a payload (its safetensors header can't be read)") from None
    found = header.get(TENSOR) if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise CorruptObjectError(f"{key}: not a payload (it has no tensor {TENSOR})")
    shape = codec_.shape(info.numel)
    if length != DATA_OFFSET - 8 or found.get("dtype") != codec_.tag or found.get("shape") != shape:
        raise CorruptObjectError(f"{key}: holds {found.get('dtype')} {found.get('shape')}, not {codec_.tag} {shape}")


def encode(
    tensors: Sequence[torch.Tensor],
    codec_: Codec,
    *,
    chunk_bytes: int,
    layout: str,
    metadata: dict[str, str],
    residual: torch.Tensor | None = None,
    into: bytearray | None = None,
) -> Encoded:
    """Coalesce tensors (fp32, any shapes, in this order) into one payload.

    `residual` (fp32, shape [values]) is what earlier payloads fell short of: it is added first, and then holds what
    this one falls short of; undefined if the payload is not finite. `into` is an earlier payload's memory, to be used
    again if it has the right size: getting pages from the system would cost more than all the rest.

    Peak extra memory is the payload itself. Raises ValueError for chunks that do not hold whole blocks.
    """
    if chunk_bytes % codec_.block_bytes:
        raise ValueError(f"chunks of {chunk_bytes} bytes do not hold whole blocks of {codec_.block_bytes}")
    numel = sum(tensor.numel() for tensor in tensors)
    size = DATA_OFFSET + codec_.body_bytes(numel)
    data = into if into is not None and len(into) == size else bytearray(size)
    data[:DATA_OFFSET] = _frame(codec_, numel, metadata)
    out = torch.frombuffer(data, dtype=torch.uint8)[DATA_OFFSET:]
    finite, start, at = True, 0, 0
    for values in _steps(tensors, min(codec_.step_values, numel)):
        if residual is not None:
            values.add_(residual[start : start + values.numel()])
        end = at + codec_.body_bytes(values.numel())
        finite = codec_.encode(values, out[at:end], keep_error=residual is not None) and finite
        if residual is not None:
            residual[start : start + values.numel()] = values
        start, at = start + values.numel(), end
    body = memoryview(data)[DATA_OFFSET:]
    info = Payload(
        codec=codec_.name,
        numel=numel,
        size=len(data),
        data_offset=DATA_OFFSET,
        chunk_bytes=chunk_bytes,
        chunks=[digest(body[offset : offset + chunk_bytes]) for offset in range(0, len(body), chunk_bytes)],
        layout=layout,
    )
    return Encoded(data, info, finite)


def encode_mean(tensors: Sequence[torch.Tensor], codec_: Codec, *, round_: int, shard: int) -> Encoded:
    """A shard's mean as one object: framed like a payload, with the digest of its body in the framing, since no header
    goes with it. The same values give the same bytes. Raises as :func:`encode`.
    """
    metadata = {"round": str(round_), "shard": str(shard)}
    numel = sum(tensor.numel() for tensor in tensors)
    whole = max(codec_.body_bytes(numel), codec_.block_bytes)
    encoded = encode(tensors, codec_, chunk_bytes=whole, layout="", metadata=metadata)
    encoded.data[:DATA_OFFSET] = _frame(codec_, numel, metadata | {_DIGEST: encoded.info.chunks[0]})
    return encoded


def mean_digest(frame: bytes, codec_: Codec, numel: int, *, round_: int, shard: int, key: str) -> str:
    """The digest of the body that the framing of a mean promises. Raises CorruptObjectError unless it is the framing
    of that mean.
    """
    try:
        header = json.loads(frame[8:DATA_OFFSET])
        digest_ = str(header["__metadata__"][_DIGEST])
        # Encoding is deterministic: so is the framing, the digest apart.
        if frame == _frame(codec_, numel, {"round": str(round_), "shard": str(shard), _DIGEST: digest_}):
            return digest_
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise CorruptObjectError(f"{key}: not the mean of {numel} values in {codec_.name} for shard {shard}")


def _steps(tensors: Sequence[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The tensors' values one after another, `size` at a time (the last may be fewer), in a buffer that is used
    again.
    """
    buffer, filled = torch.empty(size), 0
    for tensor in tensors:
        rest = tensor.detach().reshape(-1)
        while rest.numel():
            count = min(size - filled, rest.numel())
            buffer[filled : filled + count].copy_(rest[:count])
            rest, filled = rest[count:], filled + count
            if filled == size:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of bytes, hex."""
    return blake3(data).hexdigest()


class Decoder:
    """Turns encoded blocks into fp32, through buffers that are used again: the result is valid until the next call."""

    def __init__(self, codec_: Codec, most_bytes: int) -> None:
        self._codec = codec_
        self._raw = bytearray(most_bytes)
        self._encoded = torch.frombuffer(self._raw, dtype=torch.uint8) if most_bytes else torch.empty(0).byte()
        self._decoded = torch.empty(most_bytes // codec_.block_bytes * codec_.block_values)

    def __call__(self, data: bytes | memoryview) -> torch.Tensor:
        """fp32 values of whole blocks, up to `most_bytes` together; a padding's too. Part of a block raises
        ValueError.
        """
        blocks, rest = divmod(len(data), self._codec.block_bytes)
        if rest:
            raise ValueError(f"{len(data)} bytes are no whole number of {self._codec.name} blocks")
        self._raw[: len(data)] = data
        out = self._decoded[: blocks * self._codec.block_values]
        self._codec.decode(self._encoded[: len(data)], out)
        return out
