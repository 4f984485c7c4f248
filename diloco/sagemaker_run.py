"""A run on SageMaker from a stack's outputs, and again from what it left: its job, its `spec.json`, its beats."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

from diloco.detached import stop_launcher
from diloco.errors import ConfigurationError
from diloco.exchange import layout
from diloco.exchange.clock import SystemClock
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import open_store, read_if_there
from diloco.executors.sagemaker_clients import Clients
from diloco.executors.sagemaker_errors import explained
from diloco.executors.sagemaker_request import (
    DATA_CHANNEL,
    EXCHANGE_VARIABLE,
    MODEL_VARIABLE,
    SECRET_VARIABLE,
    JobSettings,
    parse_job_name,
)
from diloco.report import read_report
from diloco.run import Pace
from diloco.spec import RunSettings
from diloco.spec_record import SpecRecord
from diloco.status import ReplicaStatus, RunStatus, read_beats
from diloco.supervisor import Backoff

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.exchange.records import Beat
    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaHandle, ReplicaResult
    from diloco.executors.sagemaker import SageMakerExecutor
    from diloco.report import RunReport
    from diloco.stack import StackOutputs

_RUN = re.compile(r"(?P<run>.+)-r\d+-s\d+")


def job_settings(outputs: StackOutputs, run_id: str, **options: Any) -> JobSettings:
    """What all jobs of a run have in common, in the environment that a stack describes."""
    return JobSettings(
        run_id=run_id,
        region=outputs.region,
        account=outputs.account,
        image_uri=outputs.image_uri,
        role_arn=outputs.sagemaker_role_arn,
        output_uri=outputs.output_uri,
        prefix=outputs.job_name_prefix,
        kms_key_arn=outputs.kms_key_arn,
        subnet_ids=tuple(outputs.subnet_ids),
        security_group_ids=tuple(outputs.security_group_ids),
        tags=dict(outputs.tags),
        **options,
    )


def data_uri(settings: RunSettings) -> str | None:
    """The run's data, if it is in a bucket and so becomes a channel of the jobs."""
    data = settings.trainer_kwargs.get("data")
    return data if isinstance(data, str) and data.startswith("s3://") else None


def storage_options(outputs: StackOutputs) -> dict[str, Any]:
    """How s3fs reaches the stack's bucket: the launcher's own region may be another."""
    return {"client_kwargs": {"region_name": outputs.region}}


def pace(replicas: int) -> Pace:
    """How often a launcher looks: jobs come and go in minutes, and AWS counts calls."""
    return Pace(processes=1.0, status=max(2.0, replicas / 4), restarts=Backoff(first=5.0, most=300.0, well=900.0))


def describe_every(replicas: int) -> float:
    """Seconds between two looks at one job, so that all of them together stay below 10 calls a second."""
    return max(2.0, replicas / 10)


@dataclass(frozen=True)
class Restored:
    """A run as it was started, found again."""

    settings: RunSettings
    jobs: JobSettings


async def restore(outputs: StackOutputs, run_id: str, job: Mapping[str, Any]) -> Restored:
    """Find out how a run was started, by its `spec.json` and one of its jobs.

    Raises ConfigurationError if there is no such run.
    """
    spec = await read_spec(outputs, run_id)
    environment = job.get("Environment", {})
    exchange = ExchangeSettings.model_validate(
        json.loads(environment.get(EXCHANGE_VARIABLE, "{}"))
        | {"policy": spec.policy, "min_replicas": spec.min_replicas if spec.policy == "skip" else None}
    )
    output = exchange.output_uri
    settings = RunSettings.checked(
        **spec.model_dump(include={*RunSettings.model_fields} & {*SpecRecord.model_fields}),
        rendezvous=outputs.rendezvous_uri,
        output=None if output is None else output.removesuffix(f"/{run_id}"),
        exchange=exchange.model_copy(update={"output_uri": None} | spec.wire),
    )
    resources, stopping = job["ResourceConfig"], job["StoppingCondition"]
    preferences = [entry["InstanceType"] for entry in resources.get("InstancePreferences", ())]
    channels = {each["ChannelName"]: each["DataSource"]["S3DataSource"] for each in job.get("InputDataConfig", ())}
    jobs = job_settings(
        outputs,
        run_id,
        instance_types=tuple(preferences or [resources["InstanceType"]]),
        spot=bool(job.get("EnableManagedSpotTraining")),
        max_runtime=stopping["MaxRuntimeInSeconds"],
        max_wait=stopping.get("MaxWaitTimeInSeconds"),
        keep_alive=resources.get("KeepAlivePeriodInSeconds", 0),
        volume_gb=resources.get("VolumeSizeInGB") or JobSettings.volume_gb,
        data_uri=channels[DATA_CHANNEL]["S3Uri"] if DATA_CHANNEL in channels else None,
        token_secret_arn=environment.get(SECRET_VARIABLE),
        model=environment.get(MODEL_VARIABLE, JobSettings.model),
        retries=job.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0),
        uses_all_gpus=True,  # it was said when the run was started
    )
    return Restored(settings, jobs)


