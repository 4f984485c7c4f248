"""What a launcher makes sure of before it starts anything: settings, backend, store, output, and `spec.json`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError
from diloco.exchange import layout
from diloco.exchange.clock import SystemClock
from diloco.exchange.retrying import RetryingStore
from diloco.exchange.store import check_store, open_store, read_if_there
from diloco.spec import claim_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.exchange.store import Store
    from diloco.executors.base import ServerlessExecutor
    from diloco.spec import RunSettings
    from diloco.training.config import TrainConfig


def check_launch(executor: ServerlessExecutor, settings: RunSettings) -> None:
    """Raise ConfigurationError for what is known to fail, here or at the backend, before anything is written."""
    preflight(settings, elsewhere=executor.backend_name != "local")
    executor.check(settings.replica_specs())


async def begin(store: Store, settings: RunSettings, storage_options: Mapping[str, Any] | None) -> Store:
    """Make sure that the run's store and its output can be used, and that `spec.json` is this run's; returns the store
    with retries.
    """
    await check_store(store)
    store = RetryingStore(store, SystemClock(), budget=settings.exchange.retry_for)
    await _check_output(settings, storage_options)
    await claim_spec(store, settings)
    return store


def preflight(settings: RunSettings, *, elsewhere: bool = False) -> None:
    """Raise ConfigurationError for what is known to fail before anything is written or started.

    `elsewhere`: the replicas run on other machines, where this one's files are not.
    """
    settings.check()
    if settings.default_trainer:
        from diloco.training.config import TrainConfig
        from diloco.training.config import preflight as check_training

        config = TrainConfig.from_kwargs(settings.trainer_kwargs)
        check_training(
            _seen_from_here(config) if elsewhere else config,
            steps=settings.steps,
            sync_every=settings.sync_every,
            fragments=settings.fragments,
            sync_delay=settings.sync_delay,
            world_size=settings.replicas,
        )
    elif not elsewhere:
        _find_module(settings.trainer_module)


def _seen_from_here(config: TrainConfig) -> TrainConfig:
    """What of a remote replica's settings can be checked on this machine: data in a bucket can't."""
    for option, value in (("--model", config.model), ("--data", config.data)):
        if value in ("tiny", "small", "stdlib") or value.startswith("s3://"):
            continue
        if Path(value).expanduser().exists() or any(character in value for character in "*?["):
            raise ConfigurationError(
                f"{option} {value} is a path of this machine, and the replicas run elsewhere: use s3://bucket/prefix"
                " for data, a name on the Hugging Face Hub, or a path of the image with --trainer-kwargs-json"
            )
    if config.data.startswith(("s3://", "/")):
        return config.model_copy(update={"data": "stdlib"})
    return config


def _find_module(name: str) -> None:
    """Look for a trainer's module where a replica will, the working folder first, without importing it."""
    path: Sequence[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109 - an import path's entries are strings
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ".".join(parts[:depth])
        # By its last name only: a folder without __init__.py would else look for its parent among the imported modules.
        found = PathFinder.find_spec(parts[depth - 1], path) if path is not None else None
        if found is None:
            raise ConfigurationError(
                f"--trainer-module {name}: no module {module!r} in the working folder or among the installed packages;"
                " check its name, or add its folder to PYTHONPATH"
            )
        path = found.submodule_search_locations


async def _check_output(settings: RunSettings, storage_options: Mapping[str, Any] | None) -> None:
    """Find out now, not after the training, that the model can't be written."""
    uri = settings.output_uri
    if uri is None:
        return
    store = open_store(uri, storage_options=storage_options)
    try:
        await check_store(store)
    finally:
        await store.close()


async def has_result(store: Store) -> bool:
    """Whether the run is over."""
    return await read_if_there(store, layout.RESULT) is not None
