"""One run from its settings to its report: check, create `spec.json`, launch, supervise, collect.

The launcher decides nothing about training: replicas agree among themselves, through the bucket, and the launcher reads
there how it went. It relaunches those that die (:mod:`diloco.supervisor` says which and when). It can be killed and
started again with the same settings: the run resumes, or reports its result.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from diloco.errors import DilocoError, ExitCode
from diloco.exchange.launchers import BEAT_EVERY, DEAD_AFTER, claim_launcher
from diloco.exchange.store import open_store
from diloco.executors.base import ReplicaResult
from diloco.preflight import begin, check_launch, has_result
from diloco.report import ReplicaLine, RunReport, read_report
from diloco.status import ReplicaStatus, RunStatus, claimed_members, newest_claim, read_beats
from diloco.supervisor import Backoff, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diloco.exchange.launchers import Launcher
    from diloco.exchange.layout import Member
    from diloco.exchange.records import Beat
    from diloco.executors.base import ReplicaHandle, ReplicaSpec, ServerlessExecutor
    from diloco.spec import RunSettings

_COLLECT_SECONDS = 10.0  # for replicas that have ended
_RESULT_EVERY = 5.0
_AFTER_RESULT = 60.0  # the last evaluation and the report come after the result


@dataclass(frozen=True)
class Pace:
    """How often a launcher does what it does. Seconds."""

    processes: float = 0.3
    """Between two looks at the processes."""
    status: float = 1.0
    """Between two looks at the replicas' beats."""
    beats: float = BEAT_EVERY
    """Between two beats of the launcher itself."""
    dead_after: float = DEAD_AFTER
    """Until an earlier launcher whose beat does not change is dead."""
    restarts: Backoff = field(default_factory=Backoff)
    """Before a rank that died is relaunched."""


PACE = Pace()


