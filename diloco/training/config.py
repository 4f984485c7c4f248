"""Settings of the default trainer, and the checks a launcher makes before it starts anything.

Nothing here imports torch; transformers and the Hub's client load only for a model or data set that is not built in.
What a name in the settings refers to is decided here, once, so that the launcher and the replicas can't disagree.
"""

from __future__ import annotations

import difflib
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.errors import ConfigurationError
from diloco.training.sources import text_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

HUB_SECONDS = 4.0
"""How long the Hub may take to answer a check. A resolver without a network can block for far longer than any HTTP
time-out."""


@dataclass(frozen=True)
class Preset:
    """A byte-level Llama-style model: one token is one byte, so it needs no tokenizer and no download."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_positions: int = 2048


PRESETS = {
    "tiny": Preset(hidden_size=96, intermediate_size=192, layers=4, heads=3),  # 0.4 M parameters
    "small": Preset(hidden_size=512, intermediate_size=1408, layers=8, heads=8),  # 26 M parameters
}


BYTES = 256
"""Vocabulary of the byte-level models: token i is byte i."""
DOCUMENT_END = 0
"""The byte that ends a document for a byte-level model. Text has no NUL."""


class TrainConfig(BaseModel):
    """Settings of the default trainer; the same on every replica. Steps are inner steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(default="tiny", min_length=1)
    """A preset (`tiny`, `small`), a folder in Hugging Face format (with only a config.json: trained from scratch), or
    a Hub name."""
    data: str = Field(default="stdlib", min_length=1)
    """`stdlib` (Python's own source text), a text file, a folder, a glob, a folder made by `save_to_disk`, or a data
    set `NAME[:CONFIG]`."""
    text_field: str = "text"
    """Column that holds the text; data sets only."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences in one replica's step."""
    sequence_length: int = Field(default=128, ge=1)
    """Predicted tokens in a sequence (bytes, for a preset)."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak of AdamW's learning rate, after the warm-up; chosen for `tiny` in a few hundred steps."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a fraction of `learning_rate`."""
    beta2: float = Field(default=0.99, gt=0, lt=1)
    """AdamW's second moment; its first is 0.9."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decay of matrices; vectors (norms, biases) have none."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global L2 norm of a step's gradient."""
    eval_batches: int = Field(default=16, ge=1)
    """Batches of `batch_size` held-out sequences in an evaluation, or as many as there are."""
    device: str = "auto"
    """`auto` (the first CUDA GPU if there is one, else the CPU) or a torch device."""
    threads: int | None = Field(default=None, ge=1)
    """torch's CPU threads; None: left alone (OMP_NUM_THREADS decides)."""
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer SGD."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True
    fragment_update_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of the local parameters when a fragment's global ones arrive; None: the outer loop's default."""

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Self:
        """Build from a trainer's keyword arguments.

        Raises :class:`ConfigurationError` whose one line lists every argument that can't work.
        """
        try:
            return cls.model_validate(dict(kwargs))
        except ValidationError as problem:
            lines = [_explain(error["loc"], error["type"], error["msg"]) for error in problem.errors()]
            raise ConfigurationError("trainer settings: " + "; ".join(lines)) from None


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(str(part) for part in location)
    if kind != "extra_forbidden":
        return f"{name}: {message}"
    near = difflib.get_close_matches(name, TrainConfig.model_fields, n=1)
    return f"{name} is unknown" + (
        f" (did you mean {near[0]}?)" if near else f"; known are {', '.join(TrainConfig.model_fields)}"
    )


def preflight(
    config: TrainConfig, *, steps: int, sync_every: int, fragments: int, sync_delay: int, world_size: int = 1
) -> None:
    """Raise :class:`ConfigurationError` for what can be known to fail before a replica starts.

    Built-in models and local data need only the standard library. Anything else loads transformers' configuration
    code, and asks the Hub for at most :data:`HUB_SECONDS` a question.
    """
    preset = PRESETS.get(config.model)
    layers, positions = (preset.layers, preset.max_positions) if preset else _shape_of(config.model)
    if fragments > layers:
        raise ConfigurationError(
            f"{fragments} fragments > the {layers} layers of model {config.model!r}; use --fragments {layers} or fewer"
        )
    if fragments < 1 or sync_every % fragments:
        raise ConfigurationError(
            f"--sync-every {sync_every} is not a multiple of --fragments {fragments}; change one of them"
        )
    if steps < 1 or steps % sync_every:
        raise ConfigurationError(f"--steps {steps} is not a multiple of --sync-every {sync_every}; change one of them")
    if not 0 <= sync_delay < sync_every // fragments:
        raise ConfigurationError(
            f"--sync-delay {sync_delay} must be from 0 to {sync_every // fragments - 1} (below sync-every / fragments)"
        )
    check_positions(config, positions)
    files = text_files(config.data)
    if files is None:
        if not Path(config.data).expanduser().is_dir():
            _bounded(_check_dataset, config.data)
    elif preset:
        check_amount(config, world_size, sum(file.stat().st_size for file in files) // (config.sequence_length + 1))


def check_positions(config: TrainConfig, positions: int | None) -> None:
    """Raise :class:`ConfigurationError` if a sequence is longer than the model's positions (None: no limit known)."""
    if positions is not None and config.sequence_length > positions:
        raise ConfigurationError(
            f"sequence_length {config.sequence_length} > the {positions} positions of model {config.model!r};"
            f" use {positions} or less"
        )


