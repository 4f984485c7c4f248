"""The end of a run: votes on the final state, the trained model, and the result.

Round R holds votes only. When `min_replicas` equal votes are there and no other state has as many, a replica that
holds that state writes the model and then creates `final/result.json`. Nobody exits well without it, so no lone
diverged replica writes the result.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from diloco.errors import DivergedError
from diloco.exchange import layout
from diloco.exchange.membership import Pulse
from diloco.exchange.records import Header, RunResult, Vote
from diloco.exchange.rounds import HeaderReader
from diloco.exchange.store import create_once, read_if_there

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.exchange.clock import Poll
    from diloco.exchange.context import Context
    from diloco.exchange.store import Store


async def read_result(store: Store) -> RunResult | None:
    """The result of the run, or None while there is none."""
    data = await read_if_there(store, layout.RESULT)
    return None if data is None else RunResult.from_json(data, f"{store.uri}/{layout.RESULT}")


async def vote(context: Context, digest: str) -> None:
    """Vote for the final state that this replica holds."""
    header = Header(
        kind="vote",
        round=context.run.rounds,
        fragment=0,
        rank=context.member.rank,
        attempt=context.member.attempt,
        weight=0,
        base_digest=digest,
    )
    await create_once(context.store, layout.header(context.run.rounds, context.member), header)


async def await_result(context: Context, digest: str) -> RunResult | list[Vote]:
    """Wait for the result, or until it falls to this replica to write it: then the votes that it may rest on.

    The lowest rank that voted for the winning state writes; another one once that rank's beat has not changed for
    `dead_after`. Raises DivergedError if the result holds other bits than this replica's.
    """
    reader = HeaderReader(context.store, context.run.rounds, 0, frozenset({"vote"}))
    writer: list[Pulse] = []

    async def look(poll: Poll) -> RunResult | list[Vote] | None:
        result = await read_result(context.store)
        if result is not None:
            return result
        holders: defaultdict[str, list[Header]] = defaultdict(list)
        for header in (await reader.read()).values():
            holders[header.base_digest].append(header)
        top, second = [*sorted((len(group) for group in holders.values()), reverse=True), 0, 0][:2]
        mine = holders.get(digest, [])
        if top < context.run.min_replicas or top == second:
            context.waiting_for = [f"votes on the result ({top} of {context.run.min_replicas})"]
            return None
        first = min(header.member for group in holders.values() if len(group) == top for header in group)
        if not writer or writer[0].member != first:
            writer[:] = [Pulse(context.store, first, poll)]
        await writer[0].look()
        late = writer[0].seconds > context.settings.dead_after
        if len(mine) == top and (first.rank == context.member.rank or late):
            return [Vote(rank=header.rank, attempt=header.attempt) for header in sorted(mine, key=lambda h: h.rank)]
        context.waiting_for = [f"rank {first.rank} to write the model"]
        return None

    found: RunResult | list[Vote] = await context.wait_until(look, doing="the end of the run")
    if isinstance(found, RunResult) and found.digest != digest:
        raise DivergedError(
            f"{context.member}: its final parameters ({digest[:12]}) are not those of the result ({found.digest[:12]})"
        )
    return found


async def write_result(
    context: Context, digest: str, votes: list[Vote], model: Path | None, output: Store | None
) -> RunResult:
    """Upload the model's folder (if the trainer saved one) and create `final/result.json`; returns the one that won."""
    model_uri = None
    if model is not None:
        target, prefix = (context.store, f"{layout.MODEL}/") if output is None else (output, "")
        try:
            for path in sorted(model.rglob("*")):
                if path.is_file():
                    await target.write_file(prefix + path.relative_to(model).as_posix(), path)
        finally:
            if output is not None:
                await output.close()
        model_uri = f"{target.uri}/{prefix}".rstrip("/")
    mine = RunResult(
        digest=digest,
        rounds=context.run.rounds,
        votes=votes,
        rank=context.member.rank,
        attempt=context.member.attempt,
        model_uri=model_uri,
    )
    _, stored = await create_once(context.store, layout.RESULT, mine)
    return RunResult.from_json(stored, f"{context.store.uri}/{layout.RESULT}")
