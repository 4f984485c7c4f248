"""A trainer whose steps take a fixed time, so that things can befall a run in its midst."""

from __future__ import annotations

from typing import Any

from benchmarks.paced import train as paced
from diloco.errors import ConfigurationError


def train(*, rank: int, refuse: int | None = None, **settings: Any) -> dict[str, Any]:
    """`refuse` is the rank whose configuration can't work."""
    if rank == refuse:
        raise ConfigurationError("this rank has no data that it could train on")
    return paced(rank=rank, parameters=4096, **settings)
