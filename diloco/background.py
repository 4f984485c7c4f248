"""A thread that runs coroutines: the one place where the exchange's coroutines meet the training thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

T = TypeVar("T")


class Background:
    """An event loop in a daemon thread. `result` is interruptible by signals, and by a failure of any coroutine that
    matters to all.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._fatal: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the thread; returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for a submitted coroutine; raises what it raised, or what :meth:`fail` was given."""
        first: set[concurrent.futures.Future[Any]] = {future, self._fatal}
        concurrent.futures.wait(first, return_when=concurrent.futures.FIRST_COMPLETED)
        if self._fatal.done():
            self._fatal.result()
        return future.result()

    def watch(self, coroutine: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        """Run a coroutine that nobody waits for: what it raises ends every present and later wait."""
        future = self.submit(coroutine)

        def look(done: concurrent.futures.Future[None]) -> None:
            problem = None if done.cancelled() else done.exception()
            if problem is not None:
                self.fail(problem)

        future.add_done_callback(look)
        return future

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it."""
        return self.result(self.submit(coroutine))

    def fail(self, problem: BaseException) -> None:
        """End every present and later wait with this error."""
        if not self._fatal.done():
            self._fatal.set_exception(problem)

    @property
    def failed(self) -> bool:
        """Whether :meth:`fail` was called."""
        return self._fatal.done()

    def cancel_all(self) -> None:
        """Cancel what still runs, and wait until it has ended."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()

    def stop(self) -> None:
        """Cancel what still runs, end the thread and wait for it. Harmless the second time."""
        if self._thread.is_alive():
            self.cancel_all()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
