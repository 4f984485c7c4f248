"""The mean of a committed round, by the algorithm that its record names."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from diloco.errors import CorruptRoundError
from diloco.exchange.reduce import BadPayloadError, check_payload, gather_mean
from diloco.exchange.sharded import ShardedMean
from diloco.exchange.shards import Division

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diloco.exchange import layout
    from diloco.exchange.context import Context
    from diloco.exchange.flat import Flat
    from diloco.exchange.records import Commit


async def committed_mean(
    context: Context,
    commit: Commit,
    layout_: str,
    out: Flat,
    *,
    own: tuple[layout.Member, bytearray] | None = None,
    at_hand: Mapping[tuple[layout.Member, int], bytes] | None = None,
) -> None:
    """Put the mean of a committed round into `out`. What is gone raises ObjectMissingError; what is corrupt
    CorruptRoundError.

    `own` is this replica's whole payload, and `at_hand` are others' objects by member and shard: they are not fetched.
    """
    division = _checked(context, commit, layout_, out.numel)
    with _corrupt_round(commit):
        if commit.algorithm == "shard":
            await ShardedMean(context, commit, division, out, own=own, at_hand=at_hand or {}).get()
        else:
            await gather_mean(context.store, commit.round, commit.participants, division, own=own, out=out)


async def audited_mean(context: Context, commit: Commit, layout_: str, out: Flat) -> list[str]:
    """The same for an observer, who writes nothing and waits for nobody. Returns in what the stored means differ from
    the payloads', in words; `out` has what the replicas had. Raises as :func:`committed_mean`.
    """
    if commit.algorithm == "gather":
        await committed_mean(context, commit, layout_, out)
        return []
    division = _checked(context, commit, layout_, out.numel)
    with _corrupt_round(commit):
        return await ShardedMean(context, commit, division, out, own=None, at_hand={}).audit()


def _checked(context: Context, commit: Commit, layout_: str, numel: int) -> Division:
    for participant in commit.participants:
        reason = check_payload(
            participant.payload,
            codec_name=context.run.codec,
            numel=numel,
            fragment_layout=layout_,
            chunk_bytes=context.run.chunk_bytes,
        )
        if reason is not None:
            raise CorruptRoundError(
                f"round {commit.round} was committed with {participant.member}, but {reason}", commit.round
            )
    return Division.of(context.run, numel)


@contextmanager
def _corrupt_round(commit: Commit) -> Iterator[None]:
    try:
        yield
    except BadPayloadError as problem:
        raise CorruptRoundError(
            f"round {commit.round} was committed, but {problem.member}'s payload is corrupt now ({problem.reason}): it "
            "is not averaged. Who has not done so yet can only go on from a checkpoint beyond that round, which strict "
            "never reaches: start a new run there",
            commit.round,
        ) from problem
