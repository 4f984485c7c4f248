"""The verification of a run for the command line: opens the store, and turns the verdict into values and lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diloco.exchange.clock import SystemClock
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.store import check_read, open_store
from diloco.exchange.verify import summary, verify

RETRY_FOR = 30.0


async def verify_run(uri: str) -> tuple[dict[str, Any], list[str]]:
    """The verdict as JSON values (the fields of :class:`diloco.exchange.verify.Verdict`, and `same`) and as lines.

    Raises ConfigurationError if there is no run, and what the store raises.
    """
    clock = SystemClock()
    bare = open_store(uri)
    try:
        await check_read(bare)
        verdict = await verify(RetryingStore(bare, clock, budget=RETRY_FOR), clock)
    finally:
        await bare.close()
    return asdict(verdict) | {"same": verdict.same}, list(summary(verdict))
