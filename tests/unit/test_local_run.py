"""The folder of a local run, its lock, the model's copy and the baseline's process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import guard
from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange.store import open_store
from diloco.local_run import RunFolder, copy_model, train_baseline
from diloco.spec import RunSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.of("x1")


def settings(**changes: Any) -> RunSettings:
    values = {"replicas": 2, "steps": 4, "sync_every": 2, "run_id": "x1", "rendezvous": "memory://b"}
    return RunSettings.checked(**(values | changes))


def test_a_run_that_never_began_leaves_nothing(folder: RunFolder) -> None:
    with folder.lock():
        assert folder.path.is_dir()
    assert list(Path.cwd().iterdir()) == []
    with folder.lock():
        folder.logs.mkdir()
    assert folder.logs.is_dir()
    with folder.lock():
        pass


def test_a_second_lock_is_refused_naming_the_holder(folder: RunFolder) -> None:
    with (
        folder.lock(),
        pytest.raises(ConfigurationError, match=f"another launcher .process {os.getpid()}."),
        folder.lock(),
    ):
        pytest.fail("two launchers")
    with folder.lock():
        pass


def test_the_lock_outlives_its_launcher_until_the_guards_are_gone(folder: RunFolder) -> None:
    folder.logs.mkdir(parents=True)
    with folder.lock() as held:
        child = guard.spawn([sys.executable, "-c", "import time; time.sleep(600)"], hold=[held], grace=0.2)
    assert child.stdin is not None
    child.stdin.close()
    with folder.lock():
        assert child.wait(20) == 128 + 15


def test_a_folder_that_can_not_be_made(folder: RunFolder) -> None:
    Path(".diloco").write_text("a file")
    with pytest.raises(ConfigurationError, match="the folder of the run can't be made"), folder.lock():
        pytest.fail("locked")


def test_the_model_is_copied_whole(folder: RunFolder) -> None:
    async def scenario() -> None:
        store = open_store("memory://bucket/run/final")
        await store.write("model/config.json", b"{}")
        await store.write("model/deep/weights", bytes(10 * 2**20))
        await store.write("model-2/other", b"")
        folder.model.mkdir(parents=True)
        (folder.model / "stale").touch()
        await copy_model("memory://bucket/run/final/model", folder.model)

    asyncio.run(scenario())
    files = {path.relative_to(folder.model).as_posix() for path in folder.model.rglob("*") if path.is_file()}
    assert files == {"config.json", "deep/weights"}
    assert (folder.model / "deep" / "weights").stat().st_size == 10 * 2**20
    assert [path.name for path in folder.path.iterdir()] == ["model"]


@pytest.fixture
def fake_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for `python -m diloco.training.baseline` through the interpreter that is started."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport runpy, sys\nrunpy.run_path({str(tmp_path / 'fake.py')!r})\n")
    program.chmod(0o755)
    monkeypatch.setattr(guard, "spawn", _spawn_with(program))
    return tmp_path / "fake.py"


def _spawn_with(program: Path) -> Any:
    real = guard.spawn

    def spawn(command: list[str], **options: Any) -> Any:
        return real([str(program), *command[1:]], **options)

    return spawn


def baseline(folder: RunFolder) -> float:
    read_end, write_end = os.pipe()
    try:
        return asyncio.run(train_baseline(settings(trainer_kwargs={"model": "tiny"}, seed=9), folder, hold=write_end))
    finally:
        os.close(read_end)
        os.close(write_end)


def test_the_baseline_gets_the_settings(folder: RunFolder, fake_baseline: Path) -> None:
    fake_baseline.write_text(
        "import json, sys; print('warming up'); print(json.dumps({'baseline_eval_loss': 2.5, 'argv': sys.argv[1:]}))"
    )
    assert baseline(folder) == 2.5
    argv = json.loads((folder.logs / "baseline.json").read_text().splitlines()[-1])["argv"]
    assert argv == [
        *("-m", "diloco.training.baseline", "--kwargs-json", '{"model": "tiny"}'),
        *("--world-size", "2", "--steps", "4", "--seed", "9"),
    ]


def test_a_baseline_that_fails_says_why(folder: RunFolder, fake_baseline: Path) -> None:
    fake_baseline.write_text("import sys; sys.exit('no memory left')")
    with pytest.raises(DilocoError, match="the baseline failed: no memory left"):
        baseline(folder)
