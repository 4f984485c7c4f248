"""What a round costs a replica by either algorithm, in seconds, bytes and requests, and which one is quicker. Plain
arithmetic: `plan` uses it before anything runs, `--reduce auto` with a measured link, and `benchmarks/round.py` holds
it against what was counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["gather", "shard"]

MOST_OWNERS = 16
"""Shards of a small fragment: each costs every replica two requests a round, so that requests grow with the replicas
and not with their square.
"""
GAIN = 1.25
"""So many times faster a sharded reduction must be by the estimate: it is the more intricate one."""
POLLS = 4.0
"""Looks at the record, at the headers or at the means until all are there, when all replicas are about as fast."""


@dataclass(frozen=True)
class Link:
    """A replica's way to the store."""

    latency: float
    """Seconds that a small request takes."""
    up: float
    down: float
    """Bytes a second of one large object."""


@dataclass(frozen=True)
class Cost:
    """What one round costs one replica."""

    seconds: float
    """From the first byte up to the last byte of the mean, if nobody is late."""
    bytes_up: float
    bytes_down: float
    puts: float
    """Creates and lists, which S3 prices alike."""
    gets: float


def shards_of(algorithm: Algorithm, world_size: int) -> int:
    """Into how many shards a run divides its payloads."""
    return min(world_size, MOST_OWNERS) if algorithm == "shard" else 1


def round_cost(algorithm: Algorithm, *, replicas: int, payload: float, mean: float, link: Link) -> Cost:
    """What a round with these bytes of a payload and of its mean costs a replica: seconds of the busiest one, the rest
    on average.

    Counted for both: the list of the fence, payload and header, polls of the record and of the headers, the others'
    headers.
    """
    others, shards = replicas - 1, shards_of(algorithm, replicas)
    puts, gets = 3 + POLLS, others + POLLS
    if algorithm == "gather":
        seconds = payload / link.up + others * payload / link.down + link.latency * (2 * POLLS + 4)
        return Cost(seconds, payload, others * payload, puts, gets + others)
    owners = min(replicas, shards)
    up, reads = payload / link.up, others / owners * payload / link.down
    # What arrives while it still uploads costs no time, but for the last one's shard.
    exposed = max(reads - up, reads / others)
    published, read = mean / owners, (1 - 1 / owners) * mean
    seconds = up + exposed + published / link.up + read / link.down + link.latency * (3 * POLLS + 8)
    share = owners / replicas  # of the replicas that average a shard
    puts += shards - 1 + share + POLLS + 1
    gets += share * others + shards - share
    return Cost(
        seconds, payload + share * published, share * others / owners * payload + mean - share * published, puts, gets
    )


def choose(link: Link, *, replicas: int, payload: float, mean: float) -> Algorithm:
    """Which algorithm takes less time with payloads and means of so many bytes."""
    if replicas < 3:
        return "gather"  # two read one payload each, either way
    gather = round_cost("gather", replicas=replicas, payload=payload, mean=mean, link=link)
    shard = round_cost("shard", replicas=replicas, payload=payload, mean=mean, link=link)
    return "shard" if gather.seconds > GAIN * shard.seconds else "gather"
