from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import torch

from diloco.embedded import BUCKET, environment
from diloco.errors import ConfigurationError
from diloco.training import data as training_data
from diloco.training.config import DOCUMENT_END, TrainConfig
from diloco.training.data import TrainingData, load_tokens
from diloco.training.models import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.embedded import EmbeddedS3

CONFIG = TrainConfig(batch_size=3, sequence_length=9, eval_batches=2)
WORLD = 4


def make(count: int = 1000, *, seed: int = 0, world_size: int = WORLD) -> TrainingData:
    """Data whose every token is its own position, so that a batch tells where it came from."""
    return TrainingData(np.arange(count * 10, dtype=np.int32), CONFIG, world_size=world_size, seed=seed)


def starts(batch: torch.Tensor) -> set[int]:
    return set(batch[:, 0].tolist())


def steps_per_epoch(data: TrainingData) -> int:
    return 950 // (CONFIG.batch_size * WORLD)


def test_batch_is_contiguous_int64_sequences() -> None:
    batch = make().batch(5, 1)
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 10)
    assert (batch.diff(dim=1) == 1).all()
    assert (batch[:, 0] % 10 == 0).all()


def test_order_is_a_pure_function_of_seed_rank_and_step() -> None:
    used = make()
    for step in range(200):
        used.batch(step, 2)
    for step, rank in ((300, 0), (0, 3), (81, 1), (17, 9)):
        assert torch.equal(make().batch(step, rank), used.batch(step, rank))
    assert not torch.equal(make(seed=1).batch(0, 0), make(seed=0).batch(0, 0))


def test_order_is_pinned() -> None:
    """Replicas may run different releases of numpy: the order must not depend on it."""
    assert [sorted(starts(make(seed=7).batch(step, 1))) for step in (0, 100)] == [[60, 1190, 7150], [1490, 3100, 4790]]


def test_ranks_are_disjoint_and_cover_an_epoch() -> None:
    data = make()
    seen: list[int] = []
    for step in range(steps_per_epoch(data)):
        for rank in range(WORLD):
            seen += starts(data.batch(step, rank))
    assert len(seen) == len(set(seen)) == steps_per_epoch(data) * WORLD * CONFIG.batch_size


def test_next_epoch_has_another_order() -> None:
    data = make()
    epoch = steps_per_epoch(data)
    first = [data.batch(step, 0)[:, 0].tolist() for step in range(epoch)]
    second = [data.batch(step + epoch, 0)[:, 0].tolist() for step in range(epoch)]
    assert first != second


def test_late_joiner_repeats_nothing_in_its_epoch() -> None:
    data = make()
    seen = [start for step in range(950 // CONFIG.batch_size) for start in starts(data.batch(step, WORLD + 2))]
    assert len(seen) == len(set(seen))
    assert not torch.equal(data.batch(0, WORLD + 2), data.batch(0, WORLD + 3))


def test_held_out_is_never_trained_on_and_the_same_for_all() -> None:
    data = make()
    held_out = {start for batch in data.held_out(1000) for start in starts(batch)}
    assert len(held_out) == 50
    trained = {start for step in range(950 // 3) for start in starts(data.batch(step, WORLD))}
    assert not held_out & trained
    assert len(held_out | trained) >= 998
    assert {start for batch in make(seed=9, world_size=2).held_out(1000) for start in starts(batch)} == held_out


def test_held_out_is_spread_contiguous_blocks_and_bounded() -> None:
    held_out = sorted(start // 10 for batch in make().held_out(1000) for start in starts(batch))
    assert held_out[:5] == list(range(held_out[0], held_out[0] + 5))
    assert held_out[-1] > 900
    few = list(make().held_out(2))
    assert [batch.shape[0] for batch in few] == [3, 3]
    assert max(int(batch.max()) for batch in few) > 5000


@pytest.mark.parametrize("count", [13, 14, 25, 199])
def test_little_data_still_has_a_held_out_sequence(count: int) -> None:
    data = make(count)
    assert list(data.held_out(1))
    assert data.batch(0, WORLD - 1).shape == (3, 10)


@pytest.mark.parametrize("count", [0, 1, 12])
def test_too_little_data_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="need 13; give more text"):
        make(count)


def test_stdlib_is_bounded_bytes() -> None:
    tokens = load_tokens(TrainConfig(), None)
    assert tokens.dtype == np.uint8
    assert training_data.STDLIB_BYTES <= len(tokens) < 2 * training_data.STDLIB_BYTES
    assert b"import" in tokens[:100_000].tobytes()


def test_files_become_bytes_with_ends(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes("ü".encode())
    (tmp_path / "a").write_bytes(b"xy")
    end = bytes([DOCUMENT_END])
    assert load_tokens(TrainConfig(data=str(tmp_path)), None).tobytes() == b"xy" + end + "ü".encode() + end
    alone = load_tokens(TrainConfig(data=str(tmp_path / "b")), None)
    assert isinstance(alone, np.memmap)
    assert alone.tobytes() == "ü".encode()


def test_tokenizer_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_data, "_PIECE", 7)
    text = "".join(map(chr, range(1, 600))) + "def f():\n\treturn  1\r\n"
    (tmp_path / "a").write_bytes(text.encode())
    tokens = load_tokens(TrainConfig(data=str(tmp_path)), byte_tokenizer())
    assert tokens.dtype == np.uint16
    assert bytes(tokens.astype(np.uint8)) == text.encode()


def test_saved_dataset(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "other": [1, 2]})
    rows.save_to_disk(str(tmp_path / "one"))
    assert load_tokens(TrainConfig(data=str(tmp_path / "one")), None).tobytes() == b"one\0two\0"
    datasets.DatasetDict({"test": rows.select([1]), "train": rows}).save_to_disk(str(tmp_path / "dict"))
    assert load_tokens(TrainConfig(data=str(tmp_path / "dict")), None).tobytes() == b"one\0two\0"
    with pytest.raises(ConfigurationError, match="no column 'body'; set text_field to one of text, other"):
        load_tokens(TrainConfig(data=str(tmp_path / "one"), text_field="body"), None)


def test_broken_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{")
    with pytest.raises(ConfigurationError, match="nor a data set this machine can load"):
        load_tokens(TrainConfig(data=str(tmp_path)), None)


def test_data_in_a_bucket_is_the_same_as_in_a_folder(tmp_path: Path, embedded_s3: EmbeddedS3) -> None:
    import boto3

    texts = {"a.txt": "first", "deeper/b.txt": "second"}
    with environment(embedded_s3.env):
        s3: Any = boto3.client("s3", endpoint_url=embedded_s3.endpoint_url)
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
            s3.put_object(Bucket=BUCKET, Key=f"texts-of-a-test/{name}", Body=text.encode())
        there = load_tokens(TrainConfig(data=f"s3://{BUCKET}/texts-of-a-test"), None)
        one = load_tokens(TrainConfig(data=f"s3://{BUCKET}/texts-of-a-test/a.txt"), None)
        with pytest.raises(ConfigurationError, match="nothing is there"):
            load_tokens(TrainConfig(data=f"s3://{BUCKET}/no-such-prefix"), None)
        with pytest.raises(ConfigurationError, match=r"can't be read|nothing is there"):
            load_tokens(TrainConfig(data="s3://no-such-bucket-of-a-test/x"), None)
    here = load_tokens(TrainConfig(data=str(tmp_path)), None)
    assert there.tobytes() == here.tobytes()
    assert one.tobytes() == b"first"
