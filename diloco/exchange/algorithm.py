"""All-gather or sharded reduction: which one a run takes.

All-gather is simple and quick where requests cost more time than bytes: each replica reads all other payloads. A
sharded reduction moves 2(N-1)/N payloads instead of N-1, for more requests and one more wait. The run's first replica
measures its link to the store and decides for all, in run.json.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from diloco.exchange import layout, membership
from diloco.exchange.formats import codec
from diloco.exchange.records import RunRecord, new_nonce
from diloco.exchange.round_cost import Link, choose, shards_of
from diloco.exchange.store import read_if_there

if TYPE_CHECKING:
    from diloco.exchange.clock import Clock
    from diloco.exchange.round_cost import Algorithm
    from diloco.exchange.settings import ReduceName
    from diloco.exchange.store import Store

logger = logging.getLogger(__name__)

PROBE_BYTES = 4 * 2**20
_SMALLEST = 1e-6


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


async def agree(store: Store, clock: Clock, run: RunRecord, choice: ReduceName, numel: int) -> RunRecord:
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
