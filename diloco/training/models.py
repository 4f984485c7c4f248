"""Models: built-in byte-level presets, or any Hugging Face causal language model, and how one is cut into fragments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from diloco.errors import ConfigurationError, DilocoError
from diloco.training.config import BYTES, DOCUMENT_END, PRESETS, Preset, check_positions, unknown_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from diloco.training.config import TrainConfig


def build_model(config: TrainConfig, *, seed: int) -> PreTrainedModel:
    """Build or load the model that `config.model` names: float32, on the CPU, in training mode.

    New parameters are drawn from `seed`. Raises :class:`ConfigurationError` for a model that can't be found or
    loaded, or whose positions are fewer than a sequence's tokens, and :class:`DilocoError` if the Hub could not be
    reached.
    """
    torch.manual_seed(seed)
    preset = PRESETS.get(config.model)
    model: PreTrainedModel = _build_preset(preset) if preset else _load(config.model)
    check_positions(config, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    model.config.use_cache = False
    model.train()
    return model


def _build_preset(preset: Preset) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=preset.hidden_size,
            intermediate_size=preset.intermediate_size,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            max_position_embeddings=preset.max_positions,
            # Outer momentum magnifies the first rounds' steps: too large for weights of the customary 0.02.
            initializer_range=preset.hidden_size**-0.5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=DOCUMENT_END,
        )
    )
    return model


def _load(name: str) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    try:
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.from_pretrained(source), dtype=torch.float32
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except ConnectionError as problem:
        raise DilocoError(unknown_model(name, problem)) from None
    except (OSError, ValueError) as problem:
        raise ConfigurationError(unknown_model(name, problem)) from None
    return model


def load_tokenizer(config: TrainConfig, *, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """Load the model's own tokenizer; None if its tokens are bytes.

    A folder without a tokenizer is taken as byte-level if its `vocab_size` has room for bytes. Raises
    :class:`ConfigurationError` otherwise.
    """
    if config.model in PRESETS:
        return None
    from transformers import AutoTokenizer

    folder = Path(config.model).expanduser()
    try:
        if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            if vocab_size < BYTES:
                raise ConfigurationError(
                    f"model {config.model!r} has no tokenizer, and its vocabulary of {vocab_size} is too small for"
                    " bytes; add one"
                )
            return None
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else config.model)
    except (OSError, ValueError) as problem:
        raise ConfigurationError(
            f"model {config.model!r}: its tokenizer can't be loaded ({problem}); save one beside the model"
        ) from None
    if len(tokenizer) > vocab_size:
        raise ConfigurationError(
            f"model {config.model!r}: its tokenizer has {len(tokenizer)} tokens, the model {vocab_size};"
            " use the model's own"
        )
    return None if tokenizer.get_vocab() == _byte_vocabulary() else tokenizer


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer whose ids are the bytes of the text's UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )


def _byte_vocabulary() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes: printable Latin-1 as itself, the others as code points from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte if byte in printable else BYTES + others.index(byte)): byte for byte in range(BYTES)}


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load (no tokenizer: that of bytes)."""
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)


def split_into_fragments(model: PreTrainedModel, n: int) -> list[nn.Module]:
    """Cut a model into `n` fragments of contiguous transformer blocks, of equal numbers of blocks or one more.

    What the model registers before its blocks (embeddings) goes with the first fragment, what comes after (final
    norm, head) with the last; a tied parameter is where its first name is. Every parameter is in exactly one
    fragment, under its full name in the model, and the tensors are the model's own: cut after the model is on its
    device. One fragment is the model itself. Raises :class:`ConfigurationError` if there are fewer blocks than
    fragments.
    """
    if n == 1:
        return [model]
    prefix, layers = _find_blocks(model)
    if n > layers:
        raise ConfigurationError(
            f"{n} fragments > the {layers} layers of {type(model).__name__}; use {max(layers, 1)} fragments or fewer"
        )
    fragments: list[nn.Module] = [nn.Module() for _ in range(n)]
    state = model.state_dict()
    before_blocks = True
    for name, tensor in [
        *model.named_parameters(),
        *((key, buffer) for key, buffer in model.named_buffers() if key in state),
    ]:
        if name.startswith(prefix):
            before_blocks = False
            place = int(name.removeprefix(prefix).partition(".")[0]) * n // layers
        else:
            place = 0 if before_blocks else n - 1
        container, leaf = _container(fragments[place], name)
        if isinstance(tensor, nn.Parameter):
            container.register_parameter(leaf, tensor)
        else:
            container.register_buffer(leaf, tensor)
    return fragments


def _find_blocks(model: PreTrainedModel) -> tuple[str, int]:
    """Find (`prefix.` of the blocks' names, how many): the module list of one class that holds the most parameters."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    ]
    if not lists:
        return "", 0
    name, blocks = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return f"{name}.", len(blocks)


def _container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Find, or make, the module below `root` that holds the tensor of that full name, and the name's last part."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, leaf