def make_diloco_run(
    executor: ServerlessExecutor,
    settings: RunSettings,
    *,
    storage_options: Mapping[str, Any] | None = None,
    takeover: bool = False,
    on_status: Callable[[RunStatus], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    stop_when: Callable[[], str | None] | None = None,
    pace: Pace | None = None,
) -> RunReport:
    """Run to the end and report; :func:`run_replicas` for callers without an event loop."""
    return asyncio.run(
        run_replicas(
            executor,
            settings,
            storage_options=storage_options,
            takeover=takeover,
            on_status=on_status,
            on_note=on_note,
            stop_when=stop_when,
            pace=pace,
        )
    )


async def run_replicas(
    executor: ServerlessExecutor,
    settings: RunSettings,
    *,
    storage_options: Mapping[str, Any] | None = None,
    takeover: bool = False,
    on_status: Callable[[RunStatus], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    stop_when: Callable[[], str | None] | None = None,
    pace: Pace | None = None,
) -> RunReport:
    """Check everything, launch the replicas, supervise them to their end, and report from the bucket.

    `takeover` replaces another launcher of this run without waiting for its end. `on_status` is called about once a
    second and whenever a replica has ended, `on_note` with lines for people about the launch itself; `stop_when` says
    why the run must end now, if it must (it is asked after each look at the replicas). A run that has its result is
    reported at once. Cancelling the task stops the replicas. Raises DilocoError for what is wrong before they start;
    later failures are in the report.
    """
    started = time.monotonic()
    pace = pace or PACE
    check_launch(executor, settings)
    store = open_store(settings.uri, storage_options=storage_options)
    try:
        store = await begin(store, settings, storage_options)
        if await has_result(store):
            return await read_report(store, settings, wall_seconds=time.monotonic() - started)
        launcher = await claim_launcher(
            store, takeover=takeover, dead_after=pace.dead_after, beat_every=pace.beats, on_wait=on_note
        )
        if on_note is not None:
            on_note(f"run {settings.run_id}: {settings.uri}")
        launch = _Launch(executor, settings, launcher, on_status, stop_when, started, pace)
        return await launch.run()
    finally:
        await store.close()


async def start(executor: ServerlessExecutor, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
    """Launch replicas in a thread of its own. Cancelled, it returns once all that was launched is stopped."""
    launching = asyncio.ensure_future(asyncio.to_thread(executor.launch_replicas, specs))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        # The thread can't be interrupted, and what it starts must be stopped.
        with suppress(DilocoError):
            executor.cancel(await launching)
        raise


class _Launch:
    """The replicas of one launch, from their start until the last has ended."""

    def __init__(
        self,
        executor: ServerlessExecutor,
        settings: RunSettings,
        launcher: Launcher,
        on_status: Callable[[RunStatus], None] | None,
        stop_when: Callable[[], str | None] | None,
        started: float,
        pace: Pace,
    ) -> None:
        self._executor = executor
        self._settings = settings
        self._launcher = launcher
        self._store = launcher.store
        self._on_status = on_status
        self._stop_when = stop_when
        self._started = started
        self._pace = pace
        self._specs = settings.replica_specs(launcher=launcher.record.nonce)
        self._supervisor = Supervisor(
            range(settings.replicas),
            policy=settings.policy,
            min_replicas=settings.min_replicas,
            max_restarts=settings.max_restarts,
            backoff=pace.restarts,
        )
        self._handles: dict[int, ReplicaHandle] = {}
        self._results: dict[int, ReplicaResult] = {}  # how each rank's last process ended
        self._notes: dict[int, str] = {}
        self._undecided: set[int] = set()  # ranks that have ended, of which it is not said yet what follows
        self._earlier: frozenset[Member] = frozenset()  # of earlier launches
        self._beats: dict[int, Beat] = {}
        self._outdated: dict[int, int] = {}  # the attempt before a rank's last restart
        self._over = False  # the result is there
        self._over_since: float | None = None
        self._look_again = 0.0

    async def run(self) -> RunReport:
        """Launch, supervise, stop, report."""
        async with self._launcher.holding(self._pace.beats) as beating:
            self._earlier = await claimed_members(self._store)
            problem = await self._run(beating)
            return await self._report(problem)

    async def _run(self, beating: asyncio.Task[None]) -> str | None:
        """Launch the replicas and wait for their end; returns why the run failed, if it is known here."""
        watching: asyncio.Task[None] | None = None
        try:
            self._handles = {handle.rank: handle for handle in await start(self._executor, self._specs)}
            self._supervisor.launched(time.monotonic())
            self._earlier = _without_adopted(self._earlier, self._handles)
            watching = asyncio.create_task(self._watch())
            problem = await self._until_ended([beating, watching])
        finally:
            if watching is not None:
                watching.cancel()
            # Blocking on purpose: a task that is being cancelled must not return before the replicas are gone.
            self._executor.cancel(list(self._handles.values()))
        await self._see_who_ended()
        self._undecided.clear()
        await self._observe()
        return problem

    async def _until_ended(self, tasks: Sequence[asyncio.Task[None]]) -> str | None:
        """Wait until all have ended for good; returns why the run failed, or why it is pointless to wait on."""
        while True:
            news = await self._see_who_ended()
            for result in news:
                await self._decide_by(result)
            due = self._supervisor.due(time.monotonic())
            if news or due:
                await self._look_for_result()
                # One that was fenced may be the successor's doing, and a restart would fence the successor's replica.
                await self._launcher.look()
            if self._launcher.successor is not None:
                return f"{self._launcher.successor} took this run over: this launcher stopped its own replicas"
            if not self._over:
                failure = self._supervisor.failure() or (self._stop_when and self._stop_when())
                if failure:
                    return failure
                for rank in due:
                    await self._relaunch(rank)
            if not self._running() and (self._over or self._supervisor.idle):
                return self._supervisor.explain()
            if await self._result_is_old():
                return None  # whoever still hangs is stopped
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(self._pace.processes)

    async def _result_is_old(self) -> bool:
        """Whether the result has been there for longer than a replica needs to end after it."""
        now = time.monotonic()
        if now < self._look_again:
            return False
        self._look_again = now + _RESULT_EVERY
        await self._look_for_result()
        if not self._over:
            return False
        self._over_since = self._over_since or now
        return now - self._over_since > _AFTER_RESULT

    def _running(self) -> list[ReplicaHandle]:
        return [handle for handle in self._handles.values() if not handle.has_ended]

    async def _see_who_ended(self) -> list[ReplicaResult]:
        """Look at the processes, and return how those ended that ended since the last look."""
        polled = await asyncio.to_thread(self._executor.poll, self._running())
        self._handles |= {handle.rank: handle for handle in polled}
        ended = [handle for handle in polled if handle.has_ended]
        self._undecided |= {handle.rank for handle in ended}
        if not ended:
            return []
        results = await asyncio.to_thread(self._executor.collect, ended, timeout=_COLLECT_SECONDS)
        return [self._kept(result) for result in results]

    async def _decide_by(self, result: ReplicaResult) -> None:
        code = ExitCode.OK if result.status == "succeeded" else result.exit_code or None
        error = result.error
        if code == ExitCode.FENCED:
            error = await self._fenced_by(result.rank) or error
        decision = self._supervisor.decide(result.rank, code, error, time.monotonic())
        if decision.action in ("relaunch", "fenced", "out"):
            self._notes[result.rank] = decision.text
        self._undecided.discard(result.rank)
        self._show()

    def _kept(self, result: ReplicaResult) -> ReplicaResult:
        """Note how a rank's process ended, with the counts of its earlier ones."""
        before = self._results[result.rank].metrics if result.rank in self._results else {}
        metrics = {
            **result.metrics,
            "preemptions": before.get("preemptions", 0) + result.metrics.get("preemptions", 0),
            "restarts": self._supervisor.restarts(result.rank),
        }
        self._results[result.rank] = replace(result, metrics=metrics)
        return self._results[result.rank]

    async def _fenced_by(self, rank: int) -> str | None:
        """Say who replaced a rank's process."""
        try:
            claim = await newest_claim(self._store, rank)
        except DilocoError:
            return None
        if claim is None:
            return None
        newer = f"replaced by attempt {claim.attempt} (process {claim.pid} on {claim.host})"
        return newer if claim.launcher == self._launcher.record.nonce else f"{newer}, not started by this launcher"

    async def _relaunch(self, rank: int) -> None:
        if rank in self._beats:
            self._outdated[rank] = self._beats[rank].attempt
        self._supervisor.relaunched(rank, time.monotonic())
        try:
            [self._handles[rank]] = await start(self._executor, [spec for spec in self._specs if spec.rank == rank])
        except DilocoError as problem:
            failed = ReplicaResult(rank, "failed", problem.exit_code, {"preemptions": 0}, str(problem))
            await self._decide_by(self._kept(failed))
        else:
            self._notes.pop(rank, None)
            self._show()

    async def _look_for_result(self) -> None:
        """Once the result is there, the others end by themselves, and how they end changes nothing."""
        if not self._over:
            with suppress(DilocoError):
                self._over = await has_result(self._store)

    async def _watch(self) -> None:
        while True:
            await self._observe()
            await asyncio.sleep(self._pace.status)

    async def _observe(self) -> None:
        if self._on_status is None:
            return
        # An outage is the replicas' to survive or to report; the table shows what was known before it.
        with suppress(DilocoError):
            self._beats = await read_beats(self._store, self._earlier)
        self._show()

    def _show(self) -> None:
        if self._on_status is None:
            return
        self._on_status(
            RunStatus(
                run_id=self._settings.run_id,
                steps=self._settings.steps,
                rounds=self._settings.rounds,
                seconds=time.monotonic() - self._started,
                replicas=tuple(self._status(handle) for handle in self._handles.values()),
            )
        )

    def _status(self, handle: ReplicaHandle) -> ReplicaStatus:
        rank, beat = handle.rank, self._beats.get(handle.rank)
        state = self._supervisor.state(rank)
        undecided = rank in self._undecided
        return ReplicaStatus(
            rank=rank,
            status="running" if undecided else handle.status,
            exit_code=None if undecided else handle.exit_code,
            beat=beat if beat is not None and beat.attempt > self._outdated.get(rank, 0) else None,
            restarts=self._supervisor.restarts(rank),
            supervision="fenced" if state == "fenced" else "restarting" if state == "waiting" else None,
            note=self._notes.get(rank) or handle.waits,
        )

    async def _report(self, error: str | None) -> RunReport:
        seconds = time.monotonic() - self._started
        try:
            return await read_report(
                self._store,
                self._settings,
                outcome=self._results,
                ignore=self._earlier,
                wall_seconds=seconds,
                error=error,
            )
        except DilocoError as problem:
            return RunReport(
                run_id=self._settings.run_id,
                status="failed",
                rendezvous_uri=self._store.uri,
                replicas=[
                    ReplicaLine(rank=rank, status=result.status, restarts=result.metrics["restarts"])
                    for rank, result in sorted(self._results.items())
                ],
                rounds_expected=self._settings.rounds,
                wall_seconds=round(seconds, 3),
                error=error or f"the end of the run can't be read: {problem}",
            )


def _without_adopted(earlier: frozenset[Member], handles: Mapping[int, ReplicaHandle]) -> frozenset[Member]:
    """Members of earlier launches that are not of this one: a rank that was adopted goes on as its newest member."""
    newest: dict[int, Member] = {}
    for member in sorted(earlier):
        if member.rank in handles and handles[member.rank].adopted:
            newest[member.rank] = member
    return earlier - frozenset(newest.values())
