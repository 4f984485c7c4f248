"""What the searches share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.simulation.search import all_cores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Processes on all cores."""
    with all_cores() as pool:
        yield pool
