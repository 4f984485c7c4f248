from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diloco.errors import ConfigurationError
from diloco.exchange.settings import ExchangeSettings
from diloco.manager import ObjectStoreManager
from diloco.training import baseline, diloco_train
from diloco.training.baseline import train_baseline
from diloco.training.config import TrainConfig
from diloco.training.loop import Job, choose_device, learning_rate, prepare
from examples import plain_pytorch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SMALL = {"batch_size": 2, "sequence_length": 16, "eval_batches": 2, "warmup_steps": 2, "learning_rate": 2e-3}


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    document = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(document | without_dropout))
    return str(folder)


@pytest.fixture
def kwargs(tmp_path: Path, model_folder: str) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("".join(f"{number} squared is {number**2}.\n" for number in range(2000)))
    return {**SMALL, "model": model_folder, "data": str(tmp_path / "text.txt")}


@contextmanager
def joined(folder: Path) -> Iterator[ObjectStoreManager]:
    """The one replica of a run in a folder."""
    (folder / "runs").mkdir(exist_ok=True)
    manager = ObjectStoreManager(
        f"file://{folder}/runs/one", rank=0, world_size=1, settings=ExchangeSettings(beat_every=0.05)
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.close()


def train_alone(folder: Path, fn: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    with joined(folder) as manager:
        return fn(manager=manager, rank=0, world_size=1, **arguments)


def test_one_replica_learns_and_saves_what_it_evaluated(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    result = train_alone(tmp_path, diloco_train, steps=20, sync_every=5, seed=1, **kwargs)
    assert json.loads(json.dumps(result)) == result
    assert result["initial_eval_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert result["final_eval_loss"] < result["initial_eval_loss"] - 0.3
    assert result["final_train_loss"] > 0
    assert result["eval_tokens"] == 2 * 2 * 16
    saved = next(tmp_path.glob("runs/one/final/**/config.json")).parent
    job = prepare(TrainConfig.from_kwargs(kwargs), world_size=1, steps=1, seed=1)
    job.model.load_state_dict(AutoModelForCausalLM.from_pretrained(saved).state_dict())
    assert job.evaluate() == pytest.approx(result["final_eval_loss"], abs=1e-5)


def test_fragments_and_delay(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    result = train_alone(tmp_path, diloco_train, steps=16, sync_every=8, fragments=2, sync_delay=2, **kwargs)
    assert result["final_eval_loss"] < result["initial_eval_loss"] - 0.2


def test_a_finished_run_resumes_to_the_same_result(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    first = train_alone(tmp_path, diloco_train, steps=10, sync_every=5, **kwargs)
    again = train_alone(tmp_path, diloco_train, steps=10, sync_every=5, seed=5, **kwargs)
    assert again["initial_eval_loss"] is None
    assert again["final_train_loss"] is None
    assert again["final_eval_loss"] == pytest.approx(first["final_eval_loss"], abs=1e-6)


def test_plain_averaging_of_one_replica_is_the_baseline(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    result = train_alone(tmp_path, diloco_train, steps=10, sync_every=5, seed=2, **outer, **kwargs)
    plain = train_baseline(TrainConfig.from_kwargs(kwargs), world_size=1, steps=10, seed=2)
    assert result["initial_eval_loss"] == plain["baseline_initial_eval_loss"]
    assert result["final_eval_loss"] == pytest.approx(plain["baseline_eval_loss"], abs=1e-5)


def test_baseline_averages_the_gradients_of_all_ranks(kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean gradient of equal batches is the gradient of their concatenation. AdamW alone would hide a factor."""
    config = TrainConfig.from_kwargs({**kwargs, "clip_norm": 1e6})
    seen: list[list[torch.Tensor]] = []

    def watched(*args: Any, **options: Any) -> Job:
        job = prepare(*args, **options)

        def note(*_: Any) -> None:
            seen.append([parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None])

        job.optimizer.register_step_pre_hook(note)
        return job

    monkeypatch.setattr(baseline, "prepare", watched)
    result = train_baseline(config, world_size=3, steps=4, seed=0)
    ours, seen[:] = list(seen), []
    job = watched(config, world_size=3, steps=4, seed=0)
    for step in range(4):
        loss = job.loss(torch.cat([job.data.batch(step, rank) for rank in range(3)]))
        loss.backward()  # type: ignore[no-untyped-call]
        job.optimizer_step(step)
    assert len(ours) == len(seen) == 4
    for mine, theirs in zip(chain(*ours), chain(*seen), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4)
    assert result["baseline_eval_loss"] == pytest.approx(job.evaluate(), abs=1e-4)
    assert result["seconds"] > 0


def test_baseline_command_prints_one_json_line(kwargs: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "diloco.training.baseline", "--world-size", "2", "--steps", "2", "--kwargs-json"]
    done = subprocess.run([*command, json.dumps(kwargs)], capture_output=True, text=True, check=True, timeout=120)
    assert set(json.loads(done.stdout)) == {"baseline_eval_loss", "baseline_initial_eval_loss", "seconds"}
    assert done.stdout.count("\n") == 1


def test_baseline_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = baseline.main(["--world-size", "2", "--steps", "2", "--kwargs-json", '{"data": "/nowhere"}'])
    output = capsys.readouterr()
    assert code == 78
    assert output.out == ""
    assert output.err.count("\n") == 1


def test_learning_rate_is_warm_up_then_cosine() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 105) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(config, 200, 105) == pytest.approx(0.1)
    assert learning_rate(config, 3, 4) == 1.0


def test_step_clips_the_gradient_and_decays_matrices_only(kwargs: dict[str, Any]) -> None:
    config = TrainConfig.from_kwargs({**kwargs, "clip_norm": 0.5})
    job = prepare(config, world_size=1, steps=10, seed=0)
    seen: list[float] = []

    def norm(*_: Any) -> None:
        gradients = [parameter.grad for parameter in job.model.parameters() if parameter.grad is not None]
        seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    job.optimizer.register_step_pre_hook(norm)
    (job.loss(job.data.batch(0, 0)) * 1000).backward()  # type: ignore[no-untyped-call]
    job.optimizer_step(0)
    assert seen == [pytest.approx(0.5, rel=1e-3)]
    assert all(parameter.grad is None for parameter in job.model.parameters())
    for group in job.optimizer.param_groups:
        assert group["lr"] == learning_rate(config, 0, 10)
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}


def test_evaluation_is_the_mean_over_held_out_tokens_without_dropout(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    document = json.loads((tmp_path / "model" / "config.json").read_text()) | {"resid_pdrop": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(document))
    job = prepare(TrainConfig.from_kwargs(kwargs), world_size=1, steps=1, seed=0)
    loss = job.evaluate()
    assert job.evaluate() == loss
    assert job.model.training
    job.model.eval()  # type: ignore[no-untyped-call]
    assert job.loss(torch.cat(list(job.data.held_out(2)))).item() == pytest.approx(loss, abs=1e-5)


def test_unusable_device_is_refused() -> None:
    for name in ("nonsense", "cuda:77"):
        with pytest.raises(ConfigurationError, match=f"device '{name}' can't be used here"):
            choose_device(name)


@pytest.mark.parametrize("fragments", [1, 2])
def test_plain_pytorch_example_learns(tmp_path: Path, fragments: int) -> None:
    result = train_alone(tmp_path, plain_pytorch.train, steps=200, sync_every=20, fragments=fragments)
    assert result["final_eval_loss"] < 0.4
    assert list(tmp_path.glob("runs/one/final/**/model.safetensors"))
