"""The outer loop: torchft's DiLoCo on our manager, and the few calls a trainer makes.

    outer = make_diloco_outer_loop(manager, fragments, inner_optimizer, steps=200, sync_every=25, save=save_model)
    with outer:
        for step in outer.steps():
            loss = …
            loss.backward()
            outer.report(loss=float(loss), tokens=batch.numel())
            inner_optimizer.step()
            inner_optimizer.zero_grad()
    outer.finish()

Algorithm: DiLoCo (https://arxiv.org/abs/2311.08105) and Streaming DiLoCo (https://arxiv.org/abs/2501.18512), as
implemented by torchft 0.2.0.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torchft.local_sgd import USE_BUCKETIZATION_ENV, DiLoCo

from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange.formats import codec
from diloco.exchange.records import RunRecord
from diloco.exchange.state import FragmentState, OuterStep
from diloco.fragments import fragment_model
from diloco.inner_optimizer import copy_state, load_state
from diloco.manager import Attached
from diloco.metrics import MetricLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from torch import nn

    from diloco.exchange.records import RunResult
    from diloco.fragments import FragmentedModel, TrainedFragment
    from diloco.manager import ObjectStoreManager

logger = logging.getLogger(__name__)

MODEL_FOLDER_VARIABLE = "DILOCO_MODEL_DIR"
"""Names a folder of this machine where a replica leaves the trained model as it holds it."""

STREAMING_ALPHA = 0.5
"""Share of the local parameters that a delayed sync keeps by default (Streaming DiLoCo's alpha): with 0 the delay's
inner steps are lost.
"""

MOST_IDLE_STEPS = 1000
"""So many yields of one step without an optimizer step mean that the trainer has forgotten it (a gradient scaler may
skip a few).
"""


class OuterSGD(torch.optim.Optimizer):
    """The outer optimizer: SGD with momentum as single correctly rounded operations, on momenta that exist from the
    start.

    Args:
        parameters: fp32 parameters of one fragment.
        step: learning rate, momentum, Nesterov or not.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], step: OuterStep) -> None:
        super().__init__(parameters, {"lr": step.lr, "momentum": step.momentum})
        self._step = step
        for group in self.param_groups:
            for parameter in group["params"]:
                # torch's SGD clones the first gradient instead, which keeps −0.0 where a replay has 0.0.
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure can be evaluated again here
        """Apply each parameter's `.grad`, the mean pseudo-gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter.data, self.state[parameter]["momentum_buffer"], parameter.grad)


class OuterLoop:
    """A model that trains as one replica of a run. Made by :func:`make_diloco_outer_loop`."""

    def __init__(
        self,
        manager: ObjectStoreManager,
        diloco: Any,
        steps: int,
        save: Callable[[Path], None] | None,
    ) -> None:
        self._manager = manager
        self._diloco = diloco
        self._steps = steps
        self._save = save
        self._metrics = MetricLog()

    def __enter__(self) -> Self:
        self._diloco.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._diloco.__exit__(kind, problem, trace)

    def steps(self) -> Iterator[int]:
        """The global inner step to make next, until the last: starts where the run is, and jumps after a catch-up or
        where this replica is behind the others.

        Data order and learning rate must be functions of it. Raises DilocoError if the inner optimizer is not stepped.
        """
        idle, before = 0, -1
        while True:
            self._manager.after_apply()
            local_step = self._manager.align()
            if local_step is not None:
                self._diloco._local_step = local_step
            step = self._manager.inner_step
            if step >= self._steps:
                return
            idle, before = (idle + 1, step) if step == before else (0, step)
            if idle > MOST_IDLE_STEPS:
                raise DilocoError(
                    f"inner step {step} does not end: call inner_optimizer.step() inside `with outer:` once a step"
                )
            yield step

    def report(self, *, loss: float | None = None, tokens: int = 0) -> None:
        """Tell the training loss (nats a token) and the tokens of the step that is about to be made; tokens weigh the
        contribution.
        """
        self._manager.report(loss=loss, tokens=tokens)
        self._metrics.step(self._manager.inner_step, loss, tokens)

    def report_evaluation(self, loss: float) -> None:
        """Tell the held-out loss (nats a token) of the parameters as they are at a round's beginning, or after
        :meth:`finish`.
        """
        self._manager.report_evaluation(loss)
        self._metrics.evaluation(loss)

    def finish(self) -> RunResult:
        """Set every parameter to its global value, agree with the others on the result, and have one replica save the
        model. Where the environment names a folder (:data:`MODEL_FOLDER_VARIABLE`), this one saves its own there, too.
        """
        result = self._manager.finish(self._save)
        folder = os.environ.get(MODEL_FOLDER_VARIABLE)
        if folder and self._save is not None:
            self._save(Path(folder))
        return result


def make_diloco_outer_loop(
    manager: ObjectStoreManager,
    model_fragments: Sequence[nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    sync_every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float | None = None,
    backup_device: torch.device | None = None,
    save: Callable[[Path], None] | None = None,
) -> OuterLoop:
    """Attach a model to a run: agree with the other replicas on it, take over the run's parameters, and return the
    loop.

    Args:
        manager: this replica's place in the run.
        model_fragments: modules that together hold every trained parameter (fp32) once; synced in turn, `sync_every /
            fragments` steps apart.
        inner_optimizer: trains those parameters; its `step` drives the rounds.
        steps: inner steps of the whole run, a multiple of `sync_every`.
        sync_every: inner steps after which every fragment has been synced once (H).
        outer_lr, outer_momentum, nesterov: the outer SGD.
        fragment_sync_delay: inner steps between taking a pseudo-gradient and applying the mean, to overlap exchange
            and training.
        fragment_update_alpha: how much of the local parameters a sync keeps, 0…1; None: 0 without delay, else 0.5.
        backup_device: where torchft keeps the global parameters; None: the CPU.
        save: writes the trained model into the folder it is given; called on one replica after the last round.

    Raises ConfigurationError for settings that can't work, and RunMismatchError when the run was made with others.
    """
    schedule = Schedule(steps, sync_every, len(model_fragments), fragment_sync_delay)
    schedule.check()
    alpha = fragment_update_alpha
    if alpha is None:
        alpha = STREAMING_ALPHA if fragment_sync_delay else 0.0
    elif not 0.0 <= alpha <= 1.0:
        raise ConfigurationError(f"fragment_update_alpha is {alpha}: it must be between 0 and 1")
    elif alpha == 0.0 and fragment_sync_delay:
        logger.warning(
            "fragment_update_alpha 0 with a delay of %d: the inner steps made during the delay are thrown away",
            fragment_sync_delay,
        )
    model = fragment_model(model_fragments, inner_optimizer)
    step = OuterStep(outer_lr, outer_momentum, nesterov)
    optimizers = [OuterSGD([p for _, p in fragment.named_parameters()], step) for fragment in model.fragments]
    diloco = DiLoCo(
        manager,
        model.fragments,
        inner_optimizer,
        optimizers,
        sync_every,
        backup_device=backup_device,
        use_bucketization=False,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=alpha,
    )
    states = [
        _live_state(index, fragment, diloco, optimizer)
        for index, (fragment, optimizer) in enumerate(zip(model.fragments, optimizers, strict=True))
    ]
    manager.attach(
        Attached(
            run=_run_record(manager, schedule, step, model, states),
            states=states,
            call_order=[[name for name, _ in fragment.named_parameters()] for fragment in model.fragments],
            step=step,
            prepare_step=schedule.prepare_step,
            copy_inner=lambda: copy_state(inner_optimizer),
            load_inner=lambda tensors: load_state(inner_optimizer, tensors),
            load_globals=lambda: _load_globals(model, states),
            reset_inner=inner_optimizer.state.clear,
            check_buffers=model.check_buffers,
        )
    )
    return OuterLoop(manager, diloco, steps, save)


@dataclass(frozen=True)
class Schedule:
    """When what is synced: inner steps of the run, of a sync of all fragments (H), and of the delay."""

    steps: int
    sync_every: int
    fragments: int
    delay: int

    @property
    def interval(self) -> int:
        """Inner steps of a round, which syncs one fragment."""
        return self.sync_every // self.fragments

    @property
    def rounds(self) -> int:
        """Rounds of the run (R)."""
        return self.steps // self.interval

    @property
    def prepare_step(self) -> int:
        """The inner step of a round, from 1, after which the pseudo-gradient is taken."""
        return self.interval - self.delay

    def check(self) -> None:
        """Raise ConfigurationError for what torchft would refuse or lose tensors by."""
        if os.environ.get(USE_BUCKETIZATION_ENV) == "True":
            raise ConfigurationError(
                f"{USE_BUCKETIZATION_ENV} is set: torchft 0.2.0 loses tensors with it; unset it (the exchange "
                "coalesces by itself)"
            )
        if self.fragments < 1:
            raise ConfigurationError("model_fragments is empty: give at least one module")
        if self.sync_every < 1 or self.steps < self.sync_every or self.steps % self.sync_every:
            raise ConfigurationError(f"steps is {self.steps}: it must be a multiple of sync_every ({self.sync_every})")
        if self.sync_every % self.fragments:
            raise ConfigurationError(
                f"sync_every is {self.sync_every}: it must be a multiple of the {self.fragments} fragments"
            )
        if not 0 <= self.delay < self.interval:
            raise ConfigurationError(
                f"fragment_sync_delay is {self.delay}: it must be from 0 to {self.interval - 1}, below sync_every / "
                "fragments, since one fragment is in flight at a time"
            )


def _live_state(index: int, fragment: TrainedFragment, diloco: Any, optimizer: OuterSGD) -> FragmentState:
    """The backups of torchft and the outer optimizer's momenta themselves, as the exchange sees them."""
    momenta = {name: optimizer.state[p]["momentum_buffer"] for name, p in fragment.named_parameters()}
    return FragmentState(index, diloco._fragments[index].original_parameters, momenta)


