"""Start a run and leave it: the replicas need no launcher, and any later one finds them. Or end it for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.exchange import layout
from diloco.exchange.launchers import claim_launcher
from diloco.exchange.store import open_store, read_if_there
from diloco.preflight import begin, check_launch, has_result
from diloco.run import PACE, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaHandle, ServerlessExecutor
    from diloco.run import Pace
    from diloco.spec import RunSettings


async def submit_replicas(
    executor: ServerlessExecutor,
    settings: RunSettings,
    *,
    storage_options: Mapping[str, Any] | None = None,
    takeover: bool = False,
    on_note: Callable[[str], None] | None = None,
    pace: Pace | None = None,
) -> list[ReplicaHandle]:
    """Check everything and launch the replicas, without supervising them: one that dies stays dead until a launcher
    resumes the run. None are launched for a run that has its result.

    Arguments and errors as :func:`diloco.run.run_replicas`.
    """
    pace = pace or PACE
    check_launch(executor, settings)
    store = open_store(settings.uri, storage_options=storage_options)
    try:
        store = await begin(store, settings, storage_options)
        if await has_result(store):
            return []
        launcher = await claim_launcher(
            store, takeover=takeover, dead_after=pace.dead_after, beat_every=pace.beats, on_wait=on_note
        )
        async with launcher.holding(pace.beats):
            specs = settings.replica_specs(launcher=launcher.record.nonce)
            return await start(executor, specs)
    finally:
        await store.close()


async def stop_launcher(store: Store) -> None:
    """Make the launcher of the run under `store` give up, wherever it is, since it would relaunch what is stopped;
    closes the store.
    """
    try:
        if await read_if_there(store, layout.SPEC) is not None:
            launcher = await claim_launcher(store, takeover=True)
            await launcher.beat(ended=True)
    finally:
        await store.close()
