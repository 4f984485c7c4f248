"""A replica's presence in the bucket: its claim, its beats, and its last words. Knows nothing of torchft or tensors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from diloco.background import Background
from diloco.errors import ConfigurationError, DilocoError, ExitCode, FencedError, StoreError
from diloco.exchange import layout, membership
from diloco.exchange.clock import SystemClock
from diloco.exchange.records import ErrorReport, Evaluation
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.store import CHECK_SECONDS, check_store, create_once, open_store
from diloco.progress import Progress, finite

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future
    from typing import TypeVar

    from diloco.exchange.clock import Clock
    from diloco.exchange.context import Context
    from diloco.exchange.layout import Member
    from diloco.exchange.settings import ExchangeSettings
    from diloco.exchange.store import Store

    T = TypeVar("T")

logger = logging.getLogger(__name__)


class Presence:
    """One replica as the others see it. Owns the store and the thread that uses it.

    Args as :class:`diloco.manager.ObjectStoreManager`.
    """

    def __init__(
        self,
        rendezvous_uri: str,
        *,
        rank: int,
        world_size: int,
        settings: ExchangeSettings,
        store: Store | None = None,
        clock: Clock | None = None,
        launcher: str | None = None,
    ) -> None:
        if rank < 0 or world_size < 1:
            raise ConfigurationError(f"rank {rank} of {world_size}: ranks count from 0, the world size from 1")
        if rank >= world_size and settings.policy == "strict":
            raise ConfigurationError(
                f"rank {rank} of {world_size}: only a run with policy skip takes more ranks than its world size"
            )
        self.rank = rank
        self.world_size = world_size
        self.settings = settings
        self.progress = Progress()
        self.clock = clock or SystemClock()
        self.store = RetryingStore(store or open_store(rendezvous_uri), self.clock, budget=settings.retry_for)
        self.background = Background(f"diloco-exchange-{rank}")
        self.context: Context | None = None
        self._launcher = launcher
        self._member: Member | None = None
        self._evaluations: list[Future[object]] = []

    @property
    def member(self) -> Member:
        """This replica's rank and attempt. RuntimeError before :meth:`start`."""
        if self._member is None:
            raise RuntimeError("this replica has not joined a run yet")
        return self._member

    def start(self) -> None:
        """Check the store, claim the next attempt of this rank, begin to beat; does nothing the second time.

        Raises BucketMissingError, AccessDeniedError, StoreUnreachableError or ConditionalWriteError when the store
        can't be used.
        """

        async def join() -> Member:
            await check_store(self.store, seconds=CHECK_SECONDS + self.settings.retry_for)
            return await membership.claim(self.store, self.rank, launcher=self._launcher)

        if self._member is None:
            self._member = self.background.call(join())
            self.background.watch(self._beat_for_ever())

    def wait(self, work: Future[T]) -> T:
        """Block the training thread on background work; the time counts as waiting."""
        self.progress.begin_wait()
        try:
            return self.background.result(work)
        finally:
            self.progress.end_wait()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background and :meth:`wait` for it."""
        return self.wait(self.background.submit(coroutine))

    async def _beat_for_ever(self) -> None:
        while True:
            try:
                await self._beat()
                await membership.check_fence(self.store, self.member)
            except FencedError as problem:
                self.background.fail(problem)
                return
            except StoreError as problem:
                # A beat may be lost: if the store stays away, the round itself says so.
                logger.warning("%s: a beat was not written: %s", self.member, problem)
            await self.clock.sleep(self.settings.beat_every)

    async def _beat(self) -> None:
        waiting_for = list(self.context.waiting_for) if self.context is not None else []
        beat = self.progress.beat(self.member, waiting_for)
        await self.store.write(layout.beat(self.member), beat.to_json())

    def report_evaluation(self, round_: int, loss: float) -> None:
        """Note the held-out loss of the global parameters before a round; whoever is first stays."""
        record = Evaluation(round=round_, loss=finite(loss), rank=self.rank, attempt=self.member.attempt)
        self._evaluations.append(self.background.submit(create_once(self.store, layout.evaluation(round_), record)))

    def close(self, *, trainer: dict[str, Any], problem: BaseException | None) -> None:
        """Write the report, or why this process gave up, and the last beat; stop the thread.

        Raises StoreError when the report can't be written; an error that can't be written is only logged.
        """
        try:
            if problem is None:
                for evaluation in self._evaluations:
                    self.background.result(evaluation)
            # Else a round that nobody waits for any more would go on polling a store that is being closed.
            self.background.cancel_all()
            if self._member is not None:
                self.background.submit(self._last_words(trainer, problem)).result()
        finally:
            self.background.submit(self.store.close()).result()
            self.background.stop()

    async def _last_words(self, trainer: dict[str, Any], problem: BaseException | None) -> None:
        member, progress = self.member, self.progress
        progress.phase = "finished" if problem is None else "failed"
        try:
            if problem is None:
                report = progress.report(member, self.store.stats, trainer)
                await self.store.write(layout.result(member), report.to_json())
            else:
                error = ErrorReport(
                    rank=member.rank,
                    attempt=member.attempt,
                    exit_code=problem.exit_code if isinstance(problem, DilocoError) else ExitCode.FAILED,
                    error=f"{type(problem).__name__}: {problem}",
                    step=progress.step,
                    round=progress.round,
                )
                await self.store.write(layout.error(member), error.to_json())
            await self._beat()
        except StoreError as lost:
            if problem is None:
                raise
            logger.warning("%s: its error could not be written to the store: %s", member, lost)
