"""The commands around a run on the tests' SageMaker: detached, watched, followed, stalled, too expensive, interrupted.

Each is a process of its own; where it says elsewhere, one with an empty home and nothing but the stack's outputs.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.sagemaker.runs import check_finished, jobs, objects, run, until
from tests.sagemaker.standin_requests import make_account, request
from tests.support.sagemaker.logs import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sagemaker.account import TestAccount

pytestmark = pytest.mark.timeout(400)

QUOTA = "ml.m5.xlarge for training job usage"


def logged(aws: TestAccount, run_id: str) -> dict[str, list[str]]:
    """What CloudWatch holds of a run, by rank, each line as `logs` prints it."""
    logs = aws.emulator.client("logs")
    found: dict[str, list[str]] = {}
    for job in jobs(aws, run_id):
        rank = job.name.split("-r")[-1].split("-s")[0]
        for stream in logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=f"{job.name}/")["logStreams"]:
            events = logs.get_log_events(
                logGroupName=GROUP, logStreamName=stream["logStreamName"], startFromHead=True, limit=10_000
            )["events"]
            found.setdefault(rank, []).extend(f"[{rank}] {event['message']}" for event in events)
    return found


def by_rank(out: str) -> dict[str, list[str]]:
    """Printed lines by their rank, in the order in which they were printed."""
    found: dict[str, list[str]] = {}
    for line in out.removesuffix("\n").split("\n"):
        found.setdefault(line[1 : line.index("]")], []).append(line)
    return found


def test_a_detached_run_is_watched_followed_and_collected_from_elsewhere(aws: TestAccount, tmp_path: Path) -> None:
    left = aws.run("run", *run(2, "away", "--detach", steps=8, sync_every=4))
    names = [job.name for job in jobs(aws, "away")]
    assert left.document == {"run_id": "away", "jobs": names}
    assert not all(job.terminal for job in jobs(aws, "away"))
    assert "`resume away` supervises them; `watch away`" in left.err

    elsewhere = aws.elsewhere(tmp_path)
    watching = elsewhere.launch("watch", "away")
    following = elsewhere.launch("logs", "away", "--follow")
    of_one = elsewhere.launch("logs", "away", "--rank", "1", "--follow")

    watched = elsewhere.finish(watching).out
    assert "round 2/2, step 8/8" in watched
    assert "run away has its result: `collect away`" in watched
    written = logged(aws, "away")
    assert len(written) == 2
    assert by_rank(elsewhere.finish(following).out) == written
    assert by_rank(elsewhere.finish(of_one).out) == {"1": written["1"]}

    collected = elsewhere.run("collect", "away", "--json").document
    check_finished(aws, "away", collected, 2)
    assert elsewhere.run("resume", "away", "--json").document["replicas"] == collected["replicas"]
    assert [job.name for job in jobs(aws, "away")] == names


@contextmanager
def another_s_job(aws: TestAccount) -> Iterator[None]:
    """A running job that is no business of the launcher's."""
    make_account(aws.emulator)
    name = "diloco-others"
    aws.service.call("CreateTrainingJob", request(name, "exec sleep 300"), "test")
    yield
    aws.service.call("StopTrainingJob", {"TrainingJobName": name}, "test")
    until(lambda: aws.service.job(name).terminal, "end", aws)


