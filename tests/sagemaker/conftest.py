"""Emulators, accounts, and the tests' SageMaker for the tests of this folder: each started once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from tests.sagemaker.account import account
from tests.support.engine import require
from tests.support.sagemaker import SageMakerServer, Service
from tests.support.sagemaker.ministack import ministack, reset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sagemaker.account import TestAccount
    from tests.support.sagemaker import Emulator


@pytest.fixture(scope="package")
def _ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with ministack(tmp_path_factory.mktemp("ministack"), auth=True) as running:
        yield running


@pytest.fixture
def emulator(_ministack: Emulator) -> Iterator[Emulator]:
    """A MiniStack that enforces IAM, with nothing in it."""
    yield _ministack
    reset(_ministack)


@pytest.fixture(scope="package")
def _account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestAccount]:
    require("pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python")
    with account(tmp_path_factory.mktemp("account")) as made:
        yield made


@pytest.fixture
def aws(_account: TestAccount) -> Iterator[TestAccount]:
    """An account after `pulumi up`, with whatever a test before had set undone."""
    yield _account
    faults = _account.service.faults
    faults.do_not_throttle()
    faults.no_capacity.clear()


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
