"""The contract of a replica's process: where its values come from, its exit codes, and its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import ConfigurationError
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Claim, ErrorReport, ReplicaReport
from diloco.replica_entrypoint import _settings, find_trainer, follow_spec, parse
from diloco.spec import spec_record
from tests.support.standin_replica import settings

ROOT = Path(__file__).parents[2]
ENV = {"RENDEZVOUS_URI": "file:///env", "WORLD_SIZE": "4", "REPLICA_RANK": "3"}

TRAINERS = """
import asyncio
import os
import signal

from diloco.errors import RoundError
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Claim


def fine(*, manager, rank, world_size, answer, stop_at=None):
    import torch
    from diloco import make_diloco_outer_loop

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = make_diloco_outer_loop(manager, [model], optimizer, steps=4, sync_every=2)
    with outer:
        for step in outer.steps():
            if step == stop_at:
                return
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    outer.finish()
    return {"answer": answer, "rank": rank, "world_size": world_size, "object": object(), "nan": float("nan")}


def leaves(*, manager, rank, world_size):
    raise SystemExit(0)


def broken(*, manager, rank, world_size):
    raise ValueError("a bug\\nof two lines")


def ended(*, manager, rank, world_size):
    raise RoundError("round 3 can't be completed: rank 1 is gone")


def replaced(*, manager, rank, world_size):
    claim = Claim(rank=rank, attempt=2, host="elsewhere", pid=1)
    store = manager.presence.store
    manager.presence.call(store.create(layout.claim(Member(rank, 2)), claim.to_json()))
    manager.presence.call(asyncio.Event().wait())


def stopped(*, manager, rank, world_size):
    os.kill(os.getpid(), signal.SIGTERM)
    manager.presence.call(asyncio.Event().wait())


def takes_no_rank(manager, world_size):
    pass


def takes_anything(**kwargs):
    pass