def test_a_stalled_run_is_reported_ended_by_its_cost_and_resumed(aws: TestAccount, tmp_path: Path) -> None:
    launcher = aws.launch("run", *run(2, "costly", "--max-cost", "0.5", steps=40, sync_every=4))
    # Rounds enough to come, that one of them is stopped.
    until(lambda: objects(aws, "rendezvous/costly/commits/"), "round", aws)
    late = next(job for job in jobs(aws, "costly") if "-r1-" in job.name)
    aws.service.freeze(late)
    elsewhere = aws.elsewhere(tmp_path)
    watching = elsewhere.launch("watch", "costly")

    def straggler() -> bool:
        beats = (json.loads(body) for body in objects(aws, "rendezvous/costly/beats/00000/").values())
        return any(beat["waiting_for"] == ["rank 1"] for beat in beats)

    until(straggler, "straggler", aws)
    told: list[dict[str, Any]] = elsewhere.run("status", "costly", "--json").document["jobs"]
    assert [job["waiting_for"] for job in told] == [["rank 1"], []]
    shown = next(line for line in elsewhere.run("status", "costly").out.splitlines() if "rank 1" in line)
    assert shown.split()[:2] == ["0", "waiting"]
    assert shown.rstrip().endswith("rank 1")

    # Meanwhile its two instances, and another's one, count against what others can have.
    with another_s_job(aws):
        fits = elsewhere.run("plan", "--replicas", "6", "--check", "--json").document
    assert fits["checked"]["in_use"] == {QUOTA: 2}
    assert any("1 more training jobs run in this account" in warning for warning in fits["checked"]["warnings"])
    too_many = elsewhere.run("plan", "--replicas", "7", "--check", code=1).out
    assert f"{QUOTA}: 8, 2 in use" in too_many
    assert f"the quota {QUOTA!r} is 8, other running jobs use 2 of it, and 7 are needed" in too_many
    assert "2 jobs have not ended after 0 s: the run goes on" in (
        elsewhere.run("collect", "costly", "--timeout", "0s", code=1).err
    )

    for job in jobs(aws, "costly"):  # as if both had run for two hours
        assert job.training_started is not None
        job.training_started -= 7200.0
    until(lambda: late.stop_asked, "end by --max-cost", aws)
    aws.service.freeze(late, frozen=False)
    ended = aws.finish(launcher, code=1)
    assert ended.document["status"] == "failed"
    assert "the run has cost about $0.9" in ended.document["error"]
    assert "--max-cost is $0.5" in ended.document["error"]
    assert [job.status for job in jobs(aws, "costly")] == ["Stopped", "Stopped"]
    watched = elsewhere.finish(watching, code=1).out
    assert "rank 0 waits for rank 1" in watched
    assert "run costly has no result: `resume costly`" in watched

    refused = elsewhere.run("resume", "costly", "--max-cost", "0.6", code=2).err
    assert "run costly has cost about $0.9" in refused
    assert len(jobs(aws, "costly")) == 2
    resumed = elsewhere.run("resume", "costly", "--max-cost", "5", "--json")
    check_finished(aws, "costly", resumed.document, 2)
    assert "cost: about $0.9" in resumed.err


@pytest.mark.parametrize("more", [(), ("--detach",)], ids=["supervised", "detached"])
def test_ctrl_c_during_submission_stops_what_was_submitted(aws: TestAccount, more: tuple[str, ...]) -> None:
    run_id = f"stopped-{len(more)}"
    faults = aws.service.faults
    faults.rates["CreateTrainingJob"], faults.burst, before = 0.01, 2, faults.throttled
    launcher = aws.launch("run", *run(4, run_id, *more))
    until(lambda: faults.throttled > before and len(jobs(aws, run_id)) == 2, "third submission", aws)
    started = time.monotonic()

    launcher.send_signal(signal.SIGINT)
    said = aws.finish(launcher, code=130).err

    assert time.monotonic() - started < 60  # a throttled submission alone is tried for two minutes
    assert "stopping the 2 jobs that were submitted" in said
    assert f"stopped by SIGINT; all jobs of this run are stopped. To go on: resume {run_id}" in said
    assert [job.status for job in jobs(aws, run_id)] == ["Stopped", "Stopped"]


def test_ctrl_c_before_the_first_job_says_how_to_start_again(aws: TestAccount) -> None:
    faults = aws.service.faults
    faults.rates["CreateTrainingJob"], faults.burst, before = 0.01, 0, faults.throttled
    launcher = aws.launch("run", *run(2, "nothing"))
    until(lambda: faults.throttled > before, "submission", aws)

    launcher.send_signal(signal.SIGINT)
    said = aws.finish(launcher, code=130).err

    assert "no job was started. To start: the same command with --run-id nothing" in said
    assert jobs(aws, "nothing") == []
    for command in ("logs", "watch", "resume", "collect"):
        assert "run nothing has no job in us-east-1" in aws.run(command, "nothing", code=2).err
