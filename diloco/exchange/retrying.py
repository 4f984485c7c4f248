"""Trying again: a store that is overloaded, resets connections or does not answer gets time, with jittered back-off
inside a budget.

What can't get better is raised at once: a missing bucket or object, a denied permission, expired credentials, corrupt
bytes. A create whose answer was lost may be repeated: it then says that the object exists, and whoever created it
reads back whose it is.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, TypeVar

from diloco.errors import OutcomeUnknownError, StoreUnreachableError
from diloco.exchange.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from diloco.exchange.clock import Clock
    from diloco.exchange.store import Data, Entries, Range

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class RetryingStore(Store):
    """Another store, whose operations are tried again for up to `budget` seconds each."""

    def __init__(self, inner: Store, clock: Clock, *, budget: float, jitter: random.Random | None = None) -> None:
        super().__init__(inner.uri)
        self._inner = inner
        self._clock = clock
        self._budget = budget
        self._jitter = jitter or random.Random()

    async def _again(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        began, tries, pause = self._clock.monotonic(), 0, FIRST_PAUSE
        while True:
            tries += 1
            try:
                return await call()
            except (StoreUnreachableError, OutcomeUnknownError) as problem:
                spent = self._clock.monotonic() - began
                if spent >= self._budget:
                    raise type(problem)(f"{problem} (given up after {tries} tries in {spent:.0f} s)") from problem
                logger.warning("%s %s is tried again: %s", operation, key, problem)
            await self._clock.sleep(pause * (0.5 + self._jitter.random()))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        return await self._again("read", key, lambda: self._inner._read(key, start, end))

    def fetch(self, ranges: Iterable[Range]) -> AsyncGenerator[bytes]:
        """As the inner store does, each range through this store."""
        return self._inner.fetch_with(self.read, ranges)

    async def meanwhile(self, work: Callable[[], T]) -> T:
        """As the inner store does."""
        return await self._inner.meanwhile(work)

    async def each(
        self,
        calls: Sequence[Callable[[], Awaitable[None]]],
        *,
        at_once: int = 2,
        then: Callable[[], Awaitable[None]] | None = None,
        beside: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """As the inner store does."""
        await self._inner.each(calls, at_once=at_once, then=then, beside=beside)

    async def _create(self, key: str, data: Data) -> bool:
        return await self._again("create", key, lambda: self._inner._create(key, data))

    async def _write(self, key: str, data: Data) -> None:
        await self._again("write", key, lambda: self._inner._write(key, data))

    async def _write_file(self, key: str, path: Path) -> None:
        await self._again("write", key, lambda: self._inner._write_file(key, path))

    async def _list(self, prefix: str) -> Entries:
        return await self._again("list", prefix, lambda: self._inner._list(prefix))

    async def _delete(self, key: str) -> None:
        await self._again("delete", key, lambda: self._inner._delete(key))

    async def open(self) -> None:
        """Open the inner store."""
        await self._inner.open()

    async def close(self) -> None:
        """Close the inner store."""
        await self._inner.close()
