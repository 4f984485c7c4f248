"""Deleting what a run no longer needs: the two newest confirmed checkpoints and all rounds since the older one are
kept.

`checkpoints/{c}` is the state before round c, so it licenses deleting rounds below c, not c. What was created once as
a record (commits, manifests, claims, run.json) is never deleted: without its commit, a slow replica could commit a
round a second time. Past the last round nothing is deleted until the result is there, since whoever is behind still
has to reach it. Deleting again is harmless.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diloco.exchange import checkpoint, ending, layout

if TYPE_CHECKING:
    from diloco.exchange.context import Context

_ROUND = re.compile(r"rounds/(\d{8})/")
_PART = re.compile(r"checkpoints/(\d{8})/\d{5}-\d{5}/")


async def prune(context: Context) -> int | None:
    """Delete rounds and checkpoint parts below the older of the two newest confirmed checkpoints; returns its round."""
    confirmed = []
    async for manifest in checkpoint.confirmed(context, newest_first=True):
        confirmed.append(manifest.round)
        if len(confirmed) == 2:
            break
    if len(confirmed) < 2 or confirmed[1] == 0:
        return None
    if await _is_ending(context):
        return None
    oldest = confirmed[1]
    # Parts first: this process may end in between, and a checkpoint that looks whole must be one to replay from.
    for prefix, pattern in ((layout.CHECKPOINTS, _PART), (layout.ROUNDS, _ROUND)):
        entries = await context.store.list(prefix)
        found = [(pattern.match(entry.key), entry.key) for entry in entries]
        await context.store.delete(key for match, key in found if match is not None and int(match[1]) < oldest)
    return oldest


async def _is_ending(context: Context) -> bool:
    last = await checkpoint.read_commit(context.store, context.run.rounds - 1)
    return last is not None and await ending.read_result(context.store) is None
