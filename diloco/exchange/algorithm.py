"""All-gather or sharded reduction: what a round of each costs, and which one a run takes.

All-gather is simple and quick where requests cost more time than bytes: each replica reads all other payloads. A
sharded reduction moves 2(N-1)/N payloads instead of N-1, for more requests and one more wait. The run's first replica
measures its link to the store and decides for all, in run.json.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from diloco.exchange import layout, membership
from diloco.exchange.formats import codec
from diloco.exchange.records import RunRecord, new_nonce
from diloco.exchange.shards import MOST_OWNERS
from diloco.exchange.store import read_if_there

if TYPE_CHECKING:
    from diloco.exchange.clock import Clock
    from diloco.exchange.store import Store

logger = logging.getLogger(__name__)

Algorithm = Literal["gather", "shard"]

PROBE_BYTES = 4 * 2**20
GAIN = 1.25
"""So many times faster a sharded reduction must be by the estimate: it is the more intricate one."""
_SMALLEST = 1e-6


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


POLLS = 3
"""Looks at a round's headers, or at its means, until all are there: what a round of equally fast replicas was
measured to take.
"""


def round_cost(algorithm: Algorithm, *, replicas: int, shards: int, payload: float, mean: float, link: Link) -> Cost:
    """What a round with these bytes of a payload and of its mean costs the replica that has the most to do.

    Counted for both: the fence's list, the payload, the header, polls of the record and of the headers, the others'
    headers, and the record.
    """
    others = replicas - 1
    puts, gets = 3.0 + POLLS, others + POLLS + 1.0
    if algorithm == "gather":
        seconds = payload / link.up + others * payload / link.down + link.latency * (puts + gets)
        return Cost(seconds, payload, others * payload, puts, gets + others)
    owned = -(-shards // replicas)  # by the busiest
    share = owned / shards
    up, reads = payload / link.up, others * share * payload / link.down
    published, read = share * mean, (1 - share) * mean
    puts += shards - 1 + owned + POLLS + 1  # parts, means, looks at the means, a look at the payloads
    parts = owned * others
    # What arrives while it still uploads costs no time, but for the last shard.
    exposed = max(reads - up, reads / max(parts, 1))
    seconds = up + exposed + published / link.up + read / link.down + link.latency * (puts + gets + 2)
    return Cost(seconds, payload + published, others * share * payload + read, puts, gets + parts + shards - owned)


def shards_of(algorithm: Algorithm, world_size: int) -> int:
    """Into how many shards a run divides its payloads."""
    return min(world_size, MOST_OWNERS) if algorithm == "shard" else 1


def choose(link: Link, *, replicas: int, payload: float, mean: float) -> Algorithm:
    """Which algorithm takes less time with payloads and means of so many bytes."""
    if replicas < 3:
        return "gather"  # two read one payload each, either way
    gather, shard = (
        round_cost(
            algorithm, replicas=replicas, shards=shards_of(algorithm, replicas), payload=payload, mean=mean, link=link
        ).seconds
        for algorithm in ("gather", "shard")
    )
    return "shard" if gather > GAIN * shard else "gather"


async def measure(store: Store, clock: Clock) -> Link:
    """The link of this process to a store: a small and a large object, written and read. Raises what the store does."""
    put, get = await _there_and_back(store, clock, 1024)
    put_large, get_large = await _there_and_back(store, clock, PROBE_BYTES)
    latency = min(put, get)
    return Link(
        latency,
        PROBE_BYTES / max(put_large - latency, _SMALLEST),
        PROBE_BYTES / max(get_large - latency, _SMALLEST),
    )


async def _there_and_back(store: Store, clock: Clock, size: int) -> tuple[float, float]:
    key = f"{layout.PROBES}{new_nonce()}.bin"
    began = clock.monotonic()
    await store.write(key, os.urandom(size))
    written = clock.monotonic()
    try:
        await store.read(key)
        return written - began, clock.monotonic() - written
    finally:
        await store.delete([key])


async def agree(
    store: Store, clock: Clock, run: RunRecord, choice: Literal["auto", "gather", "shard"], numel: int
) -> RunRecord:
    """Agree on run.json, its algorithm included: `choice`, or with `auto` what is there, or what suits this replica's
    link and fragments of `numel` values.

    Raises RunMismatchError for another run, or one with another algorithm than was asked for.
    """
    algorithm: Algorithm = "gather"
    if choice != "auto":
        algorithm = choice
    elif await read_if_there(store, layout.RUN) is None and run.world_size > 2:
        link = await measure(store, clock)
        sizes = {"payload": codec(run.codec).body_bytes(numel), "mean": codec(run.mean_codec).body_bytes(numel)}
        algorithm = choose(link, replicas=run.world_size, **sizes)
        logger.info(
            "the store answers in %.0f ms, %.0f MB/s up, %.0f MB/s down: reduce by %s",
            link.latency * 1e3, link.up / 1e6, link.down / 1e6, algorithm,
        )  # fmt: skip
    mine = run.model_copy(update={"reduce": algorithm, "shards": shards_of(algorithm, run.world_size)})
    return await membership.agree_on_run(store, mine, open_to={"reduce", "shards"} if choice == "auto" else set())
