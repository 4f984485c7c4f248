"""Whether all replicas of a run held the same bits at every round: by replaying it from the oldest checkpoint that is
still whole.

Rounds before that checkpoint have been pruned; of them the commit records remain, which say on which bits each round
was made and by whom. From the checkpoint on every committed mean is computed again, and what headers, beats and the
result say is compared with the replayed state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from diloco.errors import ConfigurationError, CorruptObjectError, ObjectMissingError
from diloco.exchange import checkpoint, layout
from diloco.exchange.context import Context
from diloco.exchange.ending import read_result
from diloco.exchange.flat import Flat
from diloco.exchange.layout import Member
from diloco.exchange.mean import audited_mean
from diloco.exchange.records import Beat, Header, RunRecord
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.state import FragmentState, OuterStep, whole_digest
from diloco.exchange.store import read_if_there

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.exchange.clock import Clock
    from diloco.exchange.records import Commit, Manifest
    from diloco.exchange.store import Store


@dataclass
class Verdict:
    """What a verification found."""

    run_id: str
    rounds: int
    committed: int = 0
    """Rounds that have their record."""
    replayed_from: int = 0
    compared: int = 0
    """Digests of headers, beats and the result that were compared with the replayed state."""
    differences: list[str] = field(default_factory=list)
    """Each says who differs where; empty if all held the same bits."""
    gaps: list[str] = field(default_factory=list)
    """Rounds that can't be replayed, since what they were made of is gone or corrupt now, and why."""
    finished: bool = False

    @property
    def same(self) -> bool:
        """Whether it is shown that every replica held the same bits at every round."""
        return not self.differences and not self.gaps


async def verify(store: Store, clock: Clock) -> Verdict:
    """Replay the run under `store` and compare. Raises ConfigurationError if there is no run, or nothing to replay
    from.
    """
    data = await read_if_there(store, layout.RUN)
    if data is None:
        raise ConfigurationError(
            f"{store.uri}: there is no run here (no {layout.RUN}): give the run's own prefix, with its id"
        )
    run = RunRecord.from_json(data, f"{store.uri}/{layout.RUN}")
    context = Context(store, clock, Member(0, 0), ExchangeSettings(), run)
    verdict = Verdict(run.run_id, run.rounds)
    oldest = await _whole(context)
    if oldest is None:
        raise ConfigurationError(f"{store.uri}: no checkpoint is left to replay from")
    manifest, states = oldest
    verdict.replayed_from = manifest.round
    commits = await _commits(store, run, verdict)
    applied = {(state.index, state.last_round): state.digest() for state in states}
    step = OuterStep(run.outer_lr, run.outer_momentum, run.nesterov)
    round_ = manifest.round
    while round_ < len(commits):
        commit = commits[round_]
        state = states[commit.fragment]
        await _compare_round(context, commit, state.digest(), verdict)
        if commit.participants:
            mean = torch.empty(state.numel)
            try:
                verdict.differences += await audited_mean(context, commit, state.layout, Flat([mean]))
            except (CorruptObjectError, ObjectMissingError) as problem:
                beyond = await _whole(context, after=round_)
                goes_on = f"goes on from checkpoint {beyond[0].round}" if beyond else "no checkpoint is beyond it"
                verdict.gaps.append(f"round {round_} can't be replayed: {problem}: {goes_on}")
                if beyond is None:
                    return verdict
                manifest, states = beyond
                round_ = manifest.round
                continue
            state.apply(mean, step, round_)
            applied[state.index, round_] = state.digest()
        round_ += 1
    await _compare_beats(store, applied, run.fragments, verdict)
    result = await read_result(store)
    if result is not None:
        verdict.finished = True
        _compare(
            verdict, f"the result of rank {result.rank}", result.digest, whole_digest([s.digest() for s in states])
        )
    return verdict


async def _whole(context: Context, *, after: int = -1) -> tuple[Manifest, list[FragmentState]] | None:
    """The oldest confirmed checkpoint beyond a round, of which all is there."""
    async for manifest in checkpoint.confirmed(context, newest_first=False):
        if manifest.round > after:
            try:
                return manifest, await checkpoint.read_states(context, manifest)
            except ObjectMissingError:
                continue  # pruned
    return None


async def _commits(store: Store, run: RunRecord, verdict: Verdict) -> list[Commit]:
    """All records from round 0 on, up to the first that is missing."""
    there = {layout.parse_number(entry.key) for entry in await store.list(layout.COMMITS)}
    commits: list[Commit] = []
    for round_ in range(run.rounds):
        commit = await checkpoint.read_commit(store, round_) if round_ in there else None
        if commit is None:
            break
        commits.append(commit)
    verdict.committed = len(commits)
    beyond = sorted(number for number in there if number is not None and number > len(commits))
    if beyond:
        verdict.differences.append(f"round {len(commits)} has no commit, though round {beyond[0]} has one")
    return commits


async def _compare_round(context: Context, commit: Commit, base: str, verdict: Verdict) -> None:
    _compare(verdict, f"the commit of round {commit.round}", commit.base_digest, base)
    for entry in await context.store.list(layout.headers(commit.round)):
        data = await read_if_there(context.store, entry.key)
        try:
            header = Header.from_json(data, entry.key) if data is not None else None
        except CorruptObjectError:
            continue
        if header is not None:
            _compare(verdict, f"{header.member} before round {commit.round}", header.base_digest, base)


async def _compare_beats(store: Store, applied: dict[tuple[int, int], str], fragments: int, verdict: Verdict) -> None:
    for entry in await store.list(layout.BEATS):
        data = await read_if_there(store, entry.key)
        try:
            beat = Beat.from_json(data, entry.key) if data is not None else None
        except CorruptObjectError:
            continue
        if beat is None or beat.digest is None or beat.digest_round is None or beat.digest_round < 0:
            continue
        replayed = applied.get((beat.digest_round % fragments, beat.digest_round))
        if replayed is not None:
            _compare(
                verdict, f"{Member(beat.rank, beat.attempt)} after round {beat.digest_round}", beat.digest, replayed
            )


def _compare(verdict: Verdict, who: str, held: str, replayed: str) -> None:
    verdict.compared += 1
    if held != replayed:
        verdict.differences.append(f"{who} has {held[:12]}, the replay has {replayed[:12]}")


def summary(verdict: Verdict) -> Sequence[str]:
    """The verdict in lines for people."""
    lines = [
        f"run {verdict.run_id}: {verdict.committed} of {verdict.rounds} rounds committed"
        + (", finished" if verdict.finished else ", not finished"),
        f"replayed from round {verdict.replayed_from}; {verdict.compared} digests compared",
    ]
    if verdict.replayed_from:
        lines.append(f"rounds before {verdict.replayed_from} are pruned: their commit records agree on one state each")
    end = "all replicas held the same bits"
    if not verdict.same:
        end = "replicas differed" if verdict.differences else "the replicas of the other rounds held the same bits"
    return [*lines, *verdict.gaps, *verdict.differences, end]
