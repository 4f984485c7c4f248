"""What torchft's DiLoCo calls a Manager, with the object store behind it: the only adapter between torchft and the
exchange.

torchft 0.2.0 calls, once a round: `start_quorum`, then `allreduce` for each parameter of the fragment, later (after
`fragment_sync_delay` inner steps) `wait` on each Work and `should_commit`. The last `allreduce` of a fragment
completes the round's payload and starts the exchange on a background thread; `wait` blocks until the mean is in the
tensors. `current_step` is the round: it moves in `should_commit` only, since torchft picks the fragment from it at
both ends of a round.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, CorruptObjectError, DilocoError, StoreError
from diloco.exchange import ending, inner
from diloco.exchange.feedback import is_feedback
from diloco.exchange.replica import Replica, Turn
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import open_store
from diloco.follower import Follower
from diloco.presence import Presence
from diloco.progress import finite
from diloco.transfer import HostCopies
from diloco.work import InBackground, RoundWork, synchronize

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Future

    import torch

    from diloco.exchange.checkpoint import Snapshot
    from diloco.exchange.clock import Clock
    from diloco.exchange.records import Commit, RunRecord, RunResult
    from diloco.exchange.state import FragmentState, OuterStep
    from diloco.exchange.store import Store
    from diloco.transfer import HostCopy

logger = logging.getLogger(__name__)


@dataclass
class Attached:
    """The model as the manager sees it; made by :func:`diloco.outer.make_diloco_outer_loop`."""

    run: RunRecord
    states: Sequence[FragmentState]
    """Live: torchft's backups and the outer optimizers' momenta themselves."""
    call_order: Sequence[Sequence[str]]
    """Of each fragment, its parameters' names in the order in which torchft calls `allreduce`."""
    step: OuterStep
    prepare_step: int
    """The inner step of a round after which its pseudo-gradient is taken, from 1."""
    copy_inner: Callable[[], dict[str, torch.Tensor]]
    """Copy the inner optimizer's state."""
    load_inner: Callable[[dict[str, torch.Tensor]], object]
    """Take over such a copy."""
    load_globals: Callable[[], None]
    """Set every parameter to its global value."""
    reset_inner: Callable[[], None]
    """Forget the inner optimizer's state."""
    check_buffers: Callable[[], None]
    """Raise ConfigurationError if a buffer has changed that replicas must share."""


@dataclass
class _Round:
    """The round in flight, as torchft hands it over tensor by tensor."""

    turn: Turn
    tensors: list[torch.Tensor] = field(default_factory=list)
    future: Future[None] | None = None


