"""Submission as a transaction, and the executor around it, on the tests' SageMaker whose jobs do not run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cost import Prices
from diloco.errors import AccessDeniedError, ConfigurationError, DilocoError
from diloco.executors.base import ServerlessExecutor
from diloco.executors.sagemaker import SageMakerExecutor
from diloco.executors.sagemaker_submit import Submitter
from tests.sagemaker.test_limits import GOOD, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sagemaker import Service

QUICK: dict[str, Any] = {
    "describe_every": 0.0,
    "rate": 200.0,
    "settle_seconds": 20.0,
    "settle_every": 0.05,
    "look_every": 0.02,
}


@pytest.fixture
def service(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Service:
    server = serve()
    for name, value in {
        "AWS_ENDPOINT_URL_SAGEMAKER": server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    found: Service = server.service
    return found


def made(**changes: Any) -> SageMakerExecutor:
    return SageMakerExecutor(replace(GOOD, **changes), **QUICK)


def running(service: Service) -> list[str]:
    return sorted(job.name for job in service.jobs if not job.terminal)


def specs(count: int = 4) -> list[Any]:
    return [spec(rank) for rank in range(count)]


def test_it_is_an_executor() -> None:
    assert isinstance(made(), ServerlessExecutor)
    assert made().supports_inter_replica_network is False


def test_one_single_instance_job_a_rank(service: Service) -> None:
    handles = made().launch_replicas(specs())

    assert [handle.job_id for handle in handles] == [f"diloco-run-1-r{rank}-s1" for rank in range(4)]
    assert running(service) == [handle.job_id for handle in handles]
    assert service.job("diloco-run-1-r2-s1").tags == {
        "team": "research",
        "diloco:run-id": "run-1",
        "diloco:rank": "2",
        "diloco:rendezvous": "s3://sagemaker-bucket/rendezvous/run-1",
        "diloco:submission": "1",
    }


def test_again_it_adopts_what_runs_and_creates_what_is_missing(service: Service) -> None:
    made().launch_replicas(specs(2))

    handles = made().launch_replicas(specs(4))

    assert running(service) == [handle.job_id for handle in handles]
    assert [operation for operation, _ in service.history].count("CreateTrainingJob") == 4


def test_a_lost_answer_is_adopted_by_the_name_that_is_taken(service: Service) -> None:
    service.faults.lost_answers = 1

    handles = made().launch_replicas(specs(2))

    assert running(service) == [handle.job_id for handle in handles] == ["diloco-run-1-r0-s1", "diloco-run-1-r1-s1"]


def test_two_launchers_at_once_end_up_with_the_same_jobs(service: Service) -> None:
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append([h.job_id for h in made().launch_replicas(specs(6))]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[0] == found[1] == running(service)


@pytest.mark.parametrize(
    ("refusal", "error", "expected"),
    [
        (("ValidationException", "The image is broken."), ConfigurationError, "The image is broken"),
        (
            ("AccessDeniedException", "User: me is not authorized"),
            AccessDeniedError,
            "attach the stack's launcher policy",
        ),
        (("ResourceLimitExceeded", "Some limit."), DilocoError, "raise the quota"),
        (("InternalFailure", "boom"), DilocoError, "InternalFailure: boom"),
    ],
)
def test_if_one_can_not_be_submitted_all_are_stopped(
    service: Service, refusal: tuple[str, str], error: type[Exception], expected: str
) -> None:
    service.faults.refused_names["-r2-"] = refusal

    with pytest.raises(error, match=rf"rank 2 could not be submitted: .*{expected}.*nothing is left running"):
        made().launch_replicas(specs())

    assert running(service) == []
    assert len(service.jobs) == 2


def test_an_exceeded_quota_is_named_with_how_much_is_missing(service: Service) -> None:
    service.faults.quotas["ml.m5.xlarge for training job usage"] = 3

    with pytest.raises(
        DilocoError, match=r"quota 'ml\.m5\.xlarge for training job usage' is 3 and 3 are in use, so 1 more"
    ):
        made().launch_replicas(specs())

    assert running(service) == []


@pytest.mark.parametrize("listed", [True, False])
def test_a_name_that_another_run_has_taken_is_an_error_and_left_alone(
    service: Service, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made().launch_replicas([spec(1, rendezvous_uri="s3://another-bucket/rendezvous/run-1")])
    if not listed:  # a list may lag behind
        monkeypatch.setattr(Submitter, "names", lambda _self: {})

    with pytest.raises(
        ConfigurationError, match=r"diloco-run-1-r1-s1 is taken by another run .*choose another --run-id"
    ):
        made().launch_replicas(specs(2))

    # Stopping it would be the other run's loss.
    assert running(service) == ["diloco-run-1-r1-s1"]


@pytest.mark.parametrize(
    "message",
    [
        "Could not assume role arn:aws:iam::123456789012:role/x. Please ensure that the role exists",
        "Access denied to OutputDataConfig S3 bucket: b",
        "Access denied for repository: x",
    ],
)
def test_what_settles_by_itself_is_waited_for(service: Service, message: str) -> None:
    service.faults.refusals = [("ValidationException", message)] * 2

    made().launch_replicas(specs(2))

    assert len(running(service)) == 2


def test_what_does_not_settle_is_an_error(service: Service) -> None:
    service.faults.refused_names["-r1-"] = ("ValidationException", "Could not assume role x. Please ensure")
    executor = SageMakerExecutor(GOOD, **QUICK | {"settle_seconds": 0.5})

    with pytest.raises(DilocoError, match="rank 1 could not be submitted: Could not assume role"):
        executor.launch_replicas(specs(2))

    assert running(service) == []


def test_throttling_slows_it_down_and_nothing_else(service: Service) -> None:
    service.faults.rates["CreateTrainingJob"] = 10.0
    service.faults.burst = 1

    handles = made().launch_replicas(specs(8))

    assert running(service) == [handle.job_id for handle in handles]
    assert service.faults.throttled > 0


def test_a_job_that_ended_is_followed_by_the_next_submission(service: Service) -> None:
    [handle] = made().launch_replicas(specs(1))
    service.job(handle.job_id).enter("Failed", "Failed", "")

    [again] = made().launch_replicas(specs(1))

    assert again.job_id == "diloco-run-1-r0-s2"


def test_after_a_capacity_error_the_next_type_is_tried(service: Service) -> None:
    executor = made(spot=True, instance_types=("ml.g5.xlarge", "ml.g6.xlarge"))
    for expected in ("ml.g5.xlarge", "ml.g6.xlarge", "ml.g5.xlarge"):
        [handle] = executor.launch_replicas(specs(1))
        job = service.job(handle.job_id)
        assert job.instance_type == expected
        job.failure = "CapacityError: Unable to provision requested ML compute capacity."
        job.enter("Failed", "Failed", "")


def test_statuses_and_exit_codes(service: Service) -> None:
    executor = made()
    handles = executor.launch_replicas(specs(6))
    ends = [
        ("Completed", "Completed", None),
        ("Failed", "Failed", "AlgorithmError: rank 1 was fenced, exit code: 76"),
        ("Failed", "Failed", "ClientError: No data found."),
        ("Failed", "Failed", "InternalServerError: We encountered an internal error."),
        ("Stopped", "MaxRuntimeExceeded", None),
        ("Stopped", "Stopped", None),
    ]
    for handle, (primary, secondary, reason) in zip(handles, ends, strict=True):
        job = service.job(handle.job_id)
        job.failure = reason
        job.enter(primary, secondary, "")

    results = executor.collect(handles, timeout=10)

    assert [(result.status, result.exit_code) for result in results] == [
        ("succeeded", 0),
        ("failed", 76),
        ("failed", 78),
        ("failed", None),
        ("failed", 78),
        ("cancelled", None),
    ]
    errors = [result.error or "" for result in results]
    assert errors[1] == "rank 1 was fenced (diloco-run-1-r1-s1)"
    assert "stopped by --max-runtime" in errors[4]
    assert "stopped by somebody else" in errors[5]


def test_cancel_stops_all_and_releases_what_is_kept_warm(service: Service) -> None:
    executor = made(keep_alive=600)
    handles = executor.launch_replicas(specs(3))
    done = service.job(handles[0].job_id)
    service.faults.quotas["ml.m5.xlarge for training warm pool usage"] = 3
    done.enter("Completed", "Completed", "")
    service.keep_warm(done)

    executor.cancel(handles)

    assert running(service) == []
    assert done.warm_pool is not None
    assert done.warm_pool["Status"] == "Available"  # it ended by itself: that is what it is kept for
    assert executor.release(handles) == [done.name]
    assert service.job(done.name).describe()["WarmPoolStatus"]["Status"] == "Terminated"


def test_what_a_run_has_cost_ends_it(service: Service) -> None:
    executor = SageMakerExecutor(GOOD, max_cost=0.5, **QUICK)
    handles = executor.launch_replicas(specs(2))
    executor.poll(handles)
    assert executor.over_budget() is None
    for handle in handles:
        job = service.job(handle.job_id)
        job.training_started, job.training_ended = time.time() - 7200, time.time()
        job.enter("Completed", "Completed", "")

    executor.poll(handles)

    price = Prices.load().per_hour("ml.m5.xlarge")
    assert price is not None
    assert executor.spent()[0] == pytest.approx(2 * 2 * price, rel=0.01)
    assert "--max-cost is $0.5" in (executor.over_budget() or "")


def test_a_run_is_found_again_by_its_name_alone(service: Service) -> None:
    made().launch_replicas(specs(3))
    service.job("diloco-run-1-r1-s1").enter("Failed", "Failed", "")
    made().launch_replicas(specs(3))
    made(run_id="run-12").launch_replicas([spec(0)])

    handles = made().existing()

    assert [handle.job_id for handle in handles] == [
        "diloco-run-1-r0-s1",
        "diloco-run-1-r1-s2",
        "diloco-run-1-r2-s1",
    ]


def test_one_who_watches_finds_what_another_launcher_submits_and_lists_nothing(service: Service) -> None:
    made().launch_replicas(specs(1))
    watching = made()
    assert [handle.job_id for handle in watching.existing()] == ["diloco-run-1-r0-s1"]

    made().launch_replicas(specs(2))
    service.job("diloco-run-1-r0-s1").enter("Failed", "Failed", "")
    made().launch_replicas(specs(2))
    listed = [operation for operation, _ in service.history].count("ListTrainingJobs")
    found = watching.look_again(2)

    assert [(handle.job_id, handle.status) for handle in found] == [
        ("diloco-run-1-r0-s2", "running"),
        ("diloco-run-1-r1-s1", "running"),
    ]
    assert [operation for operation, _ in service.history].count("ListTrainingJobs") == listed


def test_what_earlier_submissions_have_cost_counts(service: Service) -> None:
    [handle] = made().launch_replicas(specs(1))
    job = service.job(handle.job_id)
    job.training_started, job.training_ended = time.time() - 7200, time.time()
    job.enter("Failed", "Failed", "")
    made().launch_replicas(specs(1))
    later = SageMakerExecutor(GOOD, max_cost=0.1, **QUICK)

    later.existing()

    assert "--max-cost is $0.1" in (later.over_budget() or "")


def test_a_launch_that_is_given_up_stops_what_it_has_submitted(service: Service) -> None:
    service.faults.rates["CreateTrainingJob"], service.faults.burst = 0.01, 2
    executor = made()

    def interrupt() -> None:
        while not service.faults.throttled:
            time.sleep(0.02)
        executor.give_up()

    threading.Thread(target=interrupt, daemon=True).start()

    with pytest.raises(
        DilocoError, match=r"rank 2 could not be submitted: the submission was given up .*the 2 submitted"
    ):
        executor.launch_replicas(specs())

    assert running(service) == []


def test_jobs_are_described_and_never_listed_while_they_run(service: Service) -> None:
    executor = made()
    handles = executor.launch_replicas(specs(2))
    for _ in range(5):
        handles = executor.poll(handles)

    operations = [operation for operation, _ in service.history]
    assert operations.count("ListTrainingJobs") == 1
    assert operations.count("DescribeTrainingJob") == 10
