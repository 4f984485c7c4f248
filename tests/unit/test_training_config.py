from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError
from diloco.training import config as training_config
from diloco.training.config import PRESETS, TrainConfig, preflight
from diloco.training.sources import text_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def check(schedule: dict[str, int] | None = None, **kwargs: Any) -> None:
    preflight(
        TrainConfig.from_kwargs(kwargs),
        **{"steps": 20, "sync_every": 10, "fragments": 1, "sync_delay": 0, **(schedule or {})},
    )


def refused(match: str, schedule: dict[str, int] | None = None, **kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        check(schedule, **kwargs)
    assert "\n" not in str(caught.value)


def write_gpt2(folder: Path, **shape: int) -> str:
    folder.mkdir()
    document = {"model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps({**document, **shape}))
    return str(folder)


def test_launcher_checks_presets_without_torch_or_transformers() -> None:
    program = (
        "import sys, diloco.training; from diloco.training.config import TrainConfig, preflight\n"
        "preflight(TrainConfig(), steps=20, sync_every=10, fragments=2, sync_delay=0)\n"
        "loaded = {'torch', 'transformers', 'datasets', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_config_is_frozen_and_json() -> None:
    config = TrainConfig(batch_size=2)
    with pytest.raises(ValueError, match="frozen"):
        config.batch_size = 3  # type: ignore[misc]
    assert TrainConfig.from_kwargs(json.loads(config.model_dump_json())) == config


def test_from_kwargs_lists_every_problem_in_one_line() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainConfig.from_kwargs({"batch_size": 0, "batchsize": 3, "learning_rate": float("nan")})
    text = str(caught.value)
    assert "batch_size: " in text
    assert "did you mean batch_size?" in text
    assert "learning_rate: " in text
    assert "\n" not in text


def test_preflight_accepts_what_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 1000)
    check({"fragments": 2, "sync_delay": 4}, data=str(tmp_path / "a.txt"), batch_size=1)
    check({"fragments": 2}, model=write_gpt2(tmp_path / "gpt2"), data=str(tmp_path / "*.txt"), sequence_length=64)


def test_preflight_names_the_fix_for_a_model(tmp_path: Path) -> None:
    refused("did you mean tiny", model="tiyn")
    refused("'nobody/nothing' is neither a preset", model="nobody/nothing")
    refused("no such folder", model=str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    refused("nor a folder with a config.json", model=str(tmp_path / "empty"))
    refused("vit, which is no causal", model=write_gpt2(tmp_path / "vit", model_type="vit"))  # type: ignore[arg-type]
    refused("sequence_length 65 > the 64 positions", model=write_gpt2(tmp_path / "short"), sequence_length=65)


def test_preflight_names_the_fix_for_fragments(tmp_path: Path) -> None:
    layers = PRESETS["tiny"].layers
    refused(f"{layers + 1} fragments > the {layers} layers", {"fragments": layers + 1, "sync_every": layers + 1})
    refused("use --fragments 3", {"fragments": 4, "sync_every": 4}, model=write_gpt2(tmp_path / "gpt2"))
    refused("not a multiple of --fragments", {"fragments": 3})
    refused("not a multiple of --sync-every", {"steps": 25})
    refused("from 0 to 4", {"fragments": 2, "sync_delay": 5})


def test_preflight_names_the_fix_for_data(tmp_path: Path) -> None:
    refused("No such file", data=str(tmp_path / "absent.txt"))
    refused("No such file", data="absent.txt")
    refused("no text there", data=str(tmp_path / "*.txt"))
    (tmp_path / "folder").mkdir()
    refused("no text there", data=str(tmp_path / "folder"))
    (tmp_path / "folder" / "empty.txt").touch()
    refused("no text there", data=str(tmp_path / "folder" / "empty.txt"))
    (tmp_path / "folder" / "short.txt").write_text("too short")
    refused("give more text", data=str(tmp_path / "folder"))
    refused("nor a data set", data="nobody/nothing")


def test_preflight_of_unreadable_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("secret")

    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("pathlib.Path.open", forbid)  # file modes do not stop a root user
    refused("Permission denied; check the path and its permissions", data=str(file))


def test_hub_that_never_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_config, "HUB_SECONDS", 0.2)
    monkeypatch.setattr(training_config, "_ask_hub", lambda _question: time.sleep(5))
    started = time.monotonic()
    refused("did not answer within 0.2 s", model="some/model")
    refused("did not answer within 0.2 s", data="some/data")
    assert time.monotonic() - started < 5


def test_stdlib_is_sorted_library_source_only() -> None:
    files = text_files("stdlib")
    assert files == sorted(files or [])
    assert len(files or []) > 50
    parts = {part for file in files or [] for part in file.parts}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}


def test_folder_leaves_out_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {"b.md": b"b", "c/a.txt": b"a", ".git/x": b"x", ".hidden": b"h", "z.bin": b"\0\1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert text_files(str(tmp_path)) == [tmp_path / "b.md", tmp_path / "c" / "a.txt"]
    assert text_files(str(tmp_path / "**" / "*.txt")) == [tmp_path / "c" / "a.txt"]