class ObjectStoreManager:
    """One replica's place in a run. Threads exist only here; everything below is coroutines.

    Args:
        rendezvous_uri: the run's own prefix, `s3://bucket/parent/<run id>` or `file:///folder/<run id>`.
        rank: this replica's rank, from 0.
        world_size: how many replicas the run has.
        settings: how the run exchanges.
        store: used instead of opening `rendezvous_uri` (tests, benchmarks).
        clock: used instead of the machine's.
        launcher: the launcher's nonce, noted in the claim for information.
    """

    _use_async_quorum = False  # torchft's DiLoCo refuses a manager that has it
    _follower: Follower  # once a model is attached

    def __init__(
        self,
        rendezvous_uri: str,
        *,
        rank: int,
        world_size: int,
        settings: ExchangeSettings | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
        launcher: str | None = None,
    ) -> None:
        self.presence = Presence(
            rendezvous_uri,
            rank=rank,
            world_size=world_size,
            settings=settings or ExchangeSettings(),
            store=store,
            clock=clock,
            launcher=launcher,
        )
        self.progress = self.presence.progress
        self._model: Attached | None = None
        self._replica: Replica | None = None
        self._local_step = 0
        self._finished = False
        self._round: _Round | None = None
        self._head: Future[bool] | None = None
        self._over: Turn | None = None
        """The turn whose outcome torchft is applying."""
        self._tokens: list[int] = []
        self._steps: list[int] = []
        self._writing: Future[None] | None = None
        self._copies = HostCopies()

    @property
    def run(self) -> RunRecord:
        """What the run agreed on. RuntimeError before a model is attached."""
        return self._attached().run

    # ---- joining

    def start(self) -> None:
        """Join the run's members; see :meth:`diloco.presence.Presence.start`."""
        self.presence.start()

    def attach(self, model: Attached) -> None:
        """Agree on run.json, take over the run's state (checkpoint and committed rounds), and get ready to train.

        Raises RunMismatchError when the run was made with other settings or another model.
        """
        self.presence.start()
        self._model = model
        synchronize()
        inner = self.presence.call(self._enter(model))
        self._take_over_globals()
        if inner is not None:
            model.load_inner(inner)
        self.progress.start_training()

    async def _enter(self, model: Attached) -> dict[str, torch.Tensor] | None:
        presence = self.presence
        self._replica = await Replica.enter(
            presence.store,
            presence.clock,
            presence.member,
            presence.settings,
            model.run,
            model.states,
            model.step,
            self._start_digest,
        )
        presence.context = self._replica.context
        self._follower = Follower(presence, self._replica)
        model.run = self._replica.context.run
        saved = await inner.load(self._replica.context, self._replica.round)
        if saved is None:
            return None
        self._replica.load_feedback(saved)
        return {name: tensor for name, tensor in saved.tensors.items() if not is_feedback(name)}

    # ---- what torchft's DiLoCo calls

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Nothing to do: the attached states are torchft's own tensors."""

    def disallow_state_dict_read(self) -> None:
        """Before each inner step."""
        self.after_apply()
        replica = self._in_run()
        if self._local_step + 1 == self._attached().prepare_step and replica.round < self.run.rounds:
            # Asked while the inner step runs, so that start_quorum finds the answer.
            self._head = self.presence.background.submit(replica.is_committed(replica.round))

    def allow_state_dict_read(self) -> None:
        """After each inner step."""
        self._local_step += 1
        for fragment in range(len(self._steps)):
            self._steps[fragment] += 1
        self._note_step()

    def start_quorum(self) -> None:
        """Before a pseudo-gradient is taken: catch up if its round was committed without this replica, which then
        abstains.
        """
        model, replica = self._attached(), self._in_run()
        model.check_buffers()
        head, self._head = self._head, None
        self._follower.stop()
        turn = self.presence.call(replica.quorum(self.presence.wait(head) if head is not None else None))
        self._round = _Round(turn) if turn is not None else None
        if turn is None or turn.abstain is not None:
            self._take_over_globals()

    def current_step(self) -> int:
        """The round: constant between its `start_quorum` and its `should_commit`."""
        return self._in_run().round

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> RoundWork:
        """Average one parameter's pseudo-gradient (fp32, any shape) in place; returns before any peer has answered."""
        if should_quantize:
            raise ConfigurationError("should_quantize is torchft's own wire format: choose the exchange's with --codec")
        round_ = self._round
        if round_ is None:
            return RoundWork(lambda: None, lambda: True)
        round_.tensors.append(tensor)
        fragment = round_.turn.fragment
        if len(round_.tensors) == len(self._attached().call_order[fragment]):
            round_.turn.weight = max(self._tokens[fragment] or self._steps[fragment], 1)
            by_name = dict(zip(self._attached().call_order[fragment], round_.tensors, strict=True))
            tensors = [by_name[name] for name in self._attached().states[fragment].names]
            copy = self._copies.begin(fragment, tensors)
            round_.future = self.presence.background.submit(self._exchange(round_.turn, copy))
        return RoundWork(lambda: self._settle(round_), lambda: round_.future is not None and round_.future.done())

    def _settle(self, round_: _Round) -> None:
        if round_.future is None:
            raise RuntimeError(f"round {round_.turn.round}: torchft waits for a payload of which tensors are missing")
        self.presence.wait(round_.future)

    async def _exchange(self, turn: Turn, copy: HostCopy) -> None:
        await asyncio.to_thread(copy.wait)
        await self._in_run().exchange(turn, copy.tensors, copy.tensors)
        if turn.averaged:
            await asyncio.to_thread(copy.put_back)

    def should_commit(self) -> bool:
        """Whether torchft applies the mean: not past the last round, when nobody contributed, or when this replica is
        lost.
        """
        round_, self._round = self._round, None
        self._local_step = 0
        if round_ is None:
            return False
        self._settle(round_)
        self._over = round_.turn
        self._tokens[round_.turn.fragment] = 0
        self._steps[round_.turn.fragment] = 0
        return round_.turn.averaged

    def after_apply(self) -> None:
        """Once torchft has applied a round, and before anything else happens: digest, checkpoint, recover from NaN."""
        turn, self._over = self._over, None
        if turn is None:
            return
        model, replica = self._attached(), self._in_run()
        synchronize()
        snapshot = replica.applied(turn)
        self._follower.settled(turn)
        self._note_step()
        if turn.outcome is not None:
            self.progress.rounds_applied += turn.averaged
            _log(turn, turn.outcome.commit)
        if turn.not_finite:
            # The other fragments are poisoned too, and so are the inner optimizer's moments.
            model.load_globals()
            model.reset_inner()
            self._forget_work()
        if turn.outcome is not None:
            own = replica.round % self.presence.settings.checkpoint_every == 0 and replica.round < self.run.rounds
            if own or snapshot is not None:
                self._save(snapshot, (model.copy_inner() | replica.feedback()) if own else {})

    def _save(self, snapshot: Snapshot | None, state: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint and this replica's own state in the background; one such writing at a time."""
        if self._writing is not None and not self._writing.done():
            logger.warning(
                "round %d: the last checkpoint is still being written; this one is left out", self._in_run().round
            )
            return
        self._writing = self.presence.background.watch(self._write(snapshot, state, self._in_run().round))

    async def _write(self, snapshot: Snapshot | None, state: dict[str, torch.Tensor], round_: int) -> None:
        replica = self._in_run()
        try:
            if state:
                await inner.save(replica.context, round_, state)
            if snapshot is not None:
                await replica.write(snapshot)
        except (StoreError, CorruptObjectError) as problem:
            # The run goes on: the next checkpoint is another chance, and the ones before it are whole.
            logger.warning("%s: checkpoint %d was not written: %s", replica.context.member, round_, problem)

    def align(self) -> int | None:
        """Between two inner steps: the local step to go on from if this replica is behind the others, else None."""
        model, replica = self._attached(), self._in_run()
        if self._local_step + 1 >= model.prepare_step:
            return None
        found = self._follower.look(self._local_step / model.prepare_step)
        if found == "committed":
            self.presence.call(replica.catch_up())
            self._local_step = 0
            self._take_over_globals()
        elif found == "closing":
            self._local_step = model.prepare_step - 1
            self._note_step()
        else:
            return None
        return self._local_step

    # ---- what the trainer tells, and the end

    @property
    def inner_step(self) -> int:
        """The global inner step that comes next, from 0: a function of the round and the step within it."""
        run = self._attached().run
        interval = run.sync_every // run.fragments
        return min(self._in_run().round * interval + self._local_step, run.rounds * interval)

    def report(self, *, loss: float | None = None, tokens: int = 0) -> None:
        """Note one inner step's training loss (nats a token) and its tokens, before the optimizer's step; tokens
        weigh the contribution.
        """
        if tokens < 0:
            raise ConfigurationError(
                f"outer.report(tokens={tokens}): tokens weigh a contribution and can't be negative"
            )
        self.progress.loss = finite(loss)
        self.progress.tokens += int(tokens)
        for fragment in range(len(self._tokens)):
            self._tokens[fragment] += int(tokens)

    def report_evaluation(self, loss: float) -> None:
        """Note the held-out loss (nats a token) of the global parameters at this round's beginning."""
        self.presence.report_evaluation(self._in_run().round, loss)

    def finish(self, save: Callable[[Path], None] | None) -> RunResult:
        """Set every parameter to its global value, vote, and wait for the result; write the model if it falls to this
        replica.

        `save(folder)` writes the trained model into a fresh folder. Raises DilocoError when the run's rounds are not
        all done.
        """
        model, replica = self._attached(), self._in_run()
        self.after_apply()
        if replica.round < self.run.rounds:
            raise DilocoError(
                f"{self.presence.member}: finish() at inner step {self.inner_step}, in round {replica.round} of "
                f"{self.run.rounds}: train through all of outer.steps() first"
            )
        model.load_globals()
        self.progress.end_training()
        digest = self.presence.call(replica.final_digest())
        self.progress.final_digest = digest
        found = self.presence.call(replica.vote(digest))
        if not isinstance(found, list):
            self._finished = True
            return found
        with tempfile.TemporaryDirectory(prefix="diloco-model-") as folder:
            model_folder = Path(folder) if save is not None else None
            if save is not None:
                save(Path(folder))
            uri = self.presence.settings.output_uri
            output = open_store(uri) if uri is not None else None
            writing = ending.write_result(replica.context, digest, found, model_folder, output)
            written = self.presence.call(writing)
        self._finished = True
        return written

    def check_finished(self) -> None:
        """Raise DilocoError unless :meth:`finish` has seen the run's result: a replica must not end well before."""
        if self._finished:
            return
        if self._replica is None:
            raise DilocoError("the trainer returned without a model: call make_diloco_outer_loop, train, and finish()")
        last = self.run.rounds * self.run.sync_every // self.run.fragments
        raise DilocoError(
            f"the trainer returned at inner step {self.inner_step} of {last}: train through all of outer.steps(), then "
            "call outer.finish()"
        )

    def close(self, *, trainer: dict[str, Any] | None = None, problem: BaseException | None = None) -> None:
        """End: write what there is to report; see :meth:`diloco.presence.Presence.close`."""
        self.presence.close(trainer=trainer or {}, problem=problem)

    # ---- plumbing

    def _attached(self) -> Attached:
        if self._model is None:
            raise RuntimeError("no model is attached: call make_diloco_outer_loop first")
        return self._model

    def _in_run(self) -> Replica:
        if self._replica is None:
            raise RuntimeError("no model is attached: call make_diloco_outer_loop first")
        return self._replica

    def _take_over_globals(self) -> None:
        """Set all parameters to the global ones."""
        self._attached().load_globals()
        self._forget_work()
        self._note_step()

    def _forget_work(self) -> None:
        """All parameters are the global ones: nothing is behind any fragment's next contribution."""
        self._tokens = [0] * len(self._attached().states)
        self._steps = [0] * len(self._attached().states)

    def _note_step(self) -> None:
        self.progress.step, self.progress.round = self.inner_step, self._in_run().round

    def _start_digest(self, state: FragmentState) -> Awaitable[str]:
        future = self.presence.background.submit(asyncio.to_thread(state.digest))
        round_ = state.last_round  # it moves on before a callback may run
        future.add_done_callback(lambda done: self._note_digest(round_, done))
        return InBackground(future)

    def _note_digest(self, round_: int, done: Future[str]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.progress.note_applied(round_, done.result())


def _log(turn: Turn, commit: Commit) -> None:
    named = ", ".join(f"rank {out.rank} ({out.reason})" for out in commit.left_out)
    ranks = [participant.rank for participant in commit.participants]
    logger.info("round %d: averaged ranks %s%s", turn.round, ranks, f"; left out: {named}" if named else "")
