"""How fast one core encodes a pseudo-gradient, and decodes one and adds it to a mean, in each wire format.

Both are what a replica does in a round after its first, which gets its memory from the system. Digests of all chunks
and the search for NaN are included, and error feedback where the format has it. GB of fp32 values a second of CPU
time, the best of `--repeats`. Claims: at least 2 for fp32 and bf16, 1 for int8, 0.8 for int4, both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common import print_result, say
from diloco.exchange import codec
from diloco.exchange.flat import Flat
from diloco.exchange.formats import CODECS
from diloco.exchange.layout import Member, payload
from diloco.exchange.records import Participant
from diloco.exchange.reduce import gather_mean
from diloco.exchange.shards import Division
from diloco.exchange.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.exchange.formats import Codec

MUST_BE = {"fp32": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.8}
TENSORS = 16
CHUNK_BYTES = 2**20


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of fp32 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--codecs", default=",".join(CODECS), help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, Any] = {}
    for name in options.codecs.split(","):
        measured[name] = _measure(CODECS[name], options.mib, options.repeats) | {"must_be": MUST_BE[name]}
        say(f"{name}: {measured[name]}")
    holds = all(one[way] >= one["must_be"] for one in measured.values() for way in ("encode", "decode_and_add"))
    return print_result({"gb_per_second": measured, "fp32_mib": options.mib}, holds=holds)


class _FreeStore(MemoryStore):
    """Reading costs nothing: what it returns is a view."""

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        return memoryview(self._objects[key])[start:end]  # type: ignore[return-value]  # of which a gather only makes views


def _measure(wire: Codec, mib: int, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(mib * 2**18 // TENSORS, generator=generator) for _ in range(TENSORS)]
    numel = sum(tensor.numel() for tensor in tensors)
    residual = torch.zeros(numel) if wire.feedback else None

    memory = None

    def encode() -> codec.Encoded:
        return codec.encode(
            tensors, wire, chunk_bytes=CHUNK_BYTES, layout="layout", metadata={}, residual=residual, into=memory
        )

    encoded = encode()
    memory = encoded.data
    store, members = _FreeStore(), [Member(rank, 1) for rank in range(3)]
    for member in members:
        asyncio.run(store.create(payload(0, member), encoded.data))
    participants = [Participant(rank=m.rank, attempt=1, weight=1, payload=encoded.info) for m in members]
    mean = Flat([torch.empty_like(tensor) for tensor in tensors])

    division = Division(mean.numel, wire.name, CHUNK_BYTES, shards=1)

    def gather(count: int) -> None:
        asyncio.run(gather_mean(store, 0, participants[:count], division, own=None, out=mean))

    # The first contribution is copied, the others are added: what one addition takes is the difference.
    both, one = _seconds(lambda: gather(3), repeats), _seconds(lambda: gather(1), repeats)
    size = numel * 4 / 1e9
    return {
        "encode": round(size / _seconds(encode, repeats), 2),
        "decode_and_add": round(2 * size / (both - one), 2),
        "payload_of_fp32": round(encoded.info.size / (numel * 4), 4),
    }


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this process, the least of so many."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


if __name__ == "__main__":
    sys.exit(main())
