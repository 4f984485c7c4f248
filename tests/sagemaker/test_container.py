"""SageMaker's contract around a replica, with processes that stand in for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diloco import sagemaker_container as container
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

GIVEN = ["train", "--rank", "1", "--spec", "s3://b/run/spec.json"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("input/config", "input/data", "model", "output"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def configure(root: Path, name: str, value: Any) -> None:
    (root / "input" / "config" / f"{name}.json").write_text(json.dumps(value))


def test_without_sagemakers_files_nothing_is_added(root: Path) -> None:
    assert container.child_arguments(GIVEN, {}, root) == GIVEN


def test_hyperparameters_become_options_and_arguments_of_the_trainer(root: Path) -> None:
    configure(
        root,
        "hyperparameters",
        {"trainer_module": "mine", "rank": "7", "learning_rate": "0.1", "name": '"x"', "sagemaker_program": "x.py"},
    )

    arguments = container.child_arguments(GIVEN, {"DILOCO_TRAINER_KWARGS_JSON": '{"learning_rate": 0.2}'}, root)

    assert arguments[: len(GIVEN)] == GIVEN  # what was given wins
    assert arguments[len(GIVEN) :] == [
        *("--trainer-module", "mine"),
        *("--trainer-kwargs-json", '{"learning_rate": 0.2, "name": "x"}'),
    ]


def test_the_data_channel_is_where_the_trainer_reads(root: Path) -> None:
    configure(root, "inputdataconfig", {"data": {"TrainingInputMode": "FastFile"}})

    assert container.child_arguments(GIVEN, {}, root)[-1] == json.dumps({"data": f"{root}/input/data/data"})


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_arguments_that_are_no_object_are_refused(root: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="--trainer-kwargs-json is no JSON object"):
        container.child_arguments([*GIVEN, "--trainer-kwargs-json", text], {}, root)


@pytest.mark.parametrize(
    ("which", "rank", "writes"),
    [("rank0", "0", True), ("rank0", "1", False), ("all", "1", True), ("none", "0", False)],
)
def test_which_ranks_write_the_model(root: Path, which: str, rank: str, writes: bool) -> None:
    environment = container.child_environment(["--rank", rank], {"DILOCO_SAGEMAKER_MODEL": which}, root)

    assert environment.get("DILOCO_MODEL_DIR") == (f"{root}/model" if writes else None)


def test_boto3_gets_the_region_that_sagemaker_tells(root: Path) -> None:
    assert container.child_environment([], {"AWS_REGION": "eu-west-1"}, root)["AWS_DEFAULT_REGION"] == "eu-west-1"


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        (["x", "diloco: error: rank 1 diverged", "bye"], 1, "rank 1 diverged"),
        (["Traceback", "  line", "ValueError: no"], 1, "Traceback |   line | ValueError: no"),
        (
            ["loading"],
            -signal.SIGKILL,
            "killed by SIGKILL: out of memory? use a larger instance",
        ),
        ([], 3, "ended with exit code 3 and said nothing"),
    ],
)
def test_reasons(lines: Sequence[str], code: int, expected: str) -> None:
    assert container.reason(lines, code).startswith(expected)


# A process that runs `container.run` around a child, with its /opt/ml in the folder that it is given.
AROUND = """
import functools, sys
from pathlib import Path
from diloco import sagemaker_container as c
c.write_failure = functools.partial(c.write_failure, root=Path(sys.argv[1]))
sys.exit(c.run([sys.executable, "-c", sys.argv[2]], {"PATH": "/bin"}, stop_seconds=float(sys.argv[3])))
"""


def around(root: Path, child: str, stop_seconds: float = 30.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AROUND, str(root), child, str(stop_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_the_exit_code_is_the_childs_and_its_last_error_the_failure(root: Path) -> None:
    child = "import sys; print('out'); print('diloco: error: ' + 'no data ' * 200, file=sys.stderr); sys.exit(78)"
    process = around(root, child)

    out, err = process.communicate(timeout=60)

    assert process.returncode == 78
    assert out == "out\n"
    assert err.startswith("diloco: error: no data")
    failure = (root / "output" / "failure").read_text()
    assert failure.startswith("no data no data")
    assert len(failure) == 1024


def test_success_leaves_no_failure(root: Path) -> None:
    process = around(root, "pass")
    process.communicate(timeout=60)

    assert process.returncode == 0
    assert not (root / "output" / "failure").exists()


def test_a_killed_child_is_explained(root: Path) -> None:
    process = around(root, "import os; os.kill(os.getpid(), 9)")
    process.communicate(timeout=60)

    assert process.returncode == 137
    assert "out of memory?" in (root / "output" / "failure").read_text()


POLITE = """
import signal, sys, time
def stop(*_):
    print("diloco: error: stopped by a signal", file=sys.stderr)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def test_sigterm_is_passed_on(root: Path) -> None:
    process = around(root, POLITE)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 143
    assert (root / "output" / "failure").read_text() == "stopped by a signal"


def test_a_child_that_does_not_stop_is_killed_in_time(root: Path) -> None:
    process = around(root, DEAF, stop_seconds=0.5)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    started = time.monotonic()

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 137
    assert time.monotonic() - started < 30


def test_a_token_comes_from_its_secret(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = emulator.client("secretsmanager")
    plain = secrets.create_secret(Name="plain", SecretString="hf_plain\n")["ARN"]
    keyed = secrets.create_secret(Name="keyed", SecretString='{"HF_TOKEN": "hf_keyed"}')["ARN"]
    other = secrets.create_secret(Name="other", SecretString='{"password": "x"}')["ARN"]
    for name, value in {
        "AWS_ENDPOINT_URL": emulator.endpoint_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)

    environment = container.child_environment([], {"DILOCO_HF_TOKEN_SECRET": plain, "AWS_REGION": "us-east-1"})

    assert environment["HF_TOKEN"] == "hf_plain"  # noqa: S105
    assert container.read_token(keyed, "us-east-1") == "hf_keyed"
    with pytest.raises(ConfigurationError, match="neither HF_TOKEN nor token"):
        container.read_token(other, "us-east-1")
    with pytest.raises(ConfigurationError, match=r"can't be read .*secretArns"):
        container.read_token(plain.replace("plain", "absent"), "us-east-1")
