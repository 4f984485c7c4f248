"""The S3 of a run that has no bucket: MiniStack as a guarded child process on 127.0.0.1, with its objects on disk.

MiniStack writes each object beside its key and renames it into place, and reads the folder again when it starts: a
stop, a crash or a kill -9 loses no object whose PUT was answered. While it runs it holds all objects in memory as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Self

from diloco import guard
from diloco.errors import ConfigurationError, StoreUnreachableError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BUCKET = "diloco"
REGION = "us-east-1"
START_SECONDS = 20.0
"""How long it may take until it answers; 0.5 s is usual."""

_ACCOUNT = "123456789012"
_HOST = "127.0.0.1"
_PORT_ATTEMPTS = 5
_GRACE = 1.0
_LOAD_SECONDS = 120.0  # its first S3 request reads all kept objects
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy can't reach this machine's loopback


class _PortTakenError(Exception):
    """Another process had the port first."""


class EmbeddedS3:
    """An S3 endpoint with one bucket, `diloco`, that keeps its objects in `data_dir`. Use it as a context manager.

    `hold` are descriptors, a lock file's say, that stay open until the server is gone.
    """

    def __init__(self, data_dir: Path, *, log: Path | None = None, hold: Sequence[int] = ()) -> None:
        self._data_dir = data_dir.absolute()
        self._log = log or data_dir.with_name(data_dir.name + ".log")
        self._hold = tuple(hold)
        self._server: subprocess.Popen[bytes] | None = None
        self.endpoint_url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def uri(self) -> str:
        """The bucket, as the parent of runs."""
        return f"s3://{BUCKET}"

    @property
    def env(self) -> dict[str, str | None]:
        """What a process's environment needs to use this S3 and nothing of the user's AWS set-up (None: unset)."""
        bypass = ",".join(filter(None, (os.environ.get("NO_PROXY"), _HOST)))
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_SESSION_TOKEN": None,
            "AWS_PROFILE": None,
            "AWS_DEFAULT_PROFILE": None,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": bypass,
            "no_proxy": bypass,
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """The same for s3fs in this process."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": "test",
            "secret": "test",
            "client_kwargs": {"region_name": REGION},
        }

    def start(self) -> None:
        """Start it and create the bucket.

        Raises ConfigurationError if a package is missing, StoreUnreachableError if it does not come up.
        """
        for package in ("ministack", "s3fs"):
            if importlib.util.find_spec(package) is None:
                raise ConfigurationError(
                    f"a run without --rendezvous needs {package}: pip install 'diloco-aws[local]',"
                    " or give --rendezvous file:///folder"
                )
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigurationError(f"the folder for the embedded S3 can't be made: {problem}") from None
        for _ in range(_PORT_ATTEMPTS):
            try:
                self._start_on(_free_port())
            except _PortTakenError:
                continue
            except BaseException:
                self.stop()
                raise
            return
        raise StoreUnreachableError(
            f"the embedded S3 found no free port in {_PORT_ATTEMPTS} attempts: {self._last_lines()}"
        )

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return self._server is not None and self._server.poll() is None

    def stop(self) -> None:
        """Stop it; nothing of it is left on return. Harmless if it does not run."""
        if self._server is not None:
            guard.stop([self._server], patience=_GRACE + 1.5)
            self._server = None

    def _start_on(self, port: int) -> None:
        mark = secrets.token_hex(8)
        settings = {
            "BIND_HOST": _HOST,
            "GATEWAY_PORT": str(port),
            "MINISTACK_ACCOUNT_ID": _ACCOUNT,
            # Its health page shows this again: whoever answers on the port is known to be ours.
            "MINISTACK_EDITION": mark,
            "SERVICES": "s3",
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(self._data_dir),
            "AUTH": "false",
            "USE_SSL": "0",
            "PERSIST_STATE": "0",
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
        }
        with self._log.open("ab") as output:
            self._server = guard.spawn(
                [sys.executable, "-m", "ministack"],
                env=_plain_environment() | settings,
                output=output,
                grace=_GRACE,
                hold=self._hold,
            )
        self.endpoint_url = f"http://{_HOST}:{port}"
        self._wait_until_ready(mark)
        self._create_bucket()

    def _wait_until_ready(self, mark: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            edition = self._edition()
            if edition == mark:
                return
            if edition is not None:
                self.stop()
                raise _PortTakenError
            if self._server is None or self._server.poll() is not None:
                if "already in use" in self._last_lines():
                    raise _PortTakenError
                raise StoreUnreachableError(f"the embedded S3 ended while it started: {self._last_lines()}")
            time.sleep(0.02)
        raise StoreUnreachableError(f"the embedded S3 did not answer within {START_SECONDS:g} s: {self._last_lines()}")

    def _edition(self) -> str | None:
        """Return the mark of whoever answers on the port, None while nobody does."""
        try:
            with _DIRECT.open(f"{self.endpoint_url}/_ministack/health", timeout=2) as answer:
                return str(json.load(answer).get("edition", ""))
        except urllib.error.HTTPError:
            return ""
        except (OSError, HTTPException):
            return None
        except (ValueError, AttributeError):
            return ""

    def _create_bucket(self) -> None:
        request = urllib.request.Request(f"{self.endpoint_url}/{BUCKET}", method="PUT")  # noqa: S310 - http, as built above
        try:
            with _DIRECT.open(request, timeout=_LOAD_SECONDS):
                return
        except urllib.error.HTTPError as problem:
            if problem.code == 409:  # it is there and ours: AWS answers so outside us-east-1
                return
            raise StoreUnreachableError(f"the embedded S3 refused to create its bucket: {problem}") from None
        except (OSError, HTTPException) as problem:
            raise StoreUnreachableError(f"the embedded S3 stopped answering: {problem}; {self._last_lines()}") from None

    def _last_lines(self) -> str:
        """Quote the end of its log in one line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{' | '.join(lines[-3:]) or 'it logged nothing'} ({self._log})"


@contextmanager
def environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Apply an environment (None: unset) to this process for as long as the block runs; its children inherit it."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _plain_environment() -> dict[str, str]:
    """What a server needs to start, and none of the user's credentials."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in names if name in os.environ}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
