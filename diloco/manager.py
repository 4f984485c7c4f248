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

import torch
from torch.distributed.distributed_c10d import Work

from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange import checkpoint, ending, membership, rounds
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce, Outcome
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.state import whole_digest
from diloco.exchange.store import open_store
from diloco.presence import Presence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta
    from typing import TypeVar

    from diloco.exchange.clock import Clock
    from diloco.exchange.records import RunRecord, RunResult
    from diloco.exchange.state import FragmentState, OuterStep
    from diloco.exchange.store import Store

    T = TypeVar("T")

logger = logging.getLogger(__name__)


class RoundWork(Work):
    """The pending average of one tensor. All tensors of a round share one exchange."""

    def __init__(self, settle: Callable[[], object], done: Callable[[], bool]) -> None:
        super().__init__()
        self._settle = settle
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the exchange's own time-out names whom it waited for
        """Block until the mean is in the tensor. Raises what ended the round."""
        self._settle()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done()


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
    load_globals: Callable[[], None]
    """Set every parameter to its global value."""
    reset_inner: Callable[[], None]
    """Forget the inner optimizer's state."""
    check_buffers: Callable[[], None]
    """Raise ConfigurationError if a buffer has changed that replicas must share."""


@dataclass
class _Round:
    """The round in flight."""

    number: int
    fragment: int
    abstain: str | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    future: Future[Outcome] | None = None
    weight: int = 0
    """Tokens, else inner steps, behind the pseudo-gradient: as they were when it was taken, not when it is sent."""
    not_finite: bool = False


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
        self._allreduce: ObjectStoreAllReduce | None = None
        self._round_number = 0
        self._local_step = 0
        self._round: _Round | None = None
        self._head: Future[bool] | None = None
        self._applied: tuple[_Round, Outcome] | None = None
        self._tokens: list[int] = []
        self._steps: list[int] = []
        self._digests: list[Future[str]] = []

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
        self.presence.call(self._take_over(model))
        model.load_globals()
        self._tokens = [0] * len(model.states)
        self._steps = [0] * len(model.states)
        self._note_step()
        self.progress.start_training()

    async def _take_over(self, model: Attached) -> None:
        model.run = await membership.agree_on_run(self.presence.store, model.run)
        context = self.presence.enter(model.run)
        self._allreduce = ObjectStoreAllReduce(context)
        initial = await checkpoint.agree_on_initial(context, model.states)
        manifest = await checkpoint.newest_checkpoint(context) or initial
        await checkpoint.load_checkpoint(context, manifest, model.states)
        self._round_number = await checkpoint.replay(context, model.states, manifest.round, model.step)
        self._digests = [self._hash(state) for state in model.states]

    # ---- what torchft's DiLoCo calls

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Nothing to do: the attached states are torchft's own tensors."""

    def disallow_state_dict_read(self) -> None:
        """Before each inner step."""
        self.after_apply()
        model = self._attached()
        if self._local_step + 1 == model.prepare_step and self._round_number < model.run.rounds:
            # Asked while the inner step runs, so that start_quorum finds the answer.
            self._head = self.presence.background.submit(self._is_committed(self._round_number))

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
        model = self._attached()
        if self._round_number >= model.run.rounds:
            return
        model.check_buffers()
        head, self._head = self._head, None
        abstain = None
        if self.presence.wait(head or self.presence.background.submit(self._is_committed(self._round_number))):
            self.presence.call(self._catch_up())
            model.load_globals()
            self._note_step()
            abstain = rounds.CAUGHT_UP
        if self._round_number < model.run.rounds:
            self._round = _Round(self._round_number, self._round_number % model.run.fragments, abstain)

    async def _is_committed(self, round_: int) -> bool:
        return await checkpoint.read_commit(self.presence.store, round_) is not None

    async def _catch_up(self) -> None:
        model = self._attached()
        await asyncio.gather(*(asyncio.wrap_future(digest) for digest in self._digests))
        self._round_number = await checkpoint.replay(
            self._exchanger().context, model.states, self._round_number, model.step
        )
        self._digests = [self._hash(state) for state in model.states]
        self._tokens = [0] * len(model.states)
        self._steps = [0] * len(model.states)

    def current_step(self) -> int:
        """The round: constant between its `start_quorum` and its `should_commit`."""
        return self._round_number

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> RoundWork:
        """Average one parameter's pseudo-gradient (fp32, any shape) in place; returns before any peer has answered."""
        if should_quantize:
            raise ConfigurationError("should_quantize is torchft's own wire format: choose the exchange's with --codec")
        round_ = self._round
        if round_ is None:
            return RoundWork(lambda: None, lambda: True)
        round_.tensors.append(tensor)
        if len(round_.tensors) == len(self._attached().call_order[round_.fragment]):
            round_.weight = self._tokens[round_.fragment] or self._steps[round_.fragment]
            round_.future = self.presence.background.submit(self._exchange(round_))
        return RoundWork(lambda: self._settled(round_), lambda: round_.future is not None and round_.future.done())

    def _settled(self, round_: _Round) -> Outcome:
        if round_.future is None:
            raise RuntimeError(f"round {round_.number}: torchft waits for a payload of which tensors are missing")
        return self.presence.wait(round_.future)

    async def _exchange(self, round_: _Round) -> Outcome:
        allreduce = self._exchanger()
        state = self._attached().states[round_.fragment]
        base = await asyncio.wrap_future(self._digests[round_.fragment])
        self.progress.digest, self.progress.digest_round = base, state.last_round
        fragment = Fragment(round_.fragment, state.numel, state.layout, base)
        by_name = dict(zip(self._attached().call_order[round_.fragment], round_.tensors, strict=True))
        tensors = [by_name[name] for name in state.names]
        if round_.abstain is not None:
            await allreduce.abstain(round_.number, fragment, round_.abstain)
        else:
            reason = await allreduce.contribute(round_.number, fragment, tensors, weight=round_.weight)
            round_.not_finite = reason is not None
        # On the CPU the mean is added up in the gradients themselves; a GPU's get it in one copy.
        here = [tensor if _in_place(tensor) else torch.empty(tensor.shape, dtype=torch.float32) for tensor in tensors]
        outcome = await allreduce.settle(round_.number, fragment, here)
        for tensor, mean in zip(tensors, here, strict=True):
            if outcome.averaged and tensor is not mean:
                tensor.copy_(mean)
        return outcome

    def should_commit(self) -> bool:
        """Whether torchft applies the mean: not past the last round, nor when nobody contributed."""
        round_, self._round = self._round, None
        if round_ is None:
            return False
        outcome = self._settled(round_)
        self._applied = (round_, outcome)
        self._round_number += 1
        self._local_step = 0
        self._tokens[round_.fragment] = 0
        self._steps[round_.fragment] = 0
        self._note_step()
        return outcome.averaged

    def after_apply(self) -> None:
        """Once torchft has applied a round, and before anything else happens: digest the fragment; recover from NaN."""
        if self._applied is None:
            return
        (round_, outcome), self._applied = self._applied, None
        model = self._attached()
        if outcome.averaged:
            state = model.states[round_.fragment]
            state.last_round = round_.number
            self._digests[round_.fragment] = self._hash(state)
            self.progress.rounds_applied += 1
        named = ", ".join(f"rank {out.rank} ({out.reason})" for out in outcome.commit.left_out)
        logger.info(
            "round %d: averaged ranks %s%s",
            round_.number,
            [participant.rank for participant in outcome.commit.participants],
            f"; left out: {named}" if named else "",
        )
        if round_.not_finite:
            # The other fragments are poisoned too, and so are the inner optimizer's moments.
            model.load_globals()
            model.reset_inner()

    # ---- what the trainer tells, and the end

    @property
    def inner_step(self) -> int:
        """The global inner step that comes next, from 0: a function of the round and the step within it."""
        run = self._attached().run
        return self._round_number * (run.sync_every // run.fragments) + self._local_step

    def report(self, *, loss: float | None = None, tokens: int = 0) -> None:
        """Note one inner step's training loss (nats a token) and its tokens, before the optimizer's step; tokens
        weigh the contribution.
        """
        self.progress.loss = loss if loss is None or loss == loss else None
        self.progress.tokens += tokens
        for fragment in range(len(self._tokens)):
            self._tokens[fragment] += tokens

    def report_evaluation(self, loss: float) -> None:
        """Note the held-out loss (nats a token) of the global parameters at this round's beginning."""
        self.presence.report_evaluation(self._round_number, loss)

    def finish(self, save: Callable[[Path], None] | None) -> RunResult:
        """Set every parameter to its global value, vote, and wait for the result; write the model if it falls to this
        replica.

        `save(folder)` writes the trained model into a fresh folder. Raises DilocoError when the run's rounds are not
        all done.
        """
        model = self._attached()
        self.after_apply()
        if self._round_number < model.run.rounds:
            raise DilocoError(
                f"{self.presence.member}: finish() at inner step {self.inner_step}, in round {self._round_number} of "
                f"{model.run.rounds}: train through all of outer.steps() first"
            )
        model.load_globals()
        self.progress.end_training()
        digests = [self.presence.wait(digest) for digest in self._digests]
        digest = whole_digest(digests)
        self.progress.digest, self.progress.digest_round = digest, model.run.rounds
        context = self._exchanger().context
        self.presence.call(ending.vote(context, digest))
        found = self.presence.call(ending.await_result(context, digest))
        if not isinstance(found, list):
            return found
        with tempfile.TemporaryDirectory(prefix="diloco-model-") as folder:
            model_folder = Path(folder) if save is not None else None
            if save is not None:
                save(Path(folder))
            uri = self.presence.settings.output_uri
            output = open_store(uri) if uri is not None else None
            return self.presence.call(ending.write_result(context, digest, found, model_folder, output))

    def close(self, *, trainer: dict[str, Any] | None = None, problem: BaseException | None = None) -> None:
        """End: write what there is to report; see :meth:`diloco.presence.Presence.close`."""
        self.presence.close(trainer=trainer or {}, problem=problem)

    # ---- plumbing

    def _attached(self) -> Attached:
        if self._model is None:
            raise RuntimeError("no model is attached: call make_diloco_outer_loop first")
        return self._model

    def _exchanger(self) -> ObjectStoreAllReduce:
        if self._allreduce is None:
            raise RuntimeError("no model is attached: call make_diloco_outer_loop first")
        return self._allreduce

    def _note_step(self) -> None:
        self.progress.step, self.progress.round = self.inner_step, self._round_number

    def _hash(self, state: FragmentState) -> Future[str]:
        return self.presence.background.submit(asyncio.to_thread(state.digest))


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
