"""Emulators and the tests' SageMaker for the tests of this folder."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from tests.support.sagemaker import SageMakerServer, Service
from tests.support.sagemaker.ministack import ministack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.sagemaker import Emulator


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Emulator]:
    """A MiniStack that enforces IAM."""
    with ministack(tmp_path, auth=True) as running:
        yield running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., SageMakerServer]]:
    """Starts the tests' SageMaker; without an emulator its jobs do not run."""
    with ExitStack() as stack:

        def start(**settings: Any) -> SageMakerServer:
            folder = tmp_path / f"jobs-{len(started)}"
            server = stack.enter_context(SageMakerServer(Service(folder, **settings)))
            started.append(server)
            return server

        started: list[SageMakerServer] = []
        yield start


@pytest.fixture
def client_of() -> Callable[..., Any]:
    """Makes a SageMaker client of a server that retries nothing and checks nothing itself."""

    def make(server: SageMakerServer, access_key: str = "test") -> Any:
        session: Any = boto3.session.Session(access_key, "any", region_name="us-east-1")
        config = Config(retries={"total_max_attempts": 1}, proxies={}, parameter_validation=False)
        return session.client("sagemaker", endpoint_url=server.url, config=config)

    return make
