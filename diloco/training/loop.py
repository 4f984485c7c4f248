"""The inner loop of a replica, and the pieces of it that the data-parallel baseline shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from diloco.errors import ConfigurationError
from diloco.training.config import TrainConfig
from diloco.training.data import TrainingData, load_tokens
from diloco.training.models import build_model, load_tokenizer, save_model, split_into_fragments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from diloco.manager import ObjectStoreManager


def diloco_train(
    *,
    manager: ObjectStoreManager,
    rank: int,
    world_size: int,
    steps: int,
    sync_every: int,
    fragments: int = 1,
    sync_delay: int = 0,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train one replica of a causal language model; the default `trainer_fn`.

    Args: manager: This replica's connection to the others. rank: Which replica this is, from 0; at or above
    `world_size` for one that joins late. world_size: Replicas of the run. steps: Inner steps of the whole run.
    sync_every: Inner steps between two exchanges of the whole model. fragments: Parts of the model that are exchanged
    in turn. sync_delay: Inner steps between sending a fragment and applying its mean. seed: Of new parameters and of
    the data order. kwargs: :class:`~diloco.training.config.TrainConfig`'s fields.

    Returns: JSON values: `initial_eval_loss` (None if this process resumed), `final_eval_loss` and `final_train_loss`
    in nats per token, and `eval_tokens`, how many predicted tokens an evaluation is over.

    Raises: ConfigurationError: The settings, the model or the data can't work. DilocoError: What the outer loop
    raises.
    """
    from diloco.outer import make_diloco_outer_loop

    config = TrainConfig.from_kwargs(kwargs)
    job = prepare(config, world_size=world_size, steps=steps, seed=seed)
    initial_eval_loss = train_loss = None
    outer = make_diloco_outer_loop(
        manager,
        split_into_fragments(job.model, fragments),
        job.optimizer,
        steps=steps,
        sync_every=sync_every,
        fragment_sync_delay=sync_delay,
        fragment_update_alpha=config.fragment_update_alpha,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        nesterov=config.nesterov,
        save=lambda folder: save_model(job.model, job.tokenizer, folder),
    )
    with outer:
        for step in outer.steps():
            if step == 0:
                initial_eval_loss = job.evaluate()
                outer.report_evaluation(initial_eval_loss)
            batch = job.data.batch(step, rank)
            loss = job.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            train_loss = loss.item()
            outer.report(loss=train_loss, tokens=predicted(batch))
            job.optimizer_step(step)
    outer.finish()
    final_eval_loss = job.evaluate()
    outer.report_evaluation(final_eval_loss)
    return {
        "initial_eval_loss": initial_eval_loss,
        "final_eval_loss": final_eval_loss,
        "final_train_loss": train_loss,
        "eval_tokens": job.eval_tokens,
    }


@dataclass(frozen=True)
class Job:
    """A model with what trains and evaluates it."""

    config: TrainConfig
    steps: int
    device: torch.device
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    data: TrainingData
    optimizer: torch.optim.AdamW

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of int64 tokens `[rows, length + 1]`, in nats per predicted token: float32, a scalar."""
        tokens = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def optimizer_step(self, step: int) -> None:
        """Clip the gradients, take global step `step` at its learning rate, and leave no gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss in nats per token; the same text for every replica, seed and step."""
        self.model.eval()  # type: ignore[no-untyped-call]
        total = torch.zeros((), device=self.device)
        for batch in self.data.held_out(self.config.eval_batches):
            total += self.loss(batch) * predicted(batch)
        self.model.train()
        return total.item() / self.eval_tokens

    @property
    def eval_tokens(self) -> int:
        """Predicted tokens of an evaluation."""
        return sum(predicted(batch) for batch in self.data.held_out(self.config.eval_batches))


def prepare(config: TrainConfig, *, world_size: int, steps: int, seed: int) -> Job:
    """Load model and data, and make the inner optimizer.

    Raises :class:`ConfigurationError` for a model, data or device that can't be used.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    model = build_model(config, seed=seed)
    model.to(device)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(config, vocab_size=model.config.get_text_config().vocab_size)
    data = TrainingData(load_tokens(config, tokenizer), config, world_size=world_size, seed=seed)
    return Job(config, steps, device, model, tokenizer, data, make_optimizer(config, model))


def choose_device(name: str) -> torch.device:
    """Return the torch device of a config's `device`; :class:`ConfigurationError` if this machine has none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise ConfigurationError(f"device {name!r} can't be used here ({reason}); use auto, cpu or cuda") from None
    return device


def make_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with decay of those that have two dimensions or more."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2))


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Warm up linearly, then follow a cosine down to `min_lr_ratio` of the peak at the last of `steps` steps."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def predicted(batch: torch.Tensor) -> int:
    """How many tokens of a batch `[rows, length + 1]` are predicted."""
    return batch.shape[0] * (batch.shape[1] - 1)
