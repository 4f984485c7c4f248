"""Where asynchronous work meets tensors: what torchft waits on, and what must be waited for on an accelerator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from concurrent.futures import Future
    from datetime import timedelta


class RoundWork(Work):
    """The pending average of one tensor. All tensors of a round share one exchange."""

    def __init__(self, settle: Callable[[], object], done: Callable[[], bool]) -> None:
        super().__init__()
        self._settle = settle
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the exchange's own time-out names whom it waited for
        """Block until the mean is in the tensor. Raises what ended the round."""
        self._settle()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done()


class InBackground:
    """A future of the background thread, awaitable there any number of times."""

    def __init__(self, future: Future[str]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, str]:
        return asyncio.wrap_future(self._future).__await__()


def synchronize() -> None:
    """Wait for an accelerator's pending work: torchft copies parameters to pinned memory without waiting for it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
