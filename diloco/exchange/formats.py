"""How fp32 values become bytes and fp32 again: plain formats, and integers with a scale for each block of values.

Decoding is exact arithmetic: the same bytes give the same fp32 bits on every machine. An integer format multiplies a
small integer by its block's scale, one correctly rounded operation; scales are normal numbers, so no result depends
on how a processor treats denormals.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from diloco.exchange.settings import CodecName

STEP_VALUES = 2**16
"""About so many values are worked on at a time: what all passes over them touch stays in a core's cache."""

SCALE_BYTES = 4
INTEGER_BLOCK_BYTES = 512
"""A power of two, so that chunks, which are one too, hold whole blocks. The scale costs 0.8 % of it."""

_LEAST_SCALE = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True)
class Codec(ABC):
    """A wire format: blocks of `block_values` values in `block_bytes` bytes, little-endian. The last one is padded
    with zeros.
    """

    name: CodecName
    tag: str
    """The dtype's name in safetensors."""
    block_values: int
    block_bytes: int
    feedback: bool
    """Whether rounding is so coarse that its error is carried over to the next round."""

    def body_bytes(self, numel: int) -> int:
        """Bytes of so many values."""
        return -(-numel // self.block_values) * self.block_bytes

    @property
    def step_values(self) -> int:
        """Values to encode at a time: whole blocks."""
        return max(STEP_VALUES // self.block_values, 1) * self.block_values

    @abstractmethod
    def shape(self, numel: int) -> list[int]:
        """Shape of the safetensors tensor that holds so many values."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor, *, keep_error: bool = False) -> bool:
        """Write fp32 values, shape [n], into uint8 `out`, shape [body_bytes(n)]. False if what was written does not
        decode to finite values throughout.

        With `keep_error`, `values` are then what was written falls short of.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Turn whole blocks (uint8) into fp32 values, the padding's included."""


def finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. A sum with one can't be finite, and takes a thirtieth of the time of
    `isfinite().all()`, which is left to find out what another sum means: large values may add up to infinity.
    """
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


@dataclass(frozen=True)
class Plain(Codec):
    """One `dtype` element a value."""

    dtype: torch.dtype

    def shape(self, numel: int) -> list[int]:  # noqa: D102
        return [numel]

    def encode(self, values: torch.Tensor, out: torch.Tensor, *, keep_error: bool = False) -> bool:  # noqa: D102
        encoded = out.view(self.dtype)
        encoded.copy_(values)
        if keep_error:
            values.sub_(encoded)
        # A large fp32 value can round to infinity in bf16.
        return finite(encoded)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:  # noqa: D102
        out.copy_(data.view(self.dtype))


@dataclass(frozen=True)
class Integer(Codec):
    """Signed integers of `bits` bits. A block is its fp32 scale, largest magnitude / largest integer, then the
    integers; of 4-bit ones the block's first half lies in the low nibbles and its second in the high ones.

    An error is at most half a scale. A block whose values are all below 2^-126 · the largest integer has the smallest
    normal number as its scale.
    """

    bits: int

    @property
    def _most(self) -> int:
        return (1 << self.bits - 1) - 1

    def shape(self, numel: int) -> list[int]:  # noqa: D102
        return [self.body_bytes(numel) // self.block_bytes, self.block_bytes]

    def encode(self, values: torch.Tensor, out: torch.Tensor, *, keep_error: bool = False) -> bool:  # noqa: D102
        blocks, padded = out.view(-1, self.block_bytes), values
        if values.numel() < len(blocks) * self.block_values:
            padded = torch.zeros(len(blocks) * self.block_values)
            padded[: values.numel()] = values
        work = padded.view(len(blocks), self.block_values).abs()
        scales = work.amax(dim=1, keepdim=True).div_(self._most).clamp_(min=_LEAST_SCALE)
        blocks.view(torch.float32)[:, :1] = scales
        # No integer gets too large: the three roundings on the way move the largest by less than half.
        torch.mul(padded.view(work.shape), scales.reciprocal(), out=work).round_()
        integers = work.to(torch.int8)
        packed = blocks[:, SCALE_BYTES:].view(torch.int8)
        if self.bits == 8:
            packed.copy_(integers)
        else:
            half = self.block_values // 2
            torch.bitwise_or(integers[:, :half] & 15, integers[:, half:] << 4, out=packed)
        if keep_error:
            values.sub_(work.mul_(scales).view(-1)[: values.numel()])
        return finite(scales * self._most)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:  # noqa: D102
        blocks, out = data.view(-1, self.block_bytes), out.view(-1, self.block_values)
        packed = blocks[:, SCALE_BYTES:].view(torch.int8)
        if self.bits == 8:
            out.copy_(packed)
        else:
            half = self.block_values // 2
            out[:, :half].copy_((packed << 4) >> 4)
            out[:, half:].copy_(packed >> 4)
        out.mul_(blocks.view(torch.float32)[:, :1])


def _integer(name: CodecName, bits: int) -> Integer:
    values = (INTEGER_BLOCK_BYTES - SCALE_BYTES) * 8 // bits
    return Integer(name, "U8", values, INTEGER_BLOCK_BYTES, feedback=True, bits=bits)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Plain("fp32", "F32", 1, 4, feedback=False, dtype=torch.float32),
        Plain("bf16", "BF16", 1, 2, feedback=False, dtype=torch.bfloat16),
        _integer("int8", 8),
        _integer("int4", 4),
    )
}


def codec(name: str) -> Codec:
    """The codec of that name, or ConfigurationError."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigurationError(f"codec {name!r} does not exist: use one of {', '.join(CODECS)}") from None