number = 5
"""


def test_the_environment_is_enough() -> None:
    options = parse([], ENV)
    assert (options.rendezvous, options.world_size, options.rank) == ("file:///env", 4, 3)
    assert (options.trainer_module, options.trainer_fn) == ("diloco.training", "diloco_train")
    assert (options.trainer_kwargs_json, options.exchange_json) == ("{}", "{}")


def test_the_command_line_wins_over_the_environment() -> None:
    everything = ENV | {
        "DILOCO_TRAINER_MODULE": "m",
        "DILOCO_TRAINER_FN": "f",
        "DILOCO_TRAINER_KWARGS_JSON": '{"a": 1}',
        "DILOCO_EXCHANGE_JSON": '{"grace": 1}',
    }
    assert parse([], everything).trainer_module == "m"
    assert parse([], everything).exchange_json == '{"grace": 1}'
    argv = [
        *("--rendezvous", "file:///argv", "--world-size", "2", "--rank", "0", "--trainer-module", "n"),
        *("--trainer-fn", "g", "--trainer-kwargs-json", "{}", "--exchange-json", "{}"),
    ]
    options = parse(argv, everything)
    assert (options.rendezvous, options.world_size, options.rank) == ("file:///argv", 2, 0)
    assert (options.trainer_module, options.trainer_fn) == ("n", "g")
    assert (options.trainer_kwargs_json, options.exchange_json) == ("{}", "{}")


def test_what_the_command_line_overrides_need_not_be_valid() -> None:
    assert parse(["--rank", "1"], ENV | {"REPLICA_RANK": "none"}).rank == 1


def test_the_job_completion_index_is_the_rank_unless_one_is_given() -> None:
    indexed = {"RENDEZVOUS_URI": "file:///a", "WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2"}
    assert parse([], indexed).rank == 2
    assert parse([], indexed | {"REPLICA_RANK": "1"}).rank == 1
    assert parse(["--rank", "0"], indexed).rank == 0


def test_volcanos_task_index_is_the_rank_unless_one_is_given() -> None:
    task = {"RENDEZVOUS_URI": "file:///a", "WORLD_SIZE": "4", "VC_TASK_INDEX": "2"}
    assert parse([], task).rank == 2
    assert parse([], task | {"JOB_COMPLETION_INDEX": "3"}).rank == 3
    assert parse([], task | {"REPLICA_RANK": "1"}).rank == 1
    assert parse(["--rank", "0"], task).rank == 0


def test_sagemaker_says_train() -> None:
    assert parse(["train"], ENV).rank == 3
    assert parse(["train", "--rank", "1"], ENV).rank == 1
    with pytest.raises(ConfigurationError, match="invalid choice: 'serve'"):
        parse(["serve"], ENV)


def test_every_missing_value_is_named() -> None:
    with pytest.raises(
        ConfigurationError,
        match="missing: --rendezvous or RENDEZVOUS_URI, --world-size or WORLD_SIZE, --rank or REPLICA_RANK",
    ):
        parse([], {})
    with pytest.raises(ConfigurationError, match=r"^missing: --world-size or WORLD_SIZE$"):
        parse(["--rank", "0"], {"RENDEZVOUS_URI": "file:///a"})


@pytest.mark.parametrize("name", ["WORLD_SIZE", "REPLICA_RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX"])
def test_a_number_that_is_none_is_named(name: str) -> None:
    environ = {key: value for key, value in ENV.items() if key != "REPLICA_RANK"} | {name: "two"}
    with pytest.raises(ConfigurationError, match=f"{name} is 'two': it must be a whole number"):
        parse([], environ)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "--exchange-json is no JSON"),
        ("[]", "--exchange-json is a JSON list: it must be an object"),
        ('{"colour": 1}', "--exchange-json: colour: "),
        ('{"grace": -1}', "--exchange-json: grace: "),
        ('{"policy": "maybe"}', "--exchange-json: policy: "),
        ('{"timeout": 0}', "--exchange-json: timeout: "),
    ],
)
def test_bad_settings_are_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        _settings(text)


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with trainers, for this process and its children."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "trainers_of_a_test.py").write_text(TRAINERS)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return "trainers_of_a_test"


def test_trainers_are_found_and_checked(trainers: str) -> None:
    assert find_trainer(trainers, "fine").__name__ == "fine"
    assert find_trainer(trainers, "takes_anything").__name__ == "takes_anything"
    with pytest.raises(ConfigurationError, match=r"--trainer-module no_such_module: .* is it on PYTHONPATH"):
        find_trainer("no_such_module", "fine")
    for name in ("absent", "number"):
        with pytest.raises(ConfigurationError, match=f"--trainer-fn {name}: {trainers} has no such function"):
            find_trainer(trainers, name)
    with pytest.raises(ConfigurationError, match=f"{trainers}.takes_no_rank takes no rank: a trainer is fn"):
        find_trainer(trainers, "takes_no_rank")


def replica(run: Path | str, *argv: str, rank: str = "0") -> subprocess.CompletedProcess[str]:
    uri = run if isinstance(run, str) else run.as_uri()
    command = [sys.executable, "-m", "diloco.replica_entrypoint", "--rendezvous", uri, "--world-size", "1"]
    return subprocess.run([*command, "--rank", rank, *argv], capture_output=True, text=True, timeout=120, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--trainer-module", "no_such_module"], "--trainer-module no_such_module: "),
        (["--trainer-kwargs-json", "{"], "--trainer-kwargs-json is no JSON"),
        (["--exchange-json", '{"colour": 1}'], "--exchange-json: colour: "),
    ],
)
def test_bad_configuration_ends_with_78_and_one_line(tmp_path: Path, argv: list[str], line: str) -> None:
    done = replica(tmp_path / "run", *argv)
    assert done.returncode == 78
    assert last_line(done).startswith(f"diloco: error: {line}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_ends_with_a_line_of_ours(tmp_path: Path) -> None:
    done = replica(tmp_path / "run", "--ranks", "1")
    assert done.returncode in (2, 78)
    assert last_line(done).startswith("diloco: error: ")


def test_a_lost_rendezvous_ends_with_69(tmp_path: Path, trainers: str) -> None:
    (tmp_path / "file").write_text("")
    done = replica(tmp_path / "file" / "run", "--trainer-module", trainers, "--trainer-fn", "takes_anything")
    assert done.returncode == 69
    assert last_line(done).startswith("diloco: error: file:///")
    assert "Traceback" not in done.stderr


def test_a_replaced_attempt_ends_with_76(tmp_path: Path, trainers: str) -> None:
    run = tmp_path / "run"
    arguments = ["--trainer-module", trainers, "--trainer-fn", "replaced", "--exchange-json", '{"beat_every": 0.05}']
    done = replica(run, *arguments)
    assert done.returncode == 76
    assert last_line(done).startswith("diloco: error: rank 0 (attempt 1) was replaced by attempt 2")
    assert "Traceback" not in done.stderr
    report = ErrorReport.from_json((run / layout.error(Member(0, 1))).read_bytes(), "error")
    assert report.exit_code == 76


def test_a_signal_ends_with_143(tmp_path: Path, trainers: str) -> None:
    done = replica(tmp_path / "run", "--trainer-module", trainers, "--trainer-fn", "stopped")
    assert done.returncode == 128 + signal.SIGTERM
    assert last_line(done).startswith("diloco: error: stopped by a signal; start the run again")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "code"),
    [
        # In the entrypoint's own imports.
        ("pydantic", "os.kill(os.getpid(), signal.SIGTERM)\nraise ImportError('it went on')"),
        # In a trainer's, by whom an exception would get lost.
        (
            "trainer_of_a_test",
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept BaseException:\n    pass\nwhile True:\n    pass",
        ),
    ],
)
def test_a_signal_while_modules_are_imported_ends_with_143(
    tmp_path: Path, module: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(f"import os, signal\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    done = replica(tmp_path / "run", "--trainer-module", module)
    assert done.returncode == 128 + signal.SIGTERM  # -15 if it had no handler yet
    assert done.stderr == "diloco: error: stopped by a signal; start the run again with the same run id to go on\n"
    assert not (tmp_path / "run").exists()


def test_a_round_that_failed_ends_with_1_and_is_reported(tmp_path: Path, trainers: str) -> None:
    run = tmp_path / "run"
    done = replica(run, "--trainer-module", trainers, "--trainer-fn", "ended")
    assert done.returncode == 1
    assert last_line(done) == "diloco: error: round 3 can't be completed: rank 1 is gone"
    assert "Traceback" not in done.stderr
    report = ErrorReport.from_json((run / layout.error(Member(0, 1))).read_bytes(), "error")
    assert (report.exit_code, report.error) == (1, "RoundError: round 3 can't be completed: rank 1 is gone")


def test_a_bug_of_the_trainer_keeps_its_traceback_before_the_last_line(tmp_path: Path, trainers: str) -> None:
    done = replica(tmp_path / "run", "--trainer-module", trainers, "--trainer-fn", "broken")
    assert done.returncode == 1
    assert last_line(done) == "diloco: error: the trainer failed: ValueError: a bug of two lines"
    assert "Traceback" in done.stderr
    assert "in broken" in done.stderr


def test_a_good_end_is_reported(tmp_path: Path, trainers: str) -> None:
    run = tmp_path / "run"
    kwargs = json.dumps({"answer": 42})
    done = replica(run, "--trainer-module", trainers, "--trainer-fn", "fine", "--trainer-kwargs-json", kwargs)
    assert (done.returncode, done.stdout) == (0, "")
    assert "diloco: error" not in done.stderr
    claim = Claim.from_json((run / layout.claim(Member(0, 1))).read_bytes(), "claim")
    assert claim.rank == 0
    report = ReplicaReport.from_json((run / layout.result(Member(0, 1))).read_bytes(), "result")
    assert report.trainer == {"answer": 42, "rank": 0, "world_size": 1}


@pytest.mark.parametrize(
    ("function", "kwargs", "says"),
    [
        ("fine", {"answer": 1, "stop_at": 3}, "the trainer returned at inner step 3 of 4"),
        ("takes_anything", {}, "the trainer returned without a model"),
        ("leaves", {}, "sys.exit(0) before the run was over"),
    ],
)
def test_no_replica_ends_well_before_the_result(
    tmp_path: Path, trainers: str, function: str, kwargs: dict[str, int], says: str
) -> None:
    arguments = ["--trainer-module", trainers, "--trainer-fn", function, "--trainer-kwargs-json", json.dumps(kwargs)]
    done = replica(tmp_path / "run", *arguments)
    assert done.returncode == 1
    assert says in last_line(done)
    assert not (tmp_path / "run" / layout.result(Member(0, 1))).exists()


def test_a_rank_beyond_a_strict_world_is_refused(tmp_path: Path, trainers: str) -> None:
    done = replica(tmp_path / "run", "--trainer-module", trainers, "--trainer-fn", "takes_anything", rank="1")
    assert done.returncode == 78
    assert last_line(done).startswith("diloco: error: rank 1 of 1: ")


def test_trainer_and_arguments_come_from_the_spec_unless_something_else_names_them(tmp_path: Path) -> None:
    run = settings(
        tmp_path, trainer_module="spec_module", trainer_fn="spec_fn", trainer_kwargs={"a": 1, "b": 2}, seed=7
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_bytes(spec_record(run).to_json())
    spec = ["--spec", f"{tmp_path.as_uri()}/run/spec.json"]

    options = parse(spec, ENV)
    kwargs = follow_spec(options, {"b": 3})

    assert (options.trainer_module, options.trainer_fn) == ("spec_module", "spec_fn")
    assert kwargs == {"steps": 20, "sync_every": 5, "fragments": 1, "sync_delay": 0, "seed": 7, "a": 1, "b": 3}
    options = parse([*spec, "--trainer-fn", "given"], ENV)
    follow_spec(options, {})
    assert (options.trainer_module, options.trainer_fn) == ("spec_module", "given")


def test_a_spec_that_is_not_there_is_said(tmp_path: Path) -> None:
    options = parse(["--spec", f"{tmp_path.as_uri()}/none/spec.json"], ENV)

    with pytest.raises(ConfigurationError, match=r"none/spec\.json: no such object: it is the launcher's to write"):
        follow_spec(options, {})
