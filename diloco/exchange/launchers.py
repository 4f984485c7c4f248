"""One launcher a run: claiming its supervision, showing that it is held, and noticing that it was lost.

Launcher n creates `launcher/{n}.json` once, for good; the highest number supervises. While it does, it overwrites
`beats/launcher/{n}.json`, and its last beat says that it has ended. A newcomer takes number n + 1 when launcher n has
ended, or when the beat does not change for `dead_after` seconds of the newcomer's own monotonic clock (two clocks are
never compared, and a newcomer that was itself asleep starts to count anew). A beat that changes is a live launcher's:
the newcomer is refused, or takes the run over without looking when it is told to.

A launcher that was paused for longer than `dead_after` finds its successor at the next look, and ends. What it started
is fenced by the attempts that the successor starts, so in between nothing of the run can go wrong. Doing anything twice
is harmless: a claim is known by its nonce, and a beat says the same again.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.errors import ConfigurationError, DilocoError, StoreError
from diloco.exchange import layout
from diloco.exchange.clock import Poll, SystemClock, Timer
from diloco.exchange.records import LauncherBeat, LauncherRecord
from diloco.exchange.store import create_once, read_if_there

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from diloco.exchange.clock import Clock
    from diloco.exchange.store import Store

DEAD_AFTER = 10.0
"""Seconds without a change after which a launcher's beat belongs to a dead one."""
BEAT_EVERY = 1.0
"""Seconds between two beats of a launcher."""


_LAST_SECONDS = 2.0  # a store that hangs must not keep a launcher from ending


@dataclass
class Launcher:
    """This process as the run's launcher; made by :func:`claim_launcher`."""

    store: Store
    record: LauncherRecord
    successor: LauncherRecord | None = field(default=None, init=False)
    """Who took the run over, as far as :meth:`look` has seen."""
    _counter: int = field(default=0, init=False)

    async def beat(self, *, ended: bool = False) -> None:
        """Show that this launcher supervises, or that it has ended. Raises StoreError."""
        self._counter += 1
        beat = LauncherBeat(number=self.record.number, counter=self._counter, ended=ended)
        await self.store.write(layout.launcher_beat(self.record.number), beat.to_json())

    async def look(self) -> None:
        """Find out whether another launcher took the run over; a store that can't tell leaves it open."""
        with suppress(StoreError):
            found = await _read(self.store, self.record.number + 1)
            self.successor = self.successor or found

    @asynccontextmanager
    async def holding(self, beat_every: float = BEAT_EVERY) -> AsyncIterator[asyncio.Task[None]]:
        """Beat and look for a successor as long as the block lasts, then say that this launcher has ended.

        Yields the task that does it: if that is done inside the block, it has failed.
        """
        ended = asyncio.Event()
        beating = asyncio.create_task(self._beat_until(ended, beat_every))
        try:
            yield beating
        finally:
            ended.set()
            with suppress(DilocoError, TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await beating  # a beat that is on its way must not hide the last one
                    await self.beat(ended=True)

    async def _beat_until(self, ended: asyncio.Event, beat_every: float) -> None:
        while not ended.is_set():
            await self.look()
            with suppress(StoreError):  # an outage is the replicas' to survive or to report
                await self.beat()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), beat_every)


async def claim_launcher(
    store: Store,
    *,
    takeover: bool = False,
    dead_after: float = DEAD_AFTER,
    beat_every: float = BEAT_EVERY,
    clock: Clock | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Launcher:
    """Become the run's launcher, once no other one lives; with `takeover`, at once.

    `on_wait` is told, once for each launcher that may still live, whom this waits for. Raises ConfigurationError naming
    the one that does live.
    """
    while True:
        newest = await _newest(store)
        if newest and not takeover:
            await _until_free(store, newest, dead_after, beat_every, clock or SystemClock(), on_wait)
        record = LauncherRecord(number=newest + 1, host=socket.gethostname(), pid=os.getpid())
        mine, _ = await create_once(store, layout.launcher(record.number), record)
        if mine:
            launcher = Launcher(store, record)
            await launcher.beat()
            return launcher


async def _until_free(
    store: Store,
    number: int,
    dead_after: float,
    beat_every: float,
    clock: Clock,
    on_wait: Callable[[str], None] | None,
) -> None:
    """Wait until a launcher has ended or is found dead; ConfigurationError if it lives."""
    first = await _read_beat(store, number)
    if first is not None and first.ended:
        return
    name = str(await _read(store, number) or f"launcher {number}")
    if on_wait is not None:
        on_wait(f"{name} may still supervise this run: waiting {dead_after:g} s for its beat; --takeover does not wait")
    poll = Poll(clock, beat_every / 4, beat_every, random.Random())
    silence = Timer(poll)
    while silence.seconds < dead_after:
        await poll.pause()
        beat = await _read_beat(store, number)
        poll.succeeded()
        if beat is not None and beat.ended:
            return
        if beat != first:
            raise ConfigurationError(
                f"{name} supervises this run: wait for it, stop it, or take the run over with --takeover"
            )


class LauncherWatch:
    """Whether a run is supervised, for one who only looks: a launcher whose beat changes lives, and the others are dead
    once it has not changed for `dead_after` seconds of this process's clock.
    """

    def __init__(self, *, dead_after: float = DEAD_AFTER, clock: Clock | None = None) -> None:
        self._dead_after = dead_after
        self._clock = clock or SystemClock()
        self._seen: tuple[int, LauncherBeat | None] | None = None
        self._since = 0.0

    async def supervised(self, store: Store) -> bool:
        """Whether a launcher of the run under `store` lives, or may live. Raises StoreError."""
        number = await _newest(store)
        beat = await _read_beat(store, number) if number else None
        if not number or (beat is not None and beat.ended):
            return False
        if self._seen != (number, beat):
            self._seen, self._since = (number, beat), self._clock.monotonic()
        return self._clock.monotonic() - self._since < self._dead_after


async def _newest(store: Store) -> int:
    """The highest number that was claimed, 0 for none."""
    numbers = (layout.parse_launcher(entry.key) for entry in await store.list(layout.LAUNCHERS))
    return max((number for number in numbers if number is not None), default=0)


async def _read(store: Store, number: int) -> LauncherRecord | None:
    key = layout.launcher(number)
    data = await read_if_there(store, key)
    return None if data is None else LauncherRecord.from_json(data, key)


async def _read_beat(store: Store, number: int) -> LauncherBeat | None:
    key = layout.launcher_beat(number)
    data = await read_if_there(store, key)
    return None if data is None else LauncherBeat.from_json(data, key)
