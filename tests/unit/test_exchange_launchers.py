"""One launcher a run: who may claim it, how long a newcomer looks, and what the older one notices. In virtual time."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from typing import TYPE_CHECKING

import pytest

from diloco.errors import ConfigurationError, StoreUnreachableError
from diloco.exchange import layout
from diloco.exchange.launchers import Launcher, LauncherWatch, claim_launcher
from diloco.exchange.records import LauncherBeat, LauncherRecord
from diloco.exchange.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from diloco.exchange.store import Data


class VirtualClock:
    """Time that moves only by sleeping; `doing` is called after every sleep with the new time."""

    def __init__(self, doing: Callable[[float], Awaitable[None]] | None = None) -> None:
        self.now = 0.0
        self._doing = doing

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._doing is not None:
            await self._doing(self.now)


class Flaky(MemoryStore):
    """Unreachable while `down`."""

    down = False

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        self._check()
        return await super()._read(key, start, end)

    async def _write(self, key: str, data: Data) -> None:
        self._check()
        await super()._write(key, data)

    def _check(self) -> None:
        if self.down:
            raise StoreUnreachableError("no answer")


def read_beat(store: MemoryStore, number: int) -> LauncherBeat:
    key = layout.launcher_beat(number)
    return LauncherBeat.from_json(store._objects[key], key)


def test_keys() -> None:
    assert layout.launcher(12) == "launcher/00012.json"
    assert layout.launcher_beat(12) == "beats/launcher/00012.json"
    assert layout.parse_launcher(layout.launcher(12)) == 12
    for alien in (layout.launcher_beat(12), "launcher/12.json", "launcher/00012.json.bak", "launcher/readme"):
        assert layout.parse_launcher(alien) is None
    assert layout.parse_member(layout.launcher_beat(12)) is None


def test_one_who_only_looks_sees_whether_a_run_is_supervised() -> None:
    async def scenario() -> None:
        clock, store = VirtualClock(), MemoryStore()
        watch = LauncherWatch(dead_after=10.0, clock=clock)
        assert not await watch.supervised(store)  # nobody ever was
        launcher = await claim_launcher(store, clock=clock)
        for _ in range(3):
            assert await watch.supervised(store)
            await clock.sleep(9.0)
            await launcher.beat()
        assert await watch.supervised(store)
        await clock.sleep(9.0)
        assert await watch.supervised(store)
        await clock.sleep(1.0)
        assert not await watch.supervised(store)  # its beat has not changed for too long
        successor = await claim_launcher(store, takeover=True, clock=clock)
        assert await watch.supervised(store)
        await successor.beat(ended=True)
        assert not await watch.supervised(store)

    asyncio.run(scenario())


def test_the_first_launcher_claims_at_once() -> None:
    async def scenario() -> None:
        clock, store = VirtualClock(), MemoryStore()
        launcher = await claim_launcher(store, clock=clock, on_wait=pytest.fail)
        assert clock.now == 0.0
        assert (launcher.record.number, launcher.record.host, launcher.record.pid) == (
            1,
            socket.gethostname(),
            os.getpid(),
        )
        stored = LauncherRecord.from_json(await store.read(layout.launcher(1)), "")
        assert stored == launcher.record
        assert read_beat(store, 1) == LauncherBeat(number=1, counter=1)

    asyncio.run(scenario())


def test_one_that_has_ended_is_followed_at_once() -> None:
    async def scenario() -> None:
        clock, store = VirtualClock(), MemoryStore()
        first = await claim_launcher(store, clock=clock)
        await first.beat(ended=True)
        second = await claim_launcher(store, clock=clock, on_wait=pytest.fail)
        assert (clock.now, second.record.number) == (0.0, 2)

    asyncio.run(scenario())


def test_a_live_one_refuses_the_newcomer_by_name() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first = await claim_launcher(store)

        async def lives(now: float) -> None:
            if now >= 0.9:
                await first.beat()

        clock = VirtualClock(lives)
        line = (
            f"launcher 1 (process {os.getpid()} on {socket.gethostname()}) supervises this run: wait for it, stop it,"
            " or take the run over with --takeover"
        )
        with pytest.raises(ConfigurationError, match=re.escape(line)):
            await claim_launcher(store, clock=clock)
        assert clock.now < 3, "one change is enough to know"
        assert [entry.key for entry in await store.list(layout.LAUNCHERS)] == [layout.launcher(1)]

    asyncio.run(scenario())


@pytest.mark.parametrize("beaten", [True, False])
def test_a_silent_one_is_dead_after_so_long(beaten: bool) -> None:
    async def scenario() -> None:
        clock, store = VirtualClock(), MemoryStore()
        said: list[str] = []
        await claim_launcher(store)
        if not beaten:  # it died between its claim and its first beat
            await store.delete([layout.launcher_beat(1)])
        second = await claim_launcher(store, clock=clock, on_wait=said.append)
        assert second.record.number == 2
        assert 10.0 <= clock.now < 11.5
        [line] = said
        assert line == (
            f"launcher 1 (process {os.getpid()} on {socket.gethostname()}) may still supervise this run:"
            " waiting 10 s for its beat; --takeover does not wait"
        )

    asyncio.run(scenario())


def test_one_that_ends_meanwhile_is_followed_then() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first = await claim_launcher(store)

        async def ends(now: float) -> None:
            if now >= 4.0:
                await first.beat(ended=True)

        clock = VirtualClock(ends)
        assert (await claim_launcher(store, clock=clock)).record.number == 2
        assert 4.0 <= clock.now < 6.0

    asyncio.run(scenario())


def test_a_newcomer_that_slept_counts_anew() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first = await claim_launcher(store)
        clock = VirtualClock()
        paused = False

        async def pauses(now: float) -> None:
            nonlocal paused
            if now >= 5.0 and not paused:
                paused = True
                clock.now += 60.0
            elif now > 65.0:  # the older launcher slept on the same machine, and goes on
                await first.beat()

        clock._doing = pauses
        with pytest.raises(ConfigurationError, match="supervises this run"):
            await claim_launcher(store, clock=clock)

    asyncio.run(scenario())


def test_a_takeover_does_not_wait_and_the_older_one_notices() -> None:
    async def scenario() -> None:
        clock, store = VirtualClock(), MemoryStore()
        first = await claim_launcher(store, clock=clock)
        await first.look()
        assert first.successor is None
        second = await claim_launcher(store, clock=clock, takeover=True, on_wait=pytest.fail)
        assert (clock.now, second.record.number) == (0.0, 2)
        await first.look()
        assert first.successor == second.record
        await second.look()
        assert second.successor is None

    asyncio.run(scenario())


@pytest.mark.parametrize("lives", [True, False])
def test_who_loses_the_claim_looks_at_the_winner(lives: bool) -> None:
    """Two newcomers find the first launcher dead at the same moment."""

    class Raced(MemoryStore):
        raced = False

        async def _create(self, key: str, data: Data) -> bool:
            if key == layout.launcher(2) and not self.raced:
                self.raced = True
                self.winner = await claim_launcher(self, takeover=True)
            return await super()._create(key, data)

    async def scenario() -> None:
        store = Raced()
        first = await claim_launcher(store)
        await first.beat(ended=True)

        async def beat(now: float) -> None:
            if lives:
                await store.winner.beat()

        claiming = claim_launcher(store, clock=VirtualClock(beat))
        if lives:
            with pytest.raises(ConfigurationError, match=r"launcher 2 .* supervises this run"):
                await claiming
        else:
            assert (await claiming).record.number == 3

    asyncio.run(scenario())


def test_a_lost_answer_is_recognised_by_its_nonce() -> None:
    class Lossy(MemoryStore):
        async def _create(self, key: str, data: Data) -> bool:
            await super()._create(key, data)
            return False  # a client's own retry is told that the object exists

    async def scenario() -> None:
        assert (await claim_launcher(Lossy())).record.number == 1

    asyncio.run(scenario())


async def wait_for(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not there():  # noqa: ASYNC110 - what is waited for is in the store
            await asyncio.sleep(0)


def test_holding_beats_through_an_outage_and_ends_with_a_word() -> None:
    async def scenario() -> None:
        store = Flaky()
        launcher = await claim_launcher(store)
        async with launcher.holding(beat_every=0.001) as beating:
            await wait_for(lambda: read_beat(store, 1).counter > 3)
            store.down = True
            requests = store.stats.requests
            await wait_for(lambda: store.stats.requests > requests + 6)
            store.down = False
            seen = read_beat(store, 1).counter
            await wait_for(lambda: read_beat(store, 1).counter > seen)
            second = await claim_launcher(store, takeover=True)
            await wait_for(lambda: launcher.successor is not None)
            assert launcher.successor == second.record
            assert not beating.done()
            assert not read_beat(store, 1).ended
        assert read_beat(store, 1).ended

    asyncio.run(scenario())


def test_the_last_beat_is_not_hidden_by_one_on_its_way() -> None:
    class Slow(MemoryStore):
        """The last beat is fast, and every other one slow."""

        on_its_way = 0

        async def _write(self, key: str, data: Data) -> None:
            self.on_its_way += 1
            if not LauncherBeat.from_json(bytes(data), key).ended:
                for _ in range(10):
                    await asyncio.sleep(0)
            await super()._write(key, data)
            self.on_its_way -= 1

    async def scenario() -> None:
        store = Slow()
        launcher = await claim_launcher(store)
        async with launcher.holding():
            await wait_for(lambda: store.on_its_way == 1)
        await wait_for(lambda: store.on_its_way == 0)
        assert read_beat(store, 1).ended

    asyncio.run(scenario())


def test_a_failure_inside_is_an_end_too_and_a_store_that_is_away_does_not_hide_it() -> None:
    async def fail(store: Flaky, launcher: Launcher, *, down: bool) -> None:
        async with launcher.holding():
            store.down = down
            raise KeyError("the cause")

    async def scenario(*, down: bool) -> None:
        store = Flaky()
        launcher = await claim_launcher(store)
        with pytest.raises(KeyError, match="the cause"):
            await fail(store, launcher, down=down)
        assert read_beat(store, 1).ended is not down

    asyncio.run(scenario(down=False))
    asyncio.run(scenario(down=True))