async def read_spec(outputs: StackOutputs, run_id: str) -> SpecRecord:
    """Read a run's `spec.json`. Raises ConfigurationError if there is no such run."""
    store = open_run(outputs, run_id)
    try:
        data = await read_if_there(store, layout.SPEC)
    finally:
        await store.close()
    if data is None:
        raise ConfigurationError(
            f"no run {run_id} under {outputs.rendezvous_uri}: `list` shows the runs that have jobs"
        )
    return SpecRecord.from_json(data, layout.SPEC)


def open_run(outputs: StackOutputs, run_id: str) -> Store:
    """The store of a run, with retries."""
    if not layout.RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"{run_id!r} is no run id: use lower-case letters, digits and hyphens")
    uri = f"{outputs.rendezvous_uri.rstrip('/')}/{run_id}"
    store = open_store(uri, storage_options=storage_options(outputs))
    return RetryingStore(store, SystemClock(), budget=ExchangeSettings().retry_for)


async def run_status(store: Store, spec: SpecRecord, handles: Sequence[ReplicaHandle], seconds: float) -> RunStatus:
    """A run at this moment, as its jobs and its beats say it."""
    beats = await read_beats(store, frozenset())
    replicas = [_replica(handle, beats.get(handle.rank)) for handle in handles]
    rounds = spec.steps // spec.sync_every * spec.fragments
    return RunStatus(spec.run_id, spec.steps, rounds, seconds, tuple(replicas))


def _replica(handle: ReplicaHandle, beat: Beat | None) -> ReplicaStatus:
    parsed = parse_job_name(handle.job_id)
    restarts = parsed[1] - 1 if parsed is not None else 0
    return ReplicaStatus(handle.rank, handle.status, handle.exit_code, beat, restarts)


async def cancel_run(outputs: StackOutputs, run_id: str, executor: SageMakerExecutor) -> list[ReplicaHandle]:
    """Stop a run for good: its launcher, then its jobs, then what they keep warm. Returns the jobs that were stopped.

    Raises DilocoError.
    """
    await stop_launcher(open_run(outputs, run_id))
    handles = await asyncio.to_thread(executor.existing)
    running = [handle for handle in handles if not handle.has_ended]
    await asyncio.to_thread(executor.cancel, handles)
    await asyncio.to_thread(executor.release, handles)
    return running


async def report_of(
    outputs: StackOutputs, run_id: str, results: Sequence[ReplicaResult], *, wall_seconds: float
) -> RunReport:
    """Read a run's report, with how its jobs ended."""
    spec = await read_spec(outputs, run_id)
    settings = RunSettings.checked(
        **spec.model_dump(include={*RunSettings.model_fields} & {*SpecRecord.model_fields}),
        rendezvous=outputs.rendezvous_uri,
        exchange={"policy": spec.policy} | spec.wire,
    )
    store = open_run(outputs, run_id)
    try:
        outcome = {result.rank: result for result in results}
        return await read_report(store, settings, outcome=outcome, wall_seconds=wall_seconds)
    finally:
        await store.close()


def list_runs(outputs: StackOutputs) -> list[dict[str, Any]]:
    """The stack's runs that have jobs, newest first: `run_id`, `started` (UTC), `jobs` (how many by status).

    Raises DilocoError.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    prefix = f"{outputs.job_name_prefix}-"
    runs: dict[str, dict[str, Any]] = {}
    try:
        pages = (
            Clients(outputs.region)
            .sagemaker.get_paginator("list_training_jobs")
            .paginate(NameContains=prefix, SortBy="CreationTime", PaginationConfig={"PageSize": 100})
        )
        for page in pages:
            for job in page["TrainingJobSummaries"]:
                found = _RUN.fullmatch(job["TrainingJobName"].removeprefix(prefix))
                if found is None or not job["TrainingJobName"].startswith(prefix):
                    continue
                run = runs.setdefault(found["run"], {"run_id": found["run"], "started": "", "jobs": Counter()})
                run["jobs"][job["TrainingJobStatus"]] += 1
                run["started"] = f"{job['CreationTime'].astimezone(UTC):%Y-%m-%d %H:%M}"  # the oldest comes last
    except (BotoCoreError, ClientError) as problem:
        raise explained(problem) from None
    return list(runs.values())
