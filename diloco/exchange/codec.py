"""Wire formats of pseudo-gradients: how a fragment's tensors become one object, and how its bytes become fp32 again.

A payload is a safetensors file (https://huggingface.co/docs/safetensors) with one flat tensor, so that any
safetensors reader opens it and loading can't execute code. Its JSON header is padded to a fixed size, so the tensor's
bytes always begin at :data:`DATA_OFFSET` and can be fetched by ranges. Encoding is deterministic; decoding to fp32 is
exact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from blake3 import blake3

from diloco.errors import ConfigurationError, CorruptObjectError
from diloco.exchange.records import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA_OFFSET = 1024
TENSOR = "pseudo_gradient"


@dataclass(frozen=True)
class Codec:
    """A wire format: one `dtype` element a value, little-endian."""

    name: Literal["fp32", "bf16"]
    dtype: torch.dtype
    tag: str
    """The dtype's name in safetensors."""

    @property
    def itemsize(self) -> int:
        """Bytes a value."""
        return self.dtype.itemsize


CODECS = {codec.name: codec for codec in (Codec("fp32", torch.float32, "F32"), Codec("bf16", torch.bfloat16, "BF16"))}


def codec(name: str) -> Codec:
    """The codec of that name, or ConfigurationError."""
    try:
        return CODECS[name]  # type: ignore[index]
    except KeyError:
        raise ConfigurationError(f"codec {name!r} does not exist: use one of {', '.join(CODECS)}") from None


@dataclass(frozen=True)
class Encoded:
    """A payload object in memory, and what its header says of it."""

    data: bytearray
    info: Payload
    finite: bool
    """Whether every encoded value is finite."""


def _frame(codec_: Codec, numel: int, metadata: dict[str, str]) -> bytes:
    tensor = {"dtype": codec_.tag, "shape": [numel], "data_offsets": [0, numel * codec_.itemsize]}
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
    if info.data_offset != DATA_OFFSET or info.size != DATA_OFFSET + info.numel * codec_.itemsize:
        raise CorruptObjectError(f"{key}: {info.size} bytes for {info.numel} values in {info.codec}")
    try:
        length = int.from_bytes(frame[:8], "little")
        header = json.loads(frame[8 : 8 + length])
    except (ValueError, RecursionError):
        raise CorruptObjectError(f"{key}: not a payload (its safetensors header can't be read)") from None
    found = header.get(TENSOR) if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise CorruptObjectError(f"{key}: not a payload (it has no tensor {TENSOR})")
    if length != DATA_OFFSET - 8 or found.get("dtype") != codec_.tag or found.get("shape") != [info.numel]:
        raise CorruptObjectError(
            f"{key}: holds {found.get('dtype')} {found.get('shape')}, not {codec_.tag} [{info.numel}]"
        )


def encode(
    tensors: Sequence[torch.Tensor], codec_: Codec, *, chunk_bytes: int, layout: str, metadata: dict[str, str]
) -> Encoded:
    """Coalesce tensors (fp32, any shapes, in this order) into one payload.

    Peak extra memory is the payload itself: values are converted straight into it. `finite` is judged on the encoded
    values, since a large fp32 value can round to infinity in bf16.
    """
    numel = sum(tensor.numel() for tensor in tensors)
    data = bytearray(DATA_OFFSET + numel * codec_.itemsize)
    data[:DATA_OFFSET] = _frame(codec_, numel, metadata)
    values = torch.frombuffer(data, dtype=codec_.dtype, offset=DATA_OFFSET)
    finite, start = True, 0
    for tensor in tensors:
        part = values[start : start + tensor.numel()]
        part.copy_(tensor.detach().reshape(-1))
        finite = finite and bool(torch.isfinite(part).all())
        start += tensor.numel()
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


def digest(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of bytes, hex."""
    return blake3(data).hexdigest()


class Decoder:
    """Turns encoded blocks into fp32, through buffers that are used again: the result is valid until the next call."""

    def __init__(self, codec_: Codec, block_bytes: int) -> None:
        self._codec = codec_
        self._raw = bytearray(block_bytes)
        self._encoded = torch.frombuffer(self._raw, dtype=codec_.dtype)
        self._decoded = torch.empty(self._encoded.numel(), dtype=torch.float32)

    def __call__(self, block: bytes | memoryview) -> torch.Tensor:
        """fp32 values, shape [len(block) / itemsize]. A trailing part of a value raises ValueError."""
        count, rest = divmod(len(block), self._codec.itemsize)
        if rest:
            raise ValueError(f"{len(block)} bytes are no whole number of {self._codec.name} values")
        self._raw[: len(block)] = block
        return self._decoded[:count].copy_(self._encoded[:count])
