"""A fixture that makes runs of real processes."""

from __future__ import annotations

import re
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.harness import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from diloco.embedded import EmbeddedS3


@pytest.fixture
def new_run(embedded_s3: EmbeddedS3, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """`new_run(replicas=3, rounds=6, …)`: a fresh run, of which nothing is left after the test."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Run:
            name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:30].strip("-")
            run_id = f"{name}-{secrets.token_hex(2)}"
            return stack.enter_context(Run(embedded_s3, tmp_path, run_id, **changes))

        yield make
