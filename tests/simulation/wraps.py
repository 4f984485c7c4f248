"""Wrong versions of functions of the real code that a change of its text can't make."""

from __future__ import annotations

from typing import Any

from diloco.errors import RoundTimeoutError
from diloco.exchange import allreduce, layout, rounds
from diloco.exchange.flat import Flat
from diloco.exchange.records import RunResult


def waits_if_empty(decide: Any) -> Any:
    """A commit without participants is not made."""

    def mutant(*args: Any, **kwargs: Any) -> Any:
        decision = decide(*args, **kwargs)
        empty = isinstance(decision, rounds.Proposal) and not decision.participants
        return rounds.Waiting(["a contribution"], enough=True) if empty else decision

    return mutant


def replays_at_the_second_call(replay: Any) -> Any:
    """Committed rounds are not replayed before training starts."""

    async def mutant(context: Any, states: Any, round_: int, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(context, "trains"):
            context.trains = True
            return round_
        return await replay(context, states, round_, *args, **kwargs)

    return mutant


def without_nonce(to_json: Any) -> Any:
    """A record that anybody could have written."""
    return lambda self: to_json(self.model_copy(update={"nonce": "0"}) if hasattr(self, "nonce") else self)


def ends_at_a_tie(decide: Any) -> Any:
    """A tie ends the run."""

    def mutant(*args: Any, **kwargs: Any) -> Any:
        decision = decide(*args, **kwargs)
        tie = isinstance(decision, rounds.Waiting) and "tie" in decision.waiting_for[0]
        return rounds.Ended("a tie") if tie else decision

    return mutant


def with_older_attempts(read: Any) -> Any:
    """All attempts of a rank are seen."""

    async def mutant(self: Any) -> Any:
        best = await read(self)
        older = [h for h in self._seen.values() if h is not None and best[h.rank].attempt > h.attempt]
        return best | {100 + header.rank: header for header in older}

    return mutant


def result_at_once(_: Any) -> Any:
    """The end is not waited for."""

    async def mutant(context: Any, digest: str) -> RunResult:
        member = context.member
        return RunResult(digest=digest, rounds=0, votes=[], rank=member.rank, attempt=member.attempt, model_uri=None)

    return mutant


def no(_: Any) -> Any:
    """Never."""

    async def mutant(context: Any) -> bool:
        return False

    return mutant


def commits_at_a_time_out(settle: Any) -> Any:
    """A time-out is written as an empty commit."""

    async def mutant(self: Any, round_: int, fragment: Any, out: Any) -> Any:
        try:
            return await settle(self, round_, fragment, out)
        except RoundTimeoutError:
            given_up = rounds.Proposal(fragment.base_digest, [], [], "time-out")
            wait = allreduce._Wait(fragment, rounds.HeaderReader(self.context.store, round_, 0), Flat(out))
            return allreduce.Outcome(await self._commit(round_, given_up, wait))

    return mutant


def in_order_of_arrival(read: Any) -> Any:
    """Headers in the order in which they were seen."""

    async def mutant(self: Any) -> Any:
        best, seen = await read(self), list(self._seen)
        arrival = {header.rank: seen.index(layout.header(self.round, header.member)) for header in best.values()}
        return dict(sorted(best.items(), key=lambda item: arrival[item[0]]))

    return mutant


def claims_and_deletes(claim: Any) -> Any:
    """A claim deletes what the older attempt contributed."""

    async def mutant(store: Any, rank: int, **options: Any) -> Any:
        member = await claim(store, rank, **options)
        older = layout.member_name(layout.Member(rank, member.attempt - 1))
        found = await store.list(layout.ROUNDS)
        await store.delete(entry.key for entry in found if older in entry.key)
        return member

    return mutant
