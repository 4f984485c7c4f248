"""What one member of a run needs wherever it touches the store, and the one way to wait for something."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from diloco.errors import RoundTimeoutError
from diloco.exchange.clock import Poll

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from diloco.exchange.clock import Clock
    from diloco.exchange.layout import Member
    from diloco.exchange.records import RunRecord
    from diloco.exchange.settings import ExchangeSettings
    from diloco.exchange.store import Store

T = TypeVar("T")


@dataclass
class Context:
    """One member of one run: store and clock are parameters, so that tests can replace them."""

    store: Store
    clock: Clock
    member: Member
    settings: ExchangeSettings
    run: RunRecord
    jitter: random.Random = field(default_factory=random.Random)
    waiting_for: list[str] = field(default_factory=list)
    """Whom or what the member waits for just now, in words; beats carry it."""

    def poll(self) -> Poll:
        """The pace of a new wait."""
        return Poll(self.clock, self.settings.poll_first, self.settings.poll_most, self.jitter)

    async def wait_until(
        self,
        attempt: Callable[[Poll], Awaitable[T | None]],
        *,
        doing: str,
        timeout: float | None = None,
    ) -> T:
        """Call `attempt` until it returns something. It may set :attr:`waiting_for`.

        Raises RoundTimeoutError that names `doing` and whom was waited for, after `timeout` seconds (default: the
        settings' time-out) of successful polls; time in which this process was stopped, or the store away, does not
        count.
        """
        limit = self.settings.timeout if timeout is None else timeout
        poll = self.poll()
        try:
            while True:
                found = await attempt(poll)
                if found is not None:
                    return found
                poll.succeeded()
                if poll.total > limit:
                    whom = ", ".join(self.waiting_for) or "the store"
                    raise RoundTimeoutError(
                        f"{self.member}: {doing} was not completed within {limit:.0f} s, still waiting for {whom}; "
                        "look at the logs of those named, then start the run again with the same run id"
                    )
                await poll.pause()
        finally:
            self.waiting_for = []