@torch.no_grad()
def _load_globals(model: FragmentedModel, states: list[FragmentState]) -> None:
    for fragment, state in zip(model.fragments, states, strict=True):
        for name, parameter in fragment.named_parameters():
            parameter.data.copy_(state.parameters[name])


def _run_record(
    manager: ObjectStoreManager,
    schedule: Schedule,
    step: OuterStep,
    model: FragmentedModel,
    states: list[FragmentState],
) -> RunRecord:
    settings, world_size = manager.presence.settings, manager.presence.world_size
    wire = codec(settings.codec)
    return RunRecord(
        run_id=manager.presence.store.uri.rsplit("/", 1)[-1],
        world_size=world_size,
        rounds=schedule.rounds,
        fragments=schedule.fragments,
        sync_every=schedule.sync_every,
        codec=settings.codec,
        mean_codec=settings.mean_codec,
        policy=settings.policy,
        min_replicas=settings.majority(world_size),
        outer_lr=step.lr,
        outer_momentum=step.momentum,
        nesterov=step.nesterov,
        chunk_bytes=chunk_bytes(wire.body_bytes(max(state.numel for state in states)), world_size),
        parameters=model.shapes,
        constants=model.constants,
    )


def chunk_bytes(payload_bytes: int, world_size: int) -> int:
    """Bytes of a chunk: the largest power of two up to 8 MiB that gives at least 16 chunks a replica, and at least 64
    KiB.
    """
    size = 8 * 2**20
    while size > 64 * 2**10 and payload_bytes // size < 16 * world_size:
        size //= 2
    return size
