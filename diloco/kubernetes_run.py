"""A run on a cluster, found again by its Job: the Job's own arguments say how it was started, whoever started it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args

from diloco.detached import stop_launcher
from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange.clock import SystemClock
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import open_store
from diloco.executors.kubernetes_manifest import (
    CREDENTIALS,
    ENDPOINT_ANNOTATION,
    GPU,
    RAY_VARIABLES,
    RUN_LABEL,
    TOKEN,
    Kind,
    PodSettings,
)
from diloco.executors.kubernetes_workloads import WORKLOADS, workload_of
from diloco.report import read_report
from diloco.run import Pace
from diloco.spec import LAUNCHER_VARIABLE, RunSettings
from diloco.spec_record import SCHEDULE
from diloco.status import ReplicaStatus, RunStatus, read_beats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaHandle, ReplicaResult
    from diloco.executors.kubernetes import KubernetesExecutor
    from diloco.executors.kubernetes_clients import Clients
    from diloco.report import RunReport

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_OWN_LABELS = ("app.kubernetes.io/", "diloco/", "kueue.x-k8s.io/", "batch.kubernetes.io/", "job-name", "controller-uid")

PACE = Pace(processes=1.0, status=2.0)
"""How often a launcher looks: the cluster supervises by itself."""


@dataclass(frozen=True)
class Restored:
    """A run as it was started, found again."""

    settings: RunSettings
    pods: PodSettings


def restore(job: Mapping[str, Any]) -> Restored:
    """Find out how a run was started, by its Job. Raises ConfigurationError for a Job that is no run's."""
    metadata, words = job["metadata"], WORKLOADS[workload_of(job)].arguments(job)
    given = dict(zip(words[::2], words[1::2], strict=False))
    try:
        run_id = metadata["labels"][RUN_LABEL]
        kwargs = json.loads(given["--trainer-kwargs-json"])
        exchange = ExchangeSettings.model_validate_json(given["--exchange-json"])
        uri, world_size = given["--rendezvous"], given["--world-size"]
    except (KeyError, ValueError) as problem:
        raise ConfigurationError(f"the Job {metadata['name']} was not made by this project: {problem}") from None
    output = exchange.output_uri
    settings = RunSettings.checked(
        replicas=int(world_size),
        run_id=run_id,
        rendezvous=uri.removesuffix(f"/{run_id}"),
        output=None if output is None else output.removesuffix(f"/{run_id}"),
        trainer_module=given["--trainer-module"],
        trainer_fn=given["--trainer-fn"],
        trainer_kwargs={name: value for name, value in kwargs.items() if name not in SCHEDULE},
        exchange=exchange.model_copy(update={"output_uri": None}),
        max_restarts=0,  # the cluster's own count
        **{name: kwargs[name] for name in SCHEDULE if name in kwargs},
    )
    return Restored(settings, _pod_settings(job, run_id))


def _pod_settings(job: Mapping[str, Any], run_id: str) -> PodSettings:
    metadata, kind = job["metadata"], workload_of(job)
    template = WORKLOADS[kind].template(job)["spec"]
    container = template["containers"][0]
    requests = container["resources"]["requests"]
    plain = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
    secrets = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["name"]
        for each in container.get("env", ())
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    memory = next(volume["emptyDir"] for volume in template["volumes"] if volume["name"] == "shm")
    spread = template.get("topologySpreadConstraints", [])
    own = {"AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", LAUNCHER_VARIABLE, "JOB_COMPLETION_INDEX"}
    if kind == "rayjob":
        own.update(RAY_VARIABLES)
    return PodSettings(
        run_id=run_id,
        namespace=metadata["namespace"],
        image_uri=container["image"],
        service_account=template.get("serviceAccountName", "default"),
        prefix=metadata["name"].removesuffix(f"-{run_id}"),
        cpu=requests["cpu"],
        memory=requests["memory"],
        gpus=int(requests.get(GPU, 0)),
        shared_memory=memory["sizeLimit"],
        grace_seconds=template["terminationGracePeriodSeconds"],
        priority_class=template.get("priorityClassName"),
        node_selector=template.get("nodeSelector", {}),
        tolerations=template.get("tolerations", ()),
        spread_over=spread[0]["topologyKey"] if spread else None,
        user=template["securityContext"]["runAsUser"],
        credentials_secret=secrets.get(CREDENTIALS[0][0]),
        token_secret=secrets.get(TOKEN),
        endpoint_url=plain.get("AWS_ENDPOINT_URL_S3"),
        region=plain.get("AWS_REGION"),
        env={name: value for name, value in plain.items() if name not in own},
        labels={name: value for name, value in metadata["labels"].items() if not name.startswith(_OWN_LABELS)},
        workload=kind,
        **WORKLOADS[kind].own_settings(job),
    )