def check_amount(config: TrainConfig, world_size: int, sequences: int) -> None:
    """Raise :class:`ConfigurationError` if `sequences` are too few for one step of all ranks and one to hold out."""
    needed = config.batch_size * world_size + 1
    if sequences < needed:
        raise ConfigurationError(
            f"data {config.data!r} has {sequences} sequences of {config.sequence_length + 1} tokens, but one step of"
            f" {world_size} replicas and a held-out one need {needed}; give more text, or a smaller"
            " batch_size or sequence_length"
        )


def _shape_of(model: str) -> tuple[int, int | None]:
    if Path(model).expanduser().is_dir():
        return _model_shape(model)  # nothing is asked of anybody
    with suppress(ImportError):
        import transformers  # noqa: F401 - loading it is no question to the Hub, and takes its time on a busy machine
    return _bounded(_model_shape, model)


def _bounded(check: Callable[[str], _T], name: str) -> _T:
    """`check(name)` with an end: in a daemon thread, since a name look-up can't be interrupted."""
    outcome: list[_T] = []
    failure: list[Exception] = []

    def work() -> None:
        try:
            outcome.append(check(name))
        except Exception as problem:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(problem)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if failure:
        raise failure[0]
    if not outcome:
        raise ConfigurationError(
            f"{name!r} is not on this machine, and the Hugging Face Hub did not answer within {HUB_SECONDS:g} s;"
            " check the name and the network"
        )
    return outcome[0]


def _model_shape(name: str) -> tuple[int, int | None]:
    """Return (transformer blocks, positions or None) of a model that is a folder or on the Hub."""
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise ConfigurationError(
            f"model {name!r} needs transformers; pip install 'diloco-aws[train]', or use a preset"
        ) from None
    folder = Path(name).expanduser()
    try:
        if not folder.is_dir():
            _fetch_config(name)
        shape = AutoConfig.from_pretrained(
            folder if folder.is_dir() else name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as problem:
        raise ConfigurationError(unknown_model(name, problem)) from None
    if shape.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigurationError(
            f"model {name!r} is a {shape.model_type}, which is no causal language model; choose one that generates text"
        )
    text = shape.get_text_config()
    return int(text.num_hidden_layers), getattr(text, "max_position_embeddings", None)


def unknown_model(name: str, problem: Exception) -> str:
    """Write the one line for a model that can't be found or loaded."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else "check the name (and HF_TOKEN, if the model is gated)"
    return (
        f"model {name!r} is neither a preset ({', '.join(PRESETS)}), nor a folder with a config.json, nor a model this"
        f" machine can load from the Hugging Face Hub ({first_line(problem)}); {hint}"
    )


def first_line(problem: Exception) -> str:
    """Take an exception's first line, without its full stop, to quote inside a line of ours."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0].rstrip(".")


def _fetch_config(name: str) -> None:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    if name.startswith(("/", ".", "~")):
        raise FileNotFoundError("no such folder")
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    # `model_info` comes first because it fails at once without a network, where a download retries for half a minute.
    _ask_hub(lambda: HfApi().model_info(name, timeout=HUB_SECONDS - 1))
    _ask_hub(lambda: hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS - 1))


def _check_dataset(data: str) -> None:
    name = data.partition(":")[0]
    try:
        from datasets import config as datasets_config
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigurationError(
            f"data {data!r} needs datasets; pip install 'diloco-aws[train]', or give --data a path"
        ) from None
    if Path(datasets_config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir():
        return
    try:
        _ask_hub(lambda: HfApi().dataset_info(name, timeout=HUB_SECONDS - 1))
    except (OSError, ValueError) as problem:
        raise ConfigurationError(unknown_dataset(data, problem)) from None


def unknown_dataset(data: str, problem: Exception) -> str:
    """Write the one line for data that can't be found or loaded."""
    return (
        f"data {data!r} is neither 'stdlib', nor a path here, nor a data set this machine can load from the Hugging"
        f" Face Hub ({first_line(problem)}); check the name, the path and the network"
    )


def _ask_hub(question: Callable[[], object]) -> None:
    try:
        question()
    except (OSError, ValueError):
        raise
    except Exception as problem:  # noqa: BLE001 - the Hub's client passes on its HTTP library's errors, and has changed library before
        raise ConnectionError(first_line(problem)) from None
