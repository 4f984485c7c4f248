"""MiniStack as tests need it: all the services of a stack in one process on 127.0.0.1, IAM enforced if asked."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from diloco import guard
from tests.support.sagemaker.emulator import Emulator

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

START_SECONDS = 30.0


@contextmanager
def ministack(folder: Path, *, auth: bool = False, region: str = "us-east-1") -> Iterator[Emulator]:
    """A fresh MiniStack; its log is in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    names = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ} | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_ACCOUNT_ID": "123456789012",
        "MINISTACK_REGION": region,
        "AUTH": str(auth).lower(),
        "PERSIST_STATE": "0",
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "LOG_LEVEL": "WARNING",
    }
    with (folder / "ministack.log").open("ab") as log:
        server = guard.spawn([sys.executable, "-m", "ministack"], env=env, output=log, grace=1.0)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(server, url)
        yield Emulator(url, region=region)
    finally:
        guard.stop([server])


def reset(emulator: Emulator) -> None:
    """Forget everything that is in it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(f"{emulator.endpoint_url}/_ministack/reset", method="POST")  # noqa: S310 - loopback
    with direct.open(asked, timeout=30):
        pass


def put_image(emulator: Emulator) -> str:
    """Put an image's manifest into a repository of its own, `shared/trainer`; returns the image's URI by digest."""
    ecr = emulator.client("ecr")
    uri = ecr.create_repository(repositoryName="shared/trainer")["repository"]["repositoryUri"]
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": f"sha256:{'0' * 64}", "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": []}
    pushed = ecr.put_image(
        repositoryName="shared/trainer", imageTag="v1", imageManifest=json.dumps(manifest | {"config": config})
    )
    return f"{uri}@{pushed['image']['imageId']['imageDigest']}"


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), direct.open(f"{url}/_ministack/health", timeout=2):
            return
        time.sleep(0.05)
    raise RuntimeError(f"MiniStack did not start at {url}")
