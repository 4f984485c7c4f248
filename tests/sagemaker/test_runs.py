"""Whole runs on the tests' SageMaker: from `pulumi up` to equal bits, and through what goes wrong on the way.

Every job is a real process that trains; the launcher is `scripts/launch.py` as the user that the stack allows to.
"""

from __future__ import annotations

import io
import signal
import tarfile
import time
from typing import TYPE_CHECKING

import pytest

from tests.sagemaker.runs import check_finished, jobs, objects, run, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sagemaker.account import TestAccount

pytestmark = pytest.mark.timeout(400)


def test_from_pulumi_up_to_equal_bits(aws: TestAccount) -> None:
    started = time.monotonic()
    ended = aws.run("run", *run(4, "whole", "--model-from", "all"))
    check_finished(aws, "whole", ended.document, 4)

    collected = aws.run("collect", "whole", "--json")
    assert {line["digest"] for line in collected.document["replicas"]} == {
        line["digest"] for line in ended.document["replicas"]
    }
    # Each rank wrote the model as it holds it: byte for byte the same.
    archives = [body for key, body in objects(aws, "output/whole/").items() if key.endswith("/model.tar.gz")]
    assert len(archives) == 4
    contents = [files_of(body) for body in archives]
    assert contents[0].keys() >= {"model.safetensors", "config.json"}
    assert all(content == contents[0] for content in contents)

    status = aws.run("status", "whole", "--json").document
    assert [job["status"] for job in status["jobs"]] == ["succeeded"] * 4
    assert [entry["jobs"] for entry in aws.run("list", "--json").document if entry["run_id"] == "whole"] == [
        {"Completed": 4}
    ]
    logs = aws.run("logs", "whole").out.splitlines()
    assert {line.split("]")[0] for line in logs} == {f"[{rank}" for rank in range(4)}
    assert sum("diloco metric: eval_loss=" in line for line in logs) >= 4
    assert aws.service.problems == []
    assert time.monotonic() - started < 300


def files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        return {member.name: file.read() for member in members if (file := tar.extractfile(member)) is not None}


def test_a_spot_interruption_is_caught_up_by_the_same_job(aws: TestAccount) -> None:
    launcher = aws.launch("run", *run(2, "spot", "--spot", steps=16))
    until(lambda: any(key.endswith("00000001.json") for key in objects(aws, "rendezvous/spot/commits/")), "round", aws)

    taken = next(job for job in jobs(aws, "spot") if "-r1-" in job.name)
    aws.service.interrupt(taken)

    document = aws.finish(launcher).document
    check_finished(aws, "spot", document, 2)
    assert taken.restarts == 1
    assert len(jobs(aws, "spot")) == 2
    claims = objects(aws, "rendezvous/spot/members/00001/")
    assert len(claims) == 2  # the second start claimed the rank's next attempt


def test_a_rank_without_capacity_goes_to_the_next_instance_type(aws: TestAccount) -> None:
    aws.service.faults.no_capacity["ml.m5.xlarge"] = 1

    ended = aws.run("run", *run(2, "capacity", "--spot", "--instance-types", "ml.m5.xlarge,ml.c5.xlarge"))

    check_finished(aws, "capacity", ended.document, 2)
    failed = [job for job in jobs(aws, "capacity") if job.status == "Failed"]
    assert [job.instance_type for job in failed] == ["ml.m5.xlarge"]
    again = aws.service.job(failed[0].name.replace("-s1", "-s2"))
    assert again.instance_type == "ml.c5.xlarge"
    assert len(jobs(aws, "capacity")) == 3
    assert "Unable to provision" in ended.err


def test_a_launcher_that_is_killed_half_way_is_followed_by_one_that_adopts(aws: TestAccount) -> None:
    faults = aws.service.faults
    faults.rates["CreateTrainingJob"], faults.burst = 0.01, 2
    launcher = aws.launch("run", *run(4, "killed"))
    until(lambda: faults.throttled and len(jobs(aws, "killed")) == 2, "third submission", aws)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    first = {job.name for job in jobs(aws, "killed")}
    faults.do_not_throttle()

    ended = aws.run("run", *run(4, "killed"))

    check_finished(aws, "killed", ended.document, 4)
    assert first == {f"diloco-dev-killed-r{rank}-s1" for rank in (0, 1)}
    assert {job.name for job in jobs(aws, "killed")} == first | {f"diloco-dev-killed-r{rank}-s1" for rank in (2, 3)}


def test_a_run_is_cancelled_and_resumed_from_elsewhere(aws: TestAccount, tmp_path: Path) -> None:
    launcher = aws.launch("run", *run(2, "cancelled", steps=12, sync_every=4))
    until(lambda: objects(aws, "rendezvous/cancelled/commits/"), "round", aws)
    late = next(job for job in jobs(aws, "cancelled") if "-r1-" in job.name)
    aws.service.freeze(late)  # so that the run does not end before it is cancelled
    elsewhere = aws.elsewhere(tmp_path)

    cancelling = elsewhere.launch("cancel", "cancelled")
    until(lambda: late.stop_asked, "cancellation", aws)
    aws.service.freeze(late, frozen=False)

    assert "2 jobs stopped" in elsewhere.finish(cancelling).out
    left = aws.finish(launcher, code=1).document
    assert left["status"] == "failed"
    assert "took this run over" in left["error"]
    assert [job.status for job in jobs(aws, "cancelled")] == ["Stopped", "Stopped"]
    assert "no job of it was running; nothing of it runs" in elsewhere.run("cancel", "cancelled").out
    document = elsewhere.run("resume", "cancelled", "--json").document
    check_finished(aws, "cancelled", document, 2)
    assert len(jobs(aws, "cancelled")) == 4


def test_the_smoke_test_of_a_real_account(aws: TestAccount) -> None:
    """The same script, on the emulators: it spends nothing unasked, and compares what both jobs wrote."""
    unasked = aws.script("smoke_aws.py", code=2)
    assert "about $0.08" in unasked.out
    assert not any("smoke" in job.name for job in aws.service.jobs)

    asked = aws.script("smoke_aws.py", AWS_SMOKE="1")

    assert "equal     model.safetensors" in asked.out
    assert "byte for byte" in asked.out
