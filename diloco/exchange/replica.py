"""One replica's part in a run, from joining to the result, as coroutines over a store and a clock.

What is above (threads, torchft) calls it in this order: :meth:`Replica.enter`, then for each round :meth:`quorum`,
:meth:`exchange`, and :meth:`applied` once the outer step is done, at last :meth:`vote`. A simulation calls the same
methods.

A replica whose state is not what the others committed on (it diverged, or the data it needs was pruned or is corrupt)
is *lost*: it applies nothing, and catches up from a confirmed checkpoint at the next :meth:`quorum`, where it abstains.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from diloco.errors import CorruptRoundError, DivergedError, ObjectMissingError
from diloco.exchange import algorithm, checkpoint, ending, layout, pruning, rounds
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.context import Context
from diloco.exchange.rota import Rota
from diloco.exchange.state import whole_digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from diloco.exchange.allreduce import Outcome
    from diloco.exchange.clock import Clock
    from diloco.exchange.inner import Saved
    from diloco.exchange.layout import Member
    from diloco.exchange.records import Commit, RunRecord, RunResult, Vote
    from diloco.exchange.settings import ExchangeSettings
    from diloco.exchange.state import FragmentState, OuterStep
    from diloco.exchange.store import Store

logger = logging.getLogger(__name__)

RoundState = Literal["open", "closing", "committed"]
"""closing: so many of the others have their header there that they may be waiting for this replica alone."""

MOST_RESTARTS = 2
"""So many times in a row a catch-up may find its data pruned before it gives up."""


@dataclass
class Turn:
    """One round of one replica."""

    round: int
    fragment: int
    abstain: str | None = None
    weight: int = 1
    """Tokens, else inner steps, behind the pseudo-gradient: as they were when it was taken, not when it is sent."""
    not_finite: bool = False
    outcome: Outcome | None = None
    """None if the replica is lost."""

    @property
    def averaged(self) -> bool:
        """Whether there is a mean to apply."""
        return self.outcome is not None and self.outcome.averaged


class Replica:
    """One member of one run.

    Args:
        context: store, clock, member and run.
        states: the fragments' global state; live, changed by :meth:`enter`, by a catch-up, and by whoever applies a
            mean.
        step: the outer step, for replays.
        digest: starts to digest a fragment and returns what can be awaited, any number of times.
    """

    def __init__(
        self,
        context: Context,
        states: Sequence[FragmentState],
        step: OuterStep,
        digest: Callable[[FragmentState], Awaitable[str]],
    ) -> None:
        self.context = context
        self.states = states
        self.round = 0
        """The round that comes next."""
        self._step = step
        self._digest = digest
        self._digests: list[Awaitable[str]] = []
        self._allreduce = ObjectStoreAllReduce(context)
        self._rota = Rota(context.settings.checkpoint_every, context.run.rounds)
        self._lost = False
        self._reloaded = False
        """Whether its state comes from a checkpoint, with no round applied since but those replayed."""

    @classmethod
    async def enter(
        cls,
        store: Store,
        clock: Clock,
        member: Member,
        settings: ExchangeSettings,
        run: RunRecord,
        states: Sequence[FragmentState],
        step: OuterStep,
        digest: Callable[[FragmentState], Awaitable[str]],
        *,
        jitter: random.Random | None = None,
    ) -> Replica:
        """Agree on run.json and on the initial state, and catch up, before the first inner step.

        `jitter` spreads polls; None: a seed of its own. Raises RunMismatchError when the run was made with other
        settings or another model.
        """
        largest = max(state.numel for state in states)
        agreed = await algorithm.agree(store, clock, run, settings.reduce, largest)
        context = Context(store, clock, member, settings, agreed, jitter or random.Random())
        replica = cls(context, states, step, digest)
        await checkpoint.agree_on_initial(replica.context, states)
        await replica._catch_up(from_checkpoint=True)
        return replica

    # ---- a round

    async def is_committed(self, round_: int) -> bool:
        """Whether a round has its record."""
        return await checkpoint.read_commit(self.context.store, round_) is not None

    async def round_state(self) -> RoundState:
        """Where the others are in the round that comes next: for a replica that is behind them."""
        run = self.context.run
        if self.round >= run.rounds:
            return "open"
        if await self.is_committed(self.round):
            return "committed"
        found = [layout.parse_member(entry.key) for entry in await self.context.store.list(layout.headers(self.round))]
        others = {member.rank for member in found if member is not None} - {self.context.member.rank}
        needed = run.world_size if run.policy == "strict" else run.min_replicas
        return "closing" if len(others) >= max(needed - 1, 1) else "open"

    async def catch_up(self) -> None:
        """Go on from the newest committed round. Between two rounds or in the midst of one, before its pseudo-gradient
        is taken: then nothing of the round has begun, and this replica contributes to the next one as usual.
        """
        await self._catch_up(from_checkpoint=self._lost)

    async def quorum(self, committed: bool | None = None) -> Turn | None:
        """Before a pseudo-gradient is taken: the turn that begins, or None past the last round.

        If the round was committed without this replica (`committed`, when the caller has asked already) it catches up
        first: then :attr:`states` have changed, and the turn is to abstain.
        """
        if self.round >= self.context.run.rounds:
            return None
        abstain = None
        if self._lost or (await self.is_committed(self.round) if committed is None else committed):
            await self.catch_up()
            abstain = rounds.CAUGHT_UP
        if self.round >= self.context.run.rounds:
            return None
        return Turn(self.round, self.round % self.context.run.fragments, abstain)

    async def exchange(self, turn: Turn, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Contribute `tensors` (fp32, in payload order), or abstain; settle the round, with the mean in `out`.

        Sets the turn's outcome, which stays None if this replica turns out to be lost.
        """
        turn.outcome = None
        state = self.states[turn.fragment]
        base = await self._digests[turn.fragment]
        fragment = Fragment(turn.fragment, state.numel, state.layout, base)
        if turn.abstain is not None:
            await self._allreduce.abstain(turn.round, fragment, turn.abstain)
        else:
            turn.not_finite = (
                await self._allreduce.contribute(turn.round, fragment, tensors, weight=turn.weight) is not None
            )
        try:
            turn.outcome = await self._allreduce.settle(turn.round, fragment, out)
        except (CorruptRoundError, DivergedError, ObjectMissingError) as problem:
            self._lose(turn, problem)

    def _lose(self, turn: Turn, problem: CorruptRoundError | DivergedError | ObjectMissingError) -> None:
        if isinstance(problem, DivergedError) and self._reloaded:
            # It has caught up from a checkpoint, and still differs: it would go on doing so.
            raise problem
        if isinstance(problem, CorruptRoundError) and self.context.run.policy == "strict":
            raise problem
        logger.warning("%s: round %d is not applied: %s", self.context.member, turn.round, problem)
        self._lost = True

    def applied(self, turn: Turn) -> checkpoint.Snapshot | None:
        """Note that a turn is over: its mean, if there is one, is in :attr:`states` now.

        Returns a copy of the state if it falls to this replica to write the checkpoint before the next round; give it
        to :meth:`write`. Must be called before anything changes the states again.
        """
        if turn.outcome is None:
            return None
        commit = turn.outcome.commit
        self._reloaded = False
        if turn.averaged:
            state = self.states[turn.fragment]
            state.last_round = turn.round
            self._digests[turn.fragment] = self._digest(state)
        self.round = turn.round + 1
        if self._rota.writer(commit) != self.context.member:
            return None
        return self._snapshot()

    def _replayed(self, commit: Commit) -> None:
        self._allreduce.note(commit)
        self._rota.writer(commit)

    def _snapshot(self) -> checkpoint.Snapshot:
        return checkpoint.Snapshot(self.round, [state.copy() for state in self.states], list(self._digests))

    async def write(self, snapshot: checkpoint.Snapshot) -> None:
        """Write a checkpoint, then prune what two newer confirmed ones make unnecessary. Runs beside the rounds."""
        await checkpoint.write_snapshot(self.context, snapshot)
        await pruning.prune(self.context)

    def feedback(self) -> dict[str, torch.Tensor]:
        """A copy of what its codec carries over to the next rounds, between two rounds: for its own next attempt."""
        return self._allreduce.feedback.state()

    def load_feedback(self, saved: Saved) -> None:
        """Take over what an earlier attempt saved, as far as it still holds at :attr:`round`."""
        since = {round_ % self.context.run.fragments for round_ in range(saved.round, self.round)}
        self._allreduce.feedback.load(saved.tensors, unchanged=set(range(len(self.states))) - since)

    async def digest(self, fragment: int) -> str:
        """Digest of a fragment as it was applied last."""
        return await self._digests[fragment]

    async def _catch_up(self, *, from_checkpoint: bool) -> None:
        """Bring :attr:`states` to the newest committed round. From its own state where the data is still there.

        If a round on the way is corrupt, those who averaged it in time will write a checkpoint beyond it: it waits for
        that. Under `strict` none can come, since every round needs this replica.
        """
        restarts, beyond = 0, -1
        for digest in self._digests:
            await digest  # nobody may read the states while they change
        while True:
            try:
                if from_checkpoint:
                    self.round = await checkpoint.load_newest(self.context, self.states, beyond=beyond)
                self.round = await checkpoint.replay(
                    self.context,
                    self.states,
                    self.round,
                    self._step,
                    on_commit=self._replayed,
                )
                break
            except CorruptRoundError as problem:
                if self.context.run.policy == "strict":
                    raise
                logger.warning("%s: %s", self.context.member, problem)
                beyond = problem.round
            except ObjectMissingError as problem:
                restarts += from_checkpoint
                if restarts > MOST_RESTARTS:
                    raise ObjectMissingError(
                        f"{self.context.member}: its catch-up was overtaken {restarts} times by the pruning of old "
                        f"rounds ({problem}): raise --checkpoint-every, so that loading a checkpoint and replaying "
                        "that many rounds is faster than training them"
                    ) from problem
            except DivergedError:
                if from_checkpoint:
                    raise
            from_checkpoint = True
        self._allreduce.feedback.forget_all()
        self._lost = False
        self._reloaded = from_checkpoint
        self._digests = [self._digest(state) for state in self.states]

    # ---- the end

    async def vote(self, digest: str) -> RunResult | list[Vote]:
        """Vote for the final state, by :meth:`final_digest`, and wait: for the result, or for the votes on which this
        replica is to write it.
        """
        await ending.vote(self.context, digest)
        return await ending.await_result(self.context, digest)

    async def final_digest(self) -> str:
        """One digest of all fragments as they are now, not as they were when they were applied."""
        return whole_digest([await self._digest(state) for state in self.states])
