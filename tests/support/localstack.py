"""LocalStack's free core, the second opinion on what MiniStack does: S3, IAM, STS, Logs.

It has a virtual environment of its own, `.localstack-venv` (`make localstack`), since its botocore has no matching
aiobotocore. Version 4.13 is the last for Python 3.11.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco import guard
from diloco.embedded import EmbeddedS3
from tests.support.engine import ROOT
from tests.support.sagemaker.emulator import Emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = ROOT / ".localstack-venv"
START_SECONDS = 120.0
"""Seconds until it must answer; 2 to 9 are usual."""
ACCOUNT = "000000000000"


@contextmanager
def localstack(folder: Path) -> Iterator[Emulator]:
    """A fresh LocalStack that keeps its files and its log in `folder`. Skips the test where it is not installed."""
    supervisor = FOLDER / "bin" / "localstack-supervisor"
    if not supervisor.exists():
        pytest.skip("LocalStack is not installed: make localstack")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    kept = ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in kept if name in os.environ} | {
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "DISABLE_EVENTS": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "DNS_ADDRESS": "0",
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "FILESYSTEM_ROOT": str(folder / "files"),
        "EAGER_SERVICE_LOADING": "0",
    }
    with (folder / "localstack.log").open("ab") as log:
        server = guard.spawn([str(supervisor)], env=env, output=log, grace=2.0)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"LocalStack did not start: {(folder / 'localstack.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield Emulator(url, account=ACCOUNT)
    finally:
        guard.stop([server])


class RunningS3(EmbeddedS3):
    """The bucket `diloco` of an S3 that somebody else has started, where tests expect an embedded one."""

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(Path("unused"))
        self.endpoint_url = endpoint_url

    def start(self) -> None:
        """It runs."""


def _ready(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError, ValueError), direct.open(f"{url}/_localstack/health", timeout=2) as answer:
        return "s3" in json.load(answer).get("services", {})
    return False
