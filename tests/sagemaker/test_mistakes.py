"""What a user does wrong at the command line: one line that says what happened and what to do, and the exit code."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from diloco.cli import main
from tests.sagemaker.runs import SMALL, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sagemaker.account import TestAccount

    Say = Callable[..., str]

NO_RUN = "no run typo under s3://.*/rendezvous: `list` shows the runs that have jobs"


@pytest.fixture
def say(aws: TestAccount, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command in this process, as the launcher; returns what it said, which is one line of an error."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(aws.folder)

    def said(*arguments: str, outputs: Path | None = aws.outputs, code: int = 2) -> str:
        where = [] if outputs is None else ["--outputs", str(outputs)]
        assert main([*arguments, *where]) == code
        out, err = capsys.readouterr()
        assert out == ""
        return one_line(err)

    return said


def one_line(err: str) -> str:
    *before, last = err.splitlines()
    assert all(line.startswith("warning: ") for line in before), err
    assert last.startswith("diloco: error: ")
    return last


RUN = ("run", "--replicas", "2", "--steps", "4", "--sync-every", "2", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(((name, "typo"), NO_RUN) for name in ("status", "watch", "logs", "cancel", "collect", "resume")),
        (("status", "A_Typo"), "'A_Typo' is no run id: use lower-case letters, digits and hyphens"),
        (("collect", "typo", "--timeout", "soon"), "'soon' is no time: write 90, 90s, 30m, 2h or 5d"),
        ((*RUN, "--spot", "--keep-alive", "30m"), "--keep-alive does not go with --spot: .*; leave one out"),
        ((*RUN, "--instance-types", "ml.g5.2xlrage"), r"'ml.g5.2xlrage': is none .* did you mean ml\.g5\.2xlarge\?"),
        ((*RUN, "--instance-types", ","), "no instance type: give --instance-type"),
        ((*RUN, "--keep-alive", "30m"), "the quota 'ml.m5.xlarge for training warm pool usage' is 0 and 2 are needed"),
        ((*RUN, "--replicas", "9"), "the quota 'ml.m5.xlarge for training job usage' is 8 and 9 are needed: raise it"),
        ((*RUN, "--max-runtime", "6d"), "--max-runtime 518400 s is above the quota 'Longest run time"),
        ((*RUN, "--local"), "say where the replicas run"),
        ((*RUN, "--prices", "no-such-file.json"), "no-such-file.json"),
        ((*RUN, "--data", "texts/*.txt"), r"--data texts/\*\.txt is a path of this machine, and the replicas run"),
        (
            (*RUN, "--spot", "--keep-alive", "30m", "--max-runtime", "29d", "--instance-type", "ml.p4d.24xlarge"),
            r"3 problems: \(1\) --max-runtime .*\(2\) --keep-alive .*\(3\) --instance-type ml\.p4d\.24xlarge has 8",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(
    aws: TestAccount, say: Say, arguments: tuple[str, ...], expected: str
) -> None:
    before = len(aws.service.jobs)

    assert re.search(expected, say(*arguments))

    assert len(aws.service.jobs) == before


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"--outputs .*gone\.json: No such file or directory: write it with `pulumi stack output --json"),
        ("{", "no JSON"),
        ("{}", "missing: .*run `pulumi up`"),
    ],
)
def test_outputs_that_are_none(say: Say, tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "gone.json"
    if content is not None:
        path.write_text(content)

    assert re.search(expected, say("status", "typo", outputs=path))


def test_neither_stack_nor_outputs(say: Say) -> None:
    assert "name the outputs by --stack NAME or by --outputs FILE" in say("status", "typo", outputs=None)


def test_the_outputs_of_another_region(say: Say, aws: TestAccount, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(aws.stack.outputs() | {"region": "eu-west-1"}))

    assert "the image is in us-east-1 and the jobs are in eu-west-1" in say(*RUN, outputs=other)


def test_without_credentials_the_line_says_to_log_in(aws: TestAccount) -> None:
    nobody = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    started = [aws.launch(*command, **nobody) for command in (("status", "typo"), ("list",), ("run", *run(2, "x")))]

    for process in started:
        said = one_line(aws.finish(process, code=2).err)
        assert re.search("no (usable )?AWS credentials.*AWS_PROFILE", said)


def test_with_credentials_of_nobody_the_line_says_whose_are_missing(aws: TestAccount) -> None:
    nobody = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "x" * 40}
    started = [aws.launch(*command, **nobody) for command in (("status", "typo"), ("list",))]

    for process in started:
        said = one_line(aws.finish(process, code=2).err)
        assert re.search("AWS_PROFILE|launcher policy|credentials", said)
