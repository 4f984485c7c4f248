"""How a fragment is divided for a sharded reduction: into which shards, who averages each, and in which order a replica
uploads them. Pure functions of run.json and of a commit, so that all replicas agree without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from diloco.exchange import layout
from diloco.exchange.formats import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.exchange.records import RunRecord

SHARD_BYTES = 64 * 2**20
"""The fp32 mean of one shard is at most about so large: an owner holds it encoded while it publishes it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of whole chunks of a payload, and the values in them: an object of each contribution, and one of the
    means.
    """

    index: int
    start: int
    stop: int
    """Its values are `[start, stop)` of the fragment's."""
    body_start: int
    body_stop: int
    """Its bytes are `[body_start, body_stop)` of a payload's body."""


class Division:
    """The shards of one fragment's payloads.

    Args:
        numel: values of the fragment.
        codec_name: the payloads' wire format.
        chunk_bytes: bytes of a chunk of a payload's body.
        shards: how many shards are wanted; a small payload has fewer, one a chunk at most. 1: undivided.
    """

    def __init__(self, numel: int, codec_name: str, chunk_bytes: int, shards: int) -> None:
        wire = codec(codec_name)
        body = wire.body_bytes(numel)
        chunks = max(-(-body // chunk_bytes), 1)
        if shards > 1:
            shards = max(shards, -(-4 * numel // SHARD_BYTES))
        count = min(shards, chunks)
        values = chunk_bytes // wire.block_bytes * wire.block_values
        bounds = [index * chunks // count for index in range(count + 1)]
        self.numel = numel
        self.shards = [
            Shard(index, first * values, min(end * values, numel), first * chunk_bytes, min(end * chunk_bytes, body))
            for index, (first, end) in enumerate(pairwise(bounds))
        ]

    @classmethod
    def of(cls, run: RunRecord, numel: int) -> Division:
        """How a run divides a fragment of so many values."""
        return cls(numel, run.codec, run.chunk_bytes, run.shards)

    def key(self, round_: int, member: layout.Member, shard: Shard) -> str:
        """Where that shard of a member's payload is."""
        return layout.payload(round_, member, shard.index if len(self.shards) > 1 else None)

    def parts(self, round_: int, member: layout.Member, frame: int) -> Iterator[tuple[str, int, int]]:
        """Key of each object of a member's payload, and which bytes of the payload it holds: the framing of `frame`
        bytes comes before the first one's.
        """
        for shard in self.shards:
            start = shard.body_start + frame if shard.index else 0
            yield self.key(round_, member, shard), start, shard.body_stop + frame

    def owned(self, round_: int, place: int, owners: int) -> list[Shard]:
        """The shards that fall to the participant at that place of `owners` (by rank). They rotate over the rounds."""
        return [shard for shard in self.shards if owner(round_, shard.index, owners) == place]

    def upload_order(self, round_: int, place: int, owners: int) -> list[Shard]:
        """In which order a participant uploads, so that each owner always has some shard arriving: the next owner's
        first, its own last.
        """

        def turn(shard: Shard) -> tuple[int, int]:
            return shard.index // owners, (owner(round_, shard.index, owners) - place - 1) % owners

        return sorted(self.shards, key=turn)


def owner(round_: int, shard: int, owners: int) -> int:
    """Which of the round's participants (by rank, counted from 0) averages a shard."""
    return (shard + round_) % owners
