"""Signals as one exception, whether a coroutine runs or not."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType


class Interrupted(BaseException):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into :class:`Interrupted`, or cancels the coroutine that runs;
    `on_first` is called before, in the handler, for what runs in other threads.

    Later ones are ignored: what follows the first is a bounded clean-up, and nobody gains by leaving it half done.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self._on_first = on_first
        self._before: dict[int, Any] = {}
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.number: int | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in self._NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end; Interrupted if a signal cancelled it."""
        try:
            return asyncio.run(self._tracked(work))
        except asyncio.CancelledError:
            if self.number is None:
                raise
            raise Interrupted(self.number) from None

    async def _tracked(self, work: Coroutine[Any, Any, Any]) -> Any:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            return await work
        finally:
            self._task = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            return
        self.number = number
        if self._on_first is not None:
            self._on_first()
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            raise Interrupted(number)
