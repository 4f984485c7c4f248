"""Deleting runs that are over, for good: what a bucket's lifecycle must not do, since a commit has to outlive its run.

A run is over when `final/result.json` is there. With `failed`, those without it count too. Either way a run is left
alone while anything in it may be alive:

- A beat of its launchers or replicas, or any new one, changes within `watch` seconds of this process's monotonic clock
  (beats come every second). Clocks of two machines are never compared.
- An unfinished run besides needs that nothing of it was written for `older_than`, at least :data:`SILENCE`: SageMaker
  may keep an interrupted spot job waiting that long, and it says nothing meanwhile.
- Of what a store can't date (`memory://`), nothing is old enough.

What can't be read counts as alive. `final/result.json` goes last, so a deletion that was cut short can be repeated. A
process that was suspended all along (SIGSTOP) finds its run gone, and ends at its time-out.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, ObjectMissingError
from diloco.exchange import layout
from diloco.exchange.clock import Poll, SystemClock
from diloco.exchange.launchers import BEAT_EVERY
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.store import check_read, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from diloco.exchange.clock import Clock
    from diloco.exchange.store import Entries, Store

DAY = 86_400.0
SILENCE = 28 * DAY
"""Longest that SageMaker lets a job wait and run (MaxWaitTimeInSeconds, 2026-11), in seconds."""
WATCH = 30.0
"""As long as replicas give one another before a beat that doesn't change is a dead one's."""
RETRY_FOR = 30.0
_AT_ONCE = 16
_LAST = (layout.CHECKPOINTS, layout.COMMITS, layout.MEMBERS, layout.LAUNCHERS, layout.RUN, layout.SPEC, layout.RESULT)
"""Deleted after all else, in this order."""


@dataclass(frozen=True)
class Verdict:
    """What is to become of one run, and why."""

    run_id: str
    finished: bool
    objects: int
    bytes: int
    age_days: float | None
    """Since its newest object was written; None: the store doesn't say."""
    delete: bool
    reason: str

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Selection:
    """Which runs are meant."""

    run_ids: frozenset[str] = frozenset()
    """None: all."""
    older_than: float = 0.0
    """Seconds since a run's newest object was written."""
    failed: bool = False
    keep_model: bool = False
    """Leave `final/`."""

    def least_age(self, *, finished: bool) -> float:
        """Seconds."""
        return self.older_than if finished else max(self.older_than, SILENCE)


async def prune_runs(
    parent: str,
    selection: Selection,
    *,
    delete: bool,
    storage_options: Mapping[str, Any] | None = None,
    watch: float | None = None,
    now: float | None = None,
) -> list[Verdict]:
    """Judge every run below `parent`, and with `delete` delete those whose verdict says so; sorted by run id.

    `watch` defaults to :data:`WATCH`; `now` is the wall clock, in seconds since 1970. Raises ConfigurationError if a
    run that is named isn't there, and what the store raises.
    """
    clock = SystemClock()
    bare = open_store(parent, storage_options=storage_options)
    try:
        await check_read(bare)
        store = RetryingStore(bare, clock, budget=RETRY_FOR)
        runs = _runs(await store.list(""))
        if missing := sorted(selection.run_ids - runs.keys()):
            raise ConfigurationError(f"--run-id {', '.join(missing)}: no such run in {parent}")
        chosen = {
            run_id: entries for run_id, entries in runs.items() if not selection.run_ids or run_id in selection.run_ids
        }
        watch = WATCH if watch is None else watch
        verdicts = await _judge(store, chosen, selection, clock, watch, time.time() if now is None else now)
        if delete:
            for verdict in verdicts:
                if verdict.delete:
                    await _delete(store, (entry.key for entry in _doomed(chosen[verdict.run_id], verdict, selection)))
        return verdicts
    finally:
        await bare.close()


def _runs(entries: Entries) -> dict[str, Entries]:
    """The objects of each run; what has neither `spec.json` nor `run.json` nor a result is none."""
    found: dict[str, Entries] = {}
    for entry in entries:
        run_id, _, key = entry.key.partition("/")
        if key and layout.RUN_ID.fullmatch(run_id):
            found.setdefault(run_id, []).append(entry)
    marks = (layout.SPEC, layout.RUN, layout.RESULT)
    return {
        run_id: objects
        for run_id, objects in found.items()
        if any(entry.key == f"{run_id}/{mark}" for entry in objects for mark in marks)
    }


