"""What a replica trains on: tokens, cut into sequences, in an order that needs no state.

All tokens form one array. It is cut into sequences of `sequence_length + 1` tokens that share none, so a token is
predicted from others of its own sequence only, and what is held out is never seen in training. Contiguous blocks of
sequences, spread evenly over the text, are held out: the same ones for every replica and seed.

The order is a pure function of (seed, rank, step), so a replica that is relaunched, or that jumps ahead after a
catch-up, reads what it would have read. In an epoch (a pass over the training sequences) ranks below the world size
take disjoint slices of one permutation; the next epoch has another permutation. A sequence too few for all ranks at
an epoch's end is left out of it. A rank at or above the world size, a late joiner, has a permutation of its own: it
repeats nothing within its epoch, but shares sequences with the others by chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diloco.errors import ConfigurationError, DilocoError
from diloco.training.config import DOCUMENT_END, check_amount, unknown_dataset
from diloco.training.sources import local_copy, text_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from diloco.training.config import TrainConfig

STDLIB_BYTES = 4 << 20
"""How much of the standard library is read: enough for every rank of a small run to see text once."""
BLOCKS = 200
"""Contiguous blocks that the sequences are divided into."""
HELD_OUT_EVERY = 20
"""One block in so many is held out."""
_PIECE = 1 << 20
"""Characters given to a tokenizer at once."""


class TrainingData:
    """Sequences of one run, for any rank and step."""

    def __init__(self, tokens: NDArray[Any], config: TrainConfig, *, world_size: int, seed: int) -> None:
        """Cut `tokens` (1-D, unsigned or signed integers) into sequences.

        Raises :class:`ConfigurationError` if they are too few for one step of `world_size` replicas.
        """
        self._length = config.sequence_length + 1
        self._batch_size = config.batch_size
        self._world_size = world_size
        self._seed = seed
        self._tokens = tokens
        count = len(tokens) // self._length
        sequences = np.arange(count)
        blocks = min(count, BLOCKS)
        block_of = sequences * blocks // max(count, 1)
        held_out = block_of % HELD_OUT_EVERY == min(HELD_OUT_EVERY, blocks) // 2
        self._train = sequences[~held_out]
        self._held_out = sequences[held_out]
        check_amount(config, world_size, len(self._train) + 1)
        self._epoch_order: tuple[tuple[int, int], NDArray[np.intp]] | None = None

    def batch(self, step: int, rank: int) -> torch.Tensor:
        """Return what `rank` trains on at global inner step `step`: int64 `[batch_size, sequence_length + 1]`."""
        joined_late = rank >= self._world_size
        slices, place = (1, 0) if joined_late else (self._world_size, rank)
        steps_per_epoch = len(self._train) // (self._batch_size * slices)
        epoch, index = divmod(step, steps_per_epoch)
        start = (index * slices + place) * self._batch_size
        return self._rows(self._train[self._order(epoch, rank if joined_late else 0)[start : start + self._batch_size]])

    def held_out(self, batches: int) -> Iterator[torch.Tensor]:
        """Yield up to `batches` batches taken evenly from the held-out text; the last may have fewer rows."""
        wanted = min(batches * self._batch_size, len(self._held_out))
        chosen = self._held_out[np.arange(wanted) * len(self._held_out) // wanted]
        for start in range(0, wanted, self._batch_size):
            yield self._rows(chosen[start : start + self._batch_size])

    def _order(self, epoch: int, stream: int) -> NDArray[np.intp]:
        key = (epoch, stream)
        if self._epoch_order is None or self._epoch_order[0] != key:
            # numpy promises the raw output of a bit generator across releases, but not that of `permutation`.
            draws = np.random.PCG64(np.random.SeedSequence((self._seed, *key))).random_raw(len(self._train))
            self._epoch_order = (key, np.argsort(draws, kind="stable"))
        return self._epoch_order[1]

    def _rows(self, sequences: NDArray[np.intp]) -> torch.Tensor:
        places = sequences[:, None] * self._length + np.arange(self._length)
        return torch.from_numpy(self._tokens[places].astype(np.int64))


def load_tokens(config: TrainConfig, tokenizer: PreTrainedTokenizerBase | None) -> NDArray[Any]:
    """Read all tokens of the run's data, in a fixed order.

    They are uint8 without a tokenizer (a byte is a token), else uint16 or int32.

    Documents end with :data:`DOCUMENT_END`, or with the tokenizer's end-of-sequence token if it has one. Raises
    :class:`ConfigurationError` for data that isn't there, and :class:`DilocoError` if the Hub could not be reached.
    """
    config = config.model_copy(update={"data": local_copy(config.data)})
    files = text_files(config.data)
    if tokenizer is None and files is not None and len(files) == 1:
        return np.memmap(files[0], dtype=np.uint8, mode="r")
    documents = (
        _read_files(files, STDLIB_BYTES if config.data == "stdlib" else None)
        if files is not None
        else _read_dataset(config)
    )
    parts = [part for document in documents for part in _encode(document, tokenizer)]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _read_files(files: list[Path], limit: int | None) -> Iterator[bytes]:
    read = 0
    for file in files:
        content = file.read_bytes()
        read += len(content)
        yield content
        if limit is not None and read >= limit:
            return


def _read_dataset(config: TrainConfig) -> Iterator[bytes]:
    import datasets

    folder = Path(config.data).expanduser()
    name, _, subset = config.data.partition(":")
    try:
        found = datasets.load_from_disk(str(folder)) if folder.is_dir() else datasets.load_dataset(name, subset or None)
    except ConnectionError as problem:
        raise DilocoError(unknown_dataset(config.data, problem)) from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as problem:
        raise ConfigurationError(unknown_dataset(config.data, problem)) from None
    if isinstance(found, datasets.DatasetDict):
        found = found["train"] if "train" in found else next(iter(found.values()))
    if config.text_field not in found.column_names:
        raise ConfigurationError(
            f"data {config.data!r} has no column {config.text_field!r};"
            f" set text_field to one of {', '.join(found.column_names)}"
        )
    for row in found.select_columns(config.text_field):
        yield str(row[config.text_field]).encode()


def _encode(document: bytes, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[NDArray[Any]]:
    if tokenizer is None:
        yield np.frombuffer(document, np.uint8)
        yield np.array([DOCUMENT_END], np.uint8)
        return
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    text = document.decode("utf-8", errors="replace")
    for start in range(0, len(text), _PIECE):
        yield np.asarray(
            tokenizer(text[start : start + _PIECE], add_special_tokens=False, verbose=False)["input_ids"], kind
        )
    if tokenizer.eos_token_id is not None:
        yield np.array([tokenizer.eos_token_id], kind)