def launcher_environment(endpoint_url: str | None) -> dict[str, str | None]:
    """What this process needs to reach the pods' bucket. Its own environment comes first: inside of a cluster a service
    has another address than outside.
    """
    if endpoint_url is None or any(name in os.environ for name in _ENDPOINTS):
        return {}
    return {"AWS_ENDPOINT_URL_S3": endpoint_url}


def storage_options(region: str | None) -> dict[str, Any]:
    """How s3fs reaches the bucket: the launcher's own region may be another."""
    return {} if region is None else {"client_kwargs": {"region_name": region}}


def found_job(clients: Clients, namespace: str, run_id: str) -> dict[str, Any]:
    """The run's Job, of whichever kind. Raises ConfigurationError if there is none."""
    from diloco.executors.kubernetes import KubernetesExecutor

    for kind in _kinds():
        with _unless_denied(kind):
            job = KubernetesExecutor(PodSettings(run_id, namespace, "", workload=kind), clients=clients).job()
            if job is not None:
                return job
    raise ConfigurationError(
        f"run {run_id} has no Job in namespace {namespace}: `list` shows those that have; `run --run-id`"
        " starts it again"
    )


def _kinds() -> tuple[Kind, ...]:
    return get_args(Kind)


def _unless_denied(kind: Kind) -> AbstractContextManager[None]:
    """Other kinds than the default are looked for where the launcher's Role has them."""
    return nullcontext() if kind == "job" else suppress(ConfigurationError)


def endpoint_of(job: Mapping[str, Any]) -> str | None:
    """The S3 endpoint that the run's pods use, None for Amazon's."""
    found: str | None = job["metadata"].get("annotations", {}).get(ENDPOINT_ANNOTATION)
    return found


def open_run(restored: Restored) -> Store:
    """The store of a run, with retries."""
    store = open_store(restored.settings.uri, storage_options=storage_options(restored.pods.region))
    return RetryingStore(store, SystemClock(), budget=ExchangeSettings().retry_for)


async def run_status(store: Store, restored: Restored, executor: KubernetesExecutor, seconds: float) -> RunStatus:
    """A run at this moment, as its pods and its beats say it."""
    settings = restored.settings
    beats = await read_beats(store, frozenset())
    replicas = [
        ReplicaStatus(state.rank, state.status, state.exit_code, beats.get(state.rank), state.restarts, note=state.why)
        for state in executor.states()
    ]
    return RunStatus(settings.run_id, settings.steps, settings.rounds, seconds, tuple(replicas))


async def cancel_run(restored: Restored, executor: KubernetesExecutor) -> list[ReplicaHandle]:
    """Stop a run for good: its launcher, wherever it is, then its Job. Returns the ranks that still ran."""
    await stop_launcher(open_run(restored))
    handles = await asyncio.to_thread(executor.existing)
    running = [handle for handle in handles if not handle.has_ended]
    await asyncio.to_thread(executor.cancel, handles)
    return running


async def report_of(restored: Restored, results: Sequence[ReplicaResult], *, wall_seconds: float) -> RunReport:
    """Read a run's report, with how its pods ended."""
    store = open_run(restored)
    try:
        outcome = {result.rank: result for result in results}
        return await read_report(store, restored.settings, outcome=outcome, wall_seconds=wall_seconds)
    finally:
        await store.close()


def list_runs(clients: Clients, namespace: str) -> list[dict[str, Any]]:
    """The namespace's runs, newest first: `run_id`, `started` (UTC), `replicas` (how many by status).

    Raises DilocoError.
    """
    found: list[dict[str, Any]] = []
    for kind in _kinds():
        with _unless_denied(kind):
            found += WORKLOADS[kind].find(clients, namespace, RUN_LABEL)
    runs = []
    for job in sorted(found, key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True):
        counts = Counter(WORKLOADS[workload_of(job)].counts(job))
        started = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
        runs.append(
            {
                "run_id": job["metadata"]["labels"][RUN_LABEL],
                "started": f"{started:%Y-%m-%d %H:%M}",
                "replicas": +counts,
            }
        )
    return runs


def scale_run(restored: Restored, executor: KubernetesExecutor, replicas: int) -> int:
    """Change how many replicas a running run has; returns how many it had. Raises DilocoError."""
    settings = restored.settings
    if replicas < 1:
        raise DilocoError(f"--replicas {replicas}: use at least 1; `cancel` stops the run")
    return executor.scale(replicas, policy=settings.policy, min_replicas=settings.min_replicas)
