"""What all tests share: no cloud account of this machine is ever used, and one fixture runs a test over each store."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

import hypothesis
import pytest

from diloco.embedded import EmbeddedS3, environment
from diloco.exchange.store import open_store
from diloco.exchange.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

STORES = ("memory", "file", "s3")

# The same examples in every run, however slow the machine: a red test is red for everybody.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stores", default=",".join(STORES), help="stores of `store_uri` (default: %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Cut this process and its children off from the host's AWS set-up and from model hubs. Before collection, since
    libraries read these when they are imported.
    """
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("HF_HUB_OFFLINE", "1")
    # Tests share the cores: OpenMP threads that spin at a barrier for one that has no core make it eight times as long.
    patch.setenv("OMP_NUM_THREADS", "1")
    config.add_cleanup(patch.undo)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store_uri" in metafunc.fixturenames:
        chosen = str(metafunc.config.getoption("--stores")).split(",")
        if unknown := set(chosen) - set(STORES):
            raise pytest.UsageError(f"--stores: {', '.join(sorted(unknown))}: choose from {', '.join(STORES)}")
        metafunc.parametrize("store_uri", chosen, indirect=True)


@pytest.fixture(autouse=True)
def _no_credentials_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that sets credentials of its own leaves none for the next."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def embedded_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    """One MiniStack for all tests of this process, or the S3 that `$DILOCO_TEST_S3` names."""
    if endpoint := os.environ.get("DILOCO_TEST_S3"):
        from tests.support.localstack import RunningS3

        yield RunningS3(endpoint)
        return
    with EmbeddedS3(tmp_path_factory.mktemp("s3") / "data") as s3:
        yield s3


@pytest.fixture
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty prefix of a run, in each store of `--stores`; the environment lets `open_store` reach it."""
    run_id = f"run-{secrets.token_hex(4)}"
    if request.param == "memory":
        uri = f"memory://{run_id}"
        yield uri
        MemoryStore.forget(uri)
    elif request.param == "file":
        yield (tmp_path / run_id).as_uri()
    else:
        s3: EmbeddedS3 = request.getfixturevalue("embedded_s3")
        uri = f"{s3.uri}/{run_id}"
        with environment(s3.env):
            yield uri
            asyncio.run(_empty(uri))  # MiniStack holds every object in memory


async def _empty(uri: str) -> None:
    store = open_store(uri)
    try:
        await store.delete([entry.key for entry in await store.list("")])
    finally:
        await store.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where all parts must be there (CI), a skipped test has failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("DILOCO_REQUIRE_ALL") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and nothing may be missing here: {report.longrepr}"
    return report
