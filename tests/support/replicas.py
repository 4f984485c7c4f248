"""Replicas of a run as threads of the test's process: real managers on a real store, without the cost of processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from diloco.exchange.settings import ExchangeSettings
from diloco.manager import ObjectStoreManager

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

FAST = ExchangeSettings(timeout=60, poll_first=0.002, poll_most=0.05, beat_every=0.2)


def run_replicas(
    uri: str,
    world_size: int,
    trainer: Callable[[ObjectStoreManager, int], T],
    settings: ExchangeSettings = FAST,
) -> list[T | BaseException]:
    """Run `trainer(manager, rank)` once a rank, each in a thread; what each returned or raised, in rank order."""
    outcomes: list[T | BaseException] = [RuntimeError("did not end")] * world_size

    def replica(rank: int) -> None:
        manager = ObjectStoreManager(uri, rank=rank, world_size=world_size, settings=settings)
        try:
            outcomes[rank] = trainer(manager, rank)
            manager.close()
        except BaseException as problem:  # noqa: BLE001 - the test looks at it
            outcomes[rank] = problem
            manager.close(problem=problem)

    threads = [threading.Thread(target=replica, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def all_well(outcomes: list[T | BaseException]) -> list[T]:
    """The results, or the first error raised here."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
