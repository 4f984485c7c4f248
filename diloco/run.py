"""One run from its settings to its report: check, create `spec.json`, launch, supervise, collect.

The launcher decides nothing about training: replicas agree among themselves, through the bucket, and the launcher reads
there how it went. It can be killed and started again with the same settings: the run resumes, or reports its result.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError
from diloco.exchange import layout
from diloco.exchange.store import check_store, open_store, read_if_there
from diloco.report import ReplicaLine, RunReport, read_report
from diloco.spec import claim_spec
from diloco.status import ReplicaStatus, RunStatus, claimed_members, read_beats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.exchange.layout import Member
    from diloco.exchange.records import Beat
    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaHandle, ReplicaResult, ServerlessExecutor
    from diloco.spec import RunSettings

POLL_EVERY = 0.3
"""Seconds between two looks at the processes."""
BEAT_EVERY = 1.0
"""Seconds between two looks at the beats."""

_COLLECT_SECONDS = 10.0  # for replicas that have ended


def make_diloco_run(
    executor: ServerlessExecutor,
    settings: RunSettings,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_status: Callable[[RunStatus], None] | None = None,
) -> RunReport:
    """Run to the end and report; :func:`run_replicas` for callers without an event loop."""
    return asyncio.run(run_replicas(executor, settings, storage_options=storage_options, on_status=on_status))


async def run_replicas(
    executor: ServerlessExecutor,
    settings: RunSettings,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_status: Callable[[RunStatus], None] | None = None,
) -> RunReport:
    """Check everything, launch the replicas, supervise them to their end, and report from the bucket.

    `on_status` is called about once a second. A run that has its result already is reported at once. Cancelling the
    task stops the replicas. Raises DilocoError for what is wrong before they start; later failures are in the report.
    """
    started = time.monotonic()
    preflight(settings)
    store = open_store(settings.uri, storage_options=storage_options)
    try:
        await check_store(store)
        await _check_output(settings, storage_options)
        await claim_spec(store, settings)
        if await _has_result(store):
            return await read_report(store, settings, wall_seconds=time.monotonic() - started)
        supervisor = _Supervisor(executor, settings, store, on_status, started, await claimed_members(store))
        return await supervisor.run()
    finally:
        await store.close()


def preflight(settings: RunSettings) -> None:
    """Raise ConfigurationError for what is known to fail before anything is written or started."""
    settings.check()
    if settings.default_trainer:
        from diloco.training.config import TrainConfig
        from diloco.training.config import preflight as check_training

        check_training(
            TrainConfig.from_kwargs(settings.trainer_kwargs),
            steps=settings.steps,
            sync_every=settings.sync_every,
            fragments=settings.fragments,
            sync_delay=settings.sync_delay,
            world_size=settings.replicas,
        )
    else:
        _find_module(settings.trainer_module)


def _find_module(name: str) -> None:
    """Look for a trainer's module where a replica will, the working folder first, without importing it."""
    path: Sequence[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109 - an import path's entries are strings
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ".".join(parts[:depth])
        found = PathFinder.find_spec(module, path) if path is not None else None
        if found is None:
            raise ConfigurationError(
                f"--trainer-module {name}: no module {module!r} in the working folder or among the installed packages;"
                " check its name, or add its folder to PYTHONPATH"
            )
        path = found.submodule_search_locations


async def _check_output(settings: RunSettings, storage_options: Mapping[str, Any] | None) -> None:
    """Find out now, not after the training, that the model can't be written."""
    uri = settings.output_uri
    if uri is None:
        return
    store = open_store(uri, storage_options=storage_options)
    try:
        await check_store(store)
    finally:
        await store.close()


async def _has_result(store: Store) -> bool:
    return await read_if_there(store, layout.RESULT) is not None


class _Supervisor:
    """The replicas of one launch, from their start until the last has ended."""

    def __init__(
        self,
        executor: ServerlessExecutor,
        settings: RunSettings,
        store: Store,
        on_status: Callable[[RunStatus], None] | None,
        started: float,
        earlier: frozenset[Member],
    ) -> None:
        self._executor = executor
        self._settings = settings
        self._store = store
        self._on_status = on_status
        self._started = started
        self._earlier = earlier
        self._handles: list[ReplicaHandle] = []
        self._beats: dict[int, Beat] = {}

    async def run(self) -> RunReport:
        await self._launch()
        watching = asyncio.create_task(self._watch())
        try:
            problem = await self._until_ended(watching)
        finally:
            watching.cancel()
            # Blocking on purpose: a task that is being cancelled must not return before the replicas are gone.
            self._executor.cancel(self._handles)
        results = await asyncio.to_thread(self._executor.collect, self._handles, timeout=_COLLECT_SECONDS)
        self._handles = self._executor.poll(self._handles)
        await self._observe()
        return await self._report(results, problem or _first_failure(results))

    async def _launch(self) -> None:
        launching = asyncio.ensure_future(
            asyncio.to_thread(self._executor.launch_replicas, self._settings.replica_specs())
        )
        try:
            self._handles = await asyncio.shield(launching)
        except asyncio.CancelledError:
            # The thread can't be interrupted, and what it starts must be stopped.
            self._executor.cancel(await launching)
            raise

    async def _until_ended(self, watching: asyncio.Task[None]) -> str | None:
        """Wait until all have ended, or return why it is pointless to wait on."""
        while True:
            self._handles = await asyncio.to_thread(self._executor.poll, self._handles)
            if all(handle.status not in ("pending", "running") for handle in self._handles):
                return None
            # Once the result is there, the others end by themselves and their ends change nothing.
            if self._too_few_left() and not await self._result_or_unknown():
                return self._explain_failure()
            if watching.done():
                watching.result()
            await asyncio.sleep(POLL_EVERY)

    def _dead(self) -> list[ReplicaHandle]:
        return [handle for handle in self._handles if handle.status in ("failed", "cancelled")]

    def _too_few_left(self) -> bool:
        """Whether rounds can't be committed any more by those that are left."""
        dead = len(self._dead())
        if dead == 0:
            return False
        return self._settings.policy == "strict" or len(self._handles) - dead < self._settings.min_replicas

    def _explain_failure(self) -> str:
        dead = self._dead()
        why = _first_failure(self._executor.collect(dead, timeout=_COLLECT_SECONDS)) or "a replica ended"
        if self._settings.policy == "strict":
            return why
        left = len(self._handles) - len(dead)
        return f"{why} (left: {left}, --min-replicas {self._settings.min_replicas})"

    async def _result_or_unknown(self) -> bool:
        try:
            return await _has_result(self._store)
        except DilocoError:
            return False

    async def _watch(self) -> None:
        while True:
            await self._observe()
            await asyncio.sleep(BEAT_EVERY)

    async def _observe(self) -> None:
        if self._on_status is None:
            return
        # An outage is the replicas' to survive or to report; the table shows what was known before it.
        with suppress(DilocoError):
            self._beats = await read_beats(self._store, self._earlier)
        replicas = (ReplicaStatus(h.rank, h.status, h.exit_code, self._beats.get(h.rank)) for h in self._handles)
        self._on_status(
            RunStatus(
                run_id=self._settings.run_id,
                steps=self._settings.steps,
                rounds=self._settings.rounds,
                seconds=time.monotonic() - self._started,
                replicas=tuple(replicas),
            )
        )

    async def _report(self, results: Sequence[ReplicaResult], error: str | None) -> RunReport:
        seconds = time.monotonic() - self._started
        try:
            return await read_report(
                self._store,
                self._settings,
                outcome={result.rank: result for result in results},
                ignore=self._earlier,
                wall_seconds=seconds,
                error=error,
            )
        except DilocoError as problem:
            return RunReport(
                run_id=self._settings.run_id,
                status="failed",
                rendezvous_uri=self._store.uri,
                replicas=[ReplicaLine(rank=result.rank, status=result.status) for result in results],
                rounds_expected=self._settings.rounds,
                wall_seconds=round(seconds, 3),
                error=error or f"the end of the run can't be read: {problem}",
            )


def _first_failure(results: Sequence[ReplicaResult]) -> str | None:
    """Say of the first rank that failed by itself how it ended and why."""
    for result in results:
        if result.status == "failed":
            return f"rank {result.rank} ended with exit code {result.exit_code}: {result.error}"
    return None