async def _judge(
    store: Store,
    runs: Mapping[str, Entries],
    selection: Selection,
    clock: Clock,
    watch: float,
    now: float,
) -> list[Verdict]:
    verdicts = [_first(run_id, entries, selection, now) for run_id, entries in sorted(runs.items())]
    doubtful = [verdict.run_id for verdict in verdicts if verdict.delete]
    alive = await _alive(store, doubtful, clock, watch)
    return [
        verdict
        if verdict.run_id not in alive
        else Verdict(**asdict(verdict) | {"delete": False, "reason": f"alive: {alive[verdict.run_id]}"})
        for verdict in verdicts
    ]


def _first(run_id: str, entries: Entries, selection: Selection, now: float) -> Verdict:
    """What the listing alone says of a run."""
    finished = any(entry.key == f"{run_id}/{layout.RESULT}" for entry in entries)
    dates = [entry.modified for entry in entries]
    newest = None if None in dates else max(date for date in dates if date is not None)
    age = None if newest is None else max(0.0, now - newest)
    doomed = _below_final(run_id, entries) if selection.keep_model else entries
    least = selection.least_age(finished=finished)
    if not finished and not selection.failed:
        reason = "has no result: --failed deletes such runs"
    elif least > 0 and age is None:
        reason = "the store does not say how old it is"
    elif age is not None and age < least:
        reason = f"{age / DAY:.1f} days old: less than {least / DAY:g}"
    elif not doomed:
        reason = "only its model is left, and --keep-model keeps it"
    else:
        reason = "finished" if finished else f"has no result, and was silent for {(age or 0) / DAY:.1f} days"
        return _verdict(run_id, doomed, finished=finished, age=age, delete=True, reason=reason)
    return _verdict(run_id, entries, finished=finished, age=age, delete=False, reason=reason)


def _verdict(run_id: str, entries: Entries, *, finished: bool, age: float | None, delete: bool, reason: str) -> Verdict:
    return Verdict(
        run_id=run_id,
        finished=finished,
        objects=len(entries),
        bytes=sum(entry.size for entry in entries),
        age_days=None if age is None else age / DAY,
        delete=delete,
        reason=reason,
    )


def _below_final(run_id: str, entries: Entries) -> Entries:
    """All but `final/`."""
    return [entry for entry in entries if not entry.key.startswith(f"{run_id}/final/")]


def _doomed(entries: Entries, verdict: Verdict, selection: Selection) -> Entries:
    return _below_final(verdict.run_id, entries) if selection.keep_model else entries


async def _alive(store: Store, run_ids: Sequence[str], clock: Clock, watch: float) -> dict[str, str]:
    """Of these runs, those in which a beat changes within `watch` seconds, each with what it was."""
    if not run_ids:
        return {}
    first = dict(zip(run_ids, await asyncio.gather(*(_beats(store, run_id) for run_id in run_ids)), strict=True))
    alive: dict[str, str] = {}
    poll = Poll(clock, min(BEAT_EVERY, watch / 8), min(2 * BEAT_EVERY, watch / 4), random.Random())
    while poll.elapsed < watch and len(alive) < len(run_ids):
        await poll.pause()
        silent = [run_id for run_id in run_ids if run_id not in alive]
        beats = await asyncio.gather(*(_beats(store, run_id) for run_id in silent))
        poll.succeeded()
        for run_id, present in zip(silent, beats, strict=True):
            changed = [key for key, data in present.items() if first[run_id].get(key) != data]
            if changed:
                alive[run_id] = f"{changed[0]} changes"
    return alive


async def _beats(store: Store, run_id: str) -> dict[str, bytes | None]:
    """Every beat of a run's launchers and replicas."""
    prefix = f"{run_id}/"
    keys = [entry.key.removeprefix(prefix) for entry in await store.list(prefix + layout.BEATS)]

    async def read(key: str) -> bytes | None:
        try:
            return await store.read(prefix + key)
        except ObjectMissingError:
            return None

    return dict(zip(keys, await asyncio.gather(*(read(key) for key in keys)), strict=True))


async def _delete(store: Store, keys: Iterable[str]) -> None:
    """Delete a run's objects, those that say what it was last."""
    ordered: dict[int, list[str]] = {}
    for key in keys:
        inside = key.partition("/")[2]
        place = next((number for number, last in enumerate(_LAST, 1) if inside.startswith(last)), 0)
        ordered.setdefault(place, []).append(key)
    for _, same in sorted(ordered.items()):
        await asyncio.gather(*(store.delete(same[start::_AT_ONCE]) for start in range(_AT_ONCE)))
