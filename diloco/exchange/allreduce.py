"""One round of averaging through the object store.

:meth:`ObjectStoreAllReduce.contribute` writes this replica's payload, then its header.
:meth:`ObjectStoreAllReduce.settle` waits until the headers allow a commit, averages what it would commit (so each
payload is verified before it is named, and fetched once), creates the commit record, and follows whichever record
won. A replica that is left out of a commit applies its mean all the same.

Repeating is harmless: a second contribution of a round finds its own header and uploads nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from diloco.errors import DivergedError, RoundError
from diloco.exchange import codec, formats, layout, rounds
from diloco.exchange.checkpoint import check_fragment, read_commit
from diloco.exchange.clock import Timer
from diloco.exchange.feedback import Feedback
from diloco.exchange.flat import Flat
from diloco.exchange.grace import Grace
from diloco.exchange.mean import committed_mean
from diloco.exchange.membership import Attendance, check_fence, newest_attempts
from diloco.exchange.records import Commit, Header, new_nonce
from diloco.exchange.reduce import BadPayloadError, MissingPayloadError, check_payload, gather_mean
from diloco.exchange.sharded import Ahead
from diloco.exchange.shards import Division
from diloco.exchange.store import create_once, create_same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from diloco.exchange.clock import Poll
    from diloco.exchange.context import Context
    from diloco.exchange.records import Participant
    from diloco.exchange.shards import Shard

logger = logging.getLogger(__name__)

MOST_EMPTY_ROUNDS = 3
"""So many rounds in a row without a single contribution end the run."""


@dataclass(frozen=True)
class Fragment:
    """What a round has to know of the fragment that it averages."""

    index: int
    numel: int
    layout: str
    base_digest: str


@dataclass(frozen=True)
class Outcome:
    """A settled round. The mean is where `settle` was told to put it, unless nobody took part."""

    commit: Commit

    @property
    def averaged(self) -> bool:
        """Whether there is a mean to apply."""
        return bool(self.commit.participants)


@dataclass
class _Wait:
    """What one call of `settle` has learnt so far."""

    fragment: Fragment
    reader: rounds.HeaderReader
    mean: Flat
    rejected: dict[layout.Member, str] = field(default_factory=dict)
    averaged: list[Participant] | None = None
    """Whose mean `mean` holds."""
    grace: Timer | None = None
    seen: set[int] = field(default_factory=set)
    """Ranks whose header was seen."""


class ObjectStoreAllReduce:
    """Averages pseudo-gradients among the replicas of a run. All methods are coroutines and run one after another."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.rules = rounds.Rules(context.run.policy, context.run.world_size, context.run.min_replicas)
        self._codec = formats.codec(context.run.codec)
        self.feedback = Feedback()
        self._attendance = Attendance(context)
        self.grace = Grace(context.settings.grace)
        self._present: dict[int, set[int]] = {}
        self._empty = 0
        self._own: tuple[int, codec.Encoded] | None = None
        self._ahead: Ahead | None = None
        """What was read before the commit, of the round in which :attr:`_own` was sent."""
        self._memory: bytearray | None = None
        """Of the last payload, for the next one."""
        self._announced = -1
        """The last round of which this replica's header is there."""

    async def contribute(
        self, round_: int, fragment: Fragment, tensors: Sequence[torch.Tensor], *, weight: int
    ) -> str | None:
        """Upload a pseudo-gradient: `tensors` (fp32, in payload order) as one payload, then the header. `weight` is
        positive.

        One with NaN or Inf is not uploaded: the replica abstains, and the reason is returned. Raises FencedError if a
        newer attempt of this rank is there.
        """
        member = self.context.member
        if self._announced == round_:
            return None

        async def announce(encoded: codec.Encoded) -> None:
            self._own = (round_, encoded)
            await self._create_header(round_, fragment, kind="contribution", weight=weight, payload=encoded.info)

        if self._own is not None and self._own[0] == round_:
            await announce(self._own[1])
        else:
            encoded = await self.context.store.meanwhile(lambda: self._encode(round_, fragment, tensors))
            self._memory = encoded.data
            if not encoded.finite:
                await self.abstain(round_, fragment, rounds.NOT_FINITE)
                return rounds.NOT_FINITE
            await check_fence(self.context.store, member)
            await self._upload(round_, encoded, then=partial(announce, encoded))
        return None

    def _encode(self, round_: int, fragment: Fragment, tensors: Sequence[torch.Tensor]) -> codec.Encoded:
        member = self.context.member
        return codec.encode(
            tensors,
            self._codec,
            chunk_bytes=self.context.run.chunk_bytes,
            layout=fragment.layout,
            metadata={
                "round": str(round_),
                "rank": str(member.rank),
                "attempt": str(member.attempt),
                "nonce": new_nonce(),
            },
            residual=self.feedback.residual(fragment.index, fragment.numel) if self._codec.feedback else None,
            into=self._memory,
        )

    async def abstain(self, round_: int, fragment: Fragment, reason: str) -> None:
        """Write a header of weight 0: this replica is there and holds these bits, but has nothing to add."""
        await check_fence(self.context.store, self.context.member)
        if self._announced != round_:
            await self._create_header(round_, fragment, kind="abstention", weight=0, reason=reason)

    async def _upload(self, round_: int, encoded: codec.Encoded, *, then: Callable[[], Awaitable[None]]) -> None:
        """Create the payload's objects, and `then` its header; of a divided one in such an order that every owner gets
        some early, while those are read that this replica will average.
        """
        division = Division.of(self.context.run, encoded.info.numel)
        store, member = self.context.store, self.context.member
        parts = list(division.parts(round_, member, codec.DATA_OFFSET))

        async def create(shard: Shard) -> None:
            key, start, end = parts[shard.index]
            # Nobody else writes this attempt's objects: the same bytes are its own. A whole one need not be read back.
            nonce_in = codec.DATA_OFFSET if shard.index == 0 else None
            if not await create_same(store, key, memoryview(encoded.data)[start:end], nonce_in=nonce_in):
                raise RoundError(
                    f"{member}: a payload of round {round_} that this process did not write is in its place: start the "
                    "run again with the same run id"
                )

        self._ahead = None
        if self.context.run.reduce == "gather":
            await store.each([partial(create, shard) for shard in division.shards], then=then)
            return
        ranks = sorted(self._expected(round_) | {member.rank})
        self._ahead = Ahead(self.context, round_, division, ranks)
        order = division.upload_order(round_, ranks.index(member.rank), len(ranks))
        await store.each([partial(create, shard) for shard in order], then=then, beside=self._ahead.look)

    def _expected(self, round_: int) -> set[int]:
        """Who will probably take part: those who did last time."""
        return self._present.get(round_ - 1) or set(range(self.rules.world_size))

    async def _create_header(self, round_: int, fragment: Fragment, **fields: object) -> None:
        member = self.context.member
        header = Header.model_validate(
            {
                "round": round_,
                "fragment": fragment.index,
                "rank": member.rank,
                "attempt": member.attempt,
                "base_digest": fragment.base_digest,
                **fields,
            }
        )
        await create_once(self.context.store, layout.header(round_, member), header)
        self._announced = round_

    async def settle(self, round_: int, fragment: Fragment, out: Sequence[torch.Tensor]) -> Outcome:
        """Wait for the round's commit, making it when the headers allow it, and put the mean into `out`.

        `out` are tensors (fp32, CPU, contiguous) of `fragment.numel` values together, in payload order; their contents
        are undefined if this raises, or if nobody took part.

        Raises RoundError when the policy ends the run, RoundTimeoutError that names whom it waited for, DivergedError
        when the others agreed on other bits than this replica's, CorruptObjectError or ObjectMissingError when a
        committed payload can't be had any more.
        """
        wait = _Wait(fragment, rounds.HeaderReader(self.context.store, round_, fragment.index), Flat(out))
        if wait.mean.numel != fragment.numel:
            raise ValueError(f"{wait.mean.numel} values to put the mean of {fragment.numel} into")
        self._attendance.begin()
        doing = f"round {round_}"
        commit = await self.context.wait_until(lambda poll: self._try(round_, wait, poll), doing=doing)
        check_fragment(self.context, commit)
        self._note_and_check(commit)
        for late in commit.left_out:
            if late.reason == rounds.LATE and late.rank not in wait.seen:
                self.grace.observe(self.grace.seconds)
        if wait.grace is None:
            self.grace.observe(0.0)
        if commit.base_digest != fragment.base_digest:
            raise DivergedError(
                f"{self.context.member}: its parameters before round {round_} (fragment {fragment.index}, digest "
                f"{fragment.base_digest[:12]}) are not those of the others ({commit.base_digest[:12]}); it averages "
                "nothing with them"
            )
        if commit.participants and commit.participants != wait.averaged:
            await committed_mean(
                self.context,
                commit,
                fragment.layout,
                wait.mean,
                own=self._own_payload(round_),
                at_hand=self._ahead.found if self._ahead is not None else None,
            )
        if self.context.member not in [participant.member for participant in commit.participants]:
            self.feedback.forget(fragment.index)
        self._own = self._ahead = None
        return Outcome(commit)

    async def _try(self, round_: int, wait: _Wait, poll: Poll) -> Commit | None:
        commit = await read_commit(self.context.store, round_)
        if commit is not None:
            return commit
        headers = await wait.reader.read()
        for header in headers.values():
            if header.payload is not None and header.member not in wait.rejected:
                reason = check_payload(
                    header.payload,
                    codec_name=self.context.run.codec,
                    numel=wait.fragment.numel,
                    fragment_layout=wait.fragment.layout,
                    chunk_bytes=self.context.run.chunk_bytes,
                )
                if reason is not None:
                    wait.rejected[header.member] = reason
        self._observe_lateness(wait, set(headers))
        while True:
            decision = await self._decide(round_, headers, wait, poll)
            if isinstance(decision, rounds.Ended):
                raise RoundError(f"round {round_} can't be completed: {decision.reason}")
            if isinstance(decision, rounds.Waiting):
                if decision.enough and wait.grace is None:
                    wait.grace = Timer(poll)
                    wait.seen = set(headers)
                    late = ", ".join(decision.waiting_for)
                    logger.info(
                        "round %d: enough are there, grace period %.1f s for %s", round_, self.grace.seconds, late
                    )
                self.context.waiting_for = decision.waiting_for
                if self._ahead is not None:
                    await self._ahead.take(headers.values())
                return None
            if await self._average(round_, decision, wait):
                return await self._commit(round_, decision, wait)

    async def _decide(
        self, round_: int, headers: dict[int, Header], wait: _Wait, poll: Poll
    ) -> rounds.Proposal | rounds.Waiting | rounds.Ended:
        waited_for: set[int] = set()
        if self.rules.policy == "skip":
            known = [self._present.get(before) for before in (round_ - 1, round_ - 2) if before >= 0]
            lately = set().union(*(ranks for ranks in known if ranks is not None))
            if round_ < 2 or None in known:
                lately |= set(range(self.rules.world_size))  # who took part is not known: everybody might
            waited_for = await self._attendance.waited_for(lately, headers, poll)
        grace_over = wait.grace is not None and wait.grace.seconds >= self.grace.seconds

        def decide(newest: dict[int, int]) -> rounds.Proposal | rounds.Waiting | rounds.Ended:
            refused = wait.reader.refused_members
            return rounds.decide(
                self.rules,
                {rank: header for rank, header in headers.items() if header.attempt >= newest.get(rank, 0)},
                rejected=wait.rejected,
                waited_for=waited_for,
                grace_over=grace_over,
                refused={m.rank: why for m, why in refused.items() if m.attempt >= newest.get(m.rank, 0)},
            )

        decision = decide({})
        if isinstance(decision, rounds.Ended):
            # What an attempt left behind that has been replaced ends nothing: its rank gets another chance.
            decision = decide(await newest_attempts(self.context.store))
        return decision

    def _observe_lateness(self, wait: _Wait, present: set[int]) -> None:
        """Ranks that came after there were enough; the others, when it was over before it began, were on time."""
        if wait.grace is not None:
            for _ in present - wait.seen:
                self.grace.observe(wait.grace.seconds)
            wait.seen |= present

    def _own_payload(self, round_: int) -> tuple[layout.Member, bytearray] | None:
        """What this member sent in this round, which need not be fetched."""
        if self._own is None or self._own[0] != round_:
            return None
        return self.context.member, self._own[1].data

    async def _average(self, round_: int, proposal: rounds.Proposal, wait: _Wait) -> bool:
        """Average what would be committed. False if a payload turned out bad: it is rejected, and the round has to be
        decided again.
        """
        wait.averaged = None
        if not proposal.participants:
            return True
        if self.context.run.reduce == "shard":
            return await self._are_there(round_, proposal, wait)
        own = self._own_payload(round_)
        try:
            division = Division.of(self.context.run, wait.fragment.numel)
            await gather_mean(self.context.store, round_, proposal.participants, division, own=own, out=wait.mean)
        except BadPayloadError as problem:
            wait.rejected[problem.member] = problem.reason
            return False
        except MissingPayloadError as problem:
            wait.rejected[problem.member] = "its payload is not there"
            return False
        wait.averaged = proposal.participants
        return True

    async def _are_there(self, round_: int, proposal: rounds.Proposal, wait: _Wait) -> bool:
        """Whether all objects are there, in full, that a sharded reduction would read. False as for :meth:`_average`:
        only the owners read them, after the commit.
        """
        sizes = {entry.key: entry.size for entry in await self.context.store.list(layout.payloads(round_))}
        division = Division.of(self.context.run, wait.fragment.numel)
        for participant in proposal.participants:
            member, frame = participant.member, participant.payload.data_offset
            for key, start, end in division.parts(round_, member, frame):
                if sizes.get(key) != end - start:
                    found = "is not there" if key not in sizes else f"has {sizes[key]} bytes, not {end - start}"
                    wait.rejected[member] = f"its payload {found}"
        return not wait.rejected.keys() & {participant.member for participant in proposal.participants}

    async def _commit(self, round_: int, proposal: rounds.Proposal, wait: _Wait) -> Commit:
        member = self.context.member
        mine = Commit(
            round=round_,
            fragment=wait.fragment.index,
            base_digest=proposal.base_digest,
            algorithm=self.context.run.reduce,
            participants=proposal.participants,
            left_out=proposal.left_out,
            committed_by=member.rank,
            committed_by_attempt=member.attempt,
            reason=proposal.reason,
        )
        key = layout.commit(round_)
        _, stored = await create_once(self.context.store, key, mine)
        return Commit.from_json(stored, f"{self.context.store.uri}/{key}")

    def note(self, commit: Commit) -> None:
        """Remember who was there: those are waited for in the next rounds. Replayed rounds count too."""
        self._present = {r: ranks for r, ranks in self._present.items() if r == commit.round - 1}
        left_out = {out.rank for out in commit.left_out if out.attempt is not None}
        self._present[commit.round] = left_out | {participant.rank for participant in commit.participants}
        self._empty = 0 if commit.participants else self._empty + 1

    def _note_and_check(self, commit: Commit) -> None:
        """End the run after three rounds to which nobody contributed."""
        self.note(commit)
        if self._empty >= MOST_EMPTY_ROUNDS:
            reasons = "; ".join(f"rank {out.rank}: {out.reason}" for out in commit.left_out)
            raise RoundError(
                f"nobody contributed to the last {self._empty} rounds, up to round {commit.round} ({reasons})"
            )
