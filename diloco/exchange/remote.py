"""A bucket behind fsspec's asynchronous filesystems: s3fs for `s3://`, and those of other clouds that can create if
absent.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diloco.errors import (
    AccessDeniedError,
    BucketMissingError,
    ConfigurationError,
    CorruptObjectError,
    DilocoError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreError,
    StoreUnreachableError,
)
from diloco.exchange.store import Entry, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")

PART_BYTES = 8 * 2**20
"""Size of an upload's parts: each in flight is copied twice below us (its slice, and what the socket does not take at
once).
"""
MOST_PARTS = 10_000
CONCURRENT_PARTS = 4
OPERATION_TIMEOUT = 30.0
SECONDS_PER_MIB = 1.0
"""A transfer may take so much longer per MiB before it counts as hung."""

_EXISTS = {"PreconditionFailed", "412"}
_CREDENTIALS = {
    "ExpiredToken": "the credentials have expired: renew them",
    "ExpiredTokenException": "the credentials have expired: renew them",
    "InvalidAccessKeyId": "the access key id is unknown: check AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret access key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
}
_UNREACHABLE = {  # botocore's and aiohttp's
    "ClientConnectorError",
    "ClientOSError",
    "ClientPayloadError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "HTTPClientError",
    "IncompleteReadError",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
}
_TRANSIENT = {"500", "503", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
_PERMISSIONS = {
    "read": "s3:GetObject",
    "create": "s3:PutObject",
    "write": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}


class RemoteStore(Store):
    """Objects in a bucket. Must be used from the event loop that made the first call."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        self._scheme = urlsplit(uri).scheme
        self._path = uri.partition("://")[2].rstrip("/")
        if not self._path:
            raise ConfigurationError(f"{uri}: names no bucket")
        self._options = dict(storage_options)
        self._fs: Any = None

    def _open(self) -> Any:
        if self._fs is None:
            import fsspec

            options: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
            if self._scheme == "s3":
                options |= {"config_kwargs": _s3_config(self._options)}
            try:
                self._fs = fsspec.filesystem(self._scheme, **(options | self._options))
            except (ImportError, ValueError) as problem:
                hint = "pip install 'diloco-aws[s3]'" if self._scheme == "s3" else "use s3:// or file://"
                raise ConfigurationError(
                    f"{self.uri}: no filesystem for {self._scheme}://: {hint} ({problem})"
                ) from problem
            self._fs.retries = 1
            if not getattr(self._fs, "async_impl", False):
                raise ConfigurationError(
                    f"{self.uri}: {self._scheme}:// has no asynchronous filesystem; use s3:// or file://"
                )
        return self._fs

    async def _do(self, operation: str, key: str, call: Awaitable[T], size: int = 0) -> T:
        try:
            return await asyncio.wait_for(call, OPERATION_TIMEOUT + SECONDS_PER_MIB * size / 2**20)
        except DilocoError:
            raise
        except Exception as problem:  # fsspec, botocore and aiohttp have no common base
            raise explain(problem, operation, self.uri, key) from problem

    def _at(self, key: str) -> str:
        return f"{self._path}/{key}"

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        fs = self._open()
        whole = start == 0 and end is None
        call = (
            fs._cat_file(self._at(key), max_concurrency=1)
            if whole
            else fs._cat_file(self._at(key), start=start, end=end)
        )
        data: bytes = await self._do("read", key, call, (end or start) - start)
        return data

    async def read_ahead(
        self, read: Callable[[str, int, int], Awaitable[bytes]], key: str, start: int, end: int, block: int
    ) -> AsyncIterator[bytes]:
        """As the base says, with the next block requested while this one is used."""
        ahead: asyncio.Future[bytes] | None = None
        try:
            for offset in range(start, end, block):
                data = await (ahead or read(key, offset, min(offset + block, end)))
                after = offset + block
                ahead = asyncio.ensure_future(read(key, after, min(after + block, end))) if after < end else None
                yield data
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _create(self, key: str, data: bytes | bytearray) -> bool:
        try:
            await self._do("create", key, self._pipe(key, data, "create"), len(data))
        except _AlreadyThereError:
            return False
        except (StoreUnreachableError, ObjectMissingError) as problem:
            # ObjectMissing here is NoSuchUpload: an earlier answer to CompleteMultipartUpload was lost.
            raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create: {problem}") from problem
        return True

    async def _write(self, key: str, data: bytes | bytearray) -> None:
        await self._do("write", key, self._pipe(key, data, "overwrite"), len(data))

    def _pipe(self, key: str, data: bytes | bytearray, mode: str) -> Awaitable[object]:
        part = max(PART_BYTES, -(-len(data) // MOST_PARTS))
        call: Awaitable[object] = self._open()._pipe_file(
            self._at(key), data, mode=mode, chunksize=part, max_concurrency=CONCURRENT_PARTS
        )
        return call

    async def _write_file(self, key: str, path: Path) -> None:
        await self._do("write", key, self._open()._put_file(str(path), self._at(key)), path.stat().st_size)

    async def _list(self, prefix: str) -> list[Entry]:
        found = await self._do("list", prefix, self._open()._find(self._at(prefix), detail=True, withdirs=False))
        skip = len(self._path) + 1
        return [Entry(name[skip:], int(info["size"])) for name, info in found.items()]

    async def _delete(self, key: str) -> None:
        await self._do("delete", key, self._open()._rm_file(self._at(key)))

    async def close(self) -> None:
        """Close the HTTP session."""
        client, self._fs = getattr(self._fs, "_s3", None), None
        if client is not None:
            await client.__aexit__(None, None, None)


class _AlreadyThereError(DilocoError):
    pass


def _s3_config(options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 30,
        "max_pool_connections": 32,
        # Trying again is RetryingStore's: once, with one budget for everything.
        "retries": {"mode": "standard", "max_attempts": 1},
    }
    endpoint = (
        options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    )
    if endpoint.startswith("http://"):
        # Over plain HTTP botocore hashes each body twice; our own chunk digests already guard what is averaged.
        config["request_checksum_calculation"] = "when_required"
    return config


def explain(problem: BaseException, operation: str, uri: str, key: str) -> DilocoError:
    """What fsspec, botocore or aiohttp raised, as one of our errors with one line of text."""
    where = f"{uri}/{key}"
    said = " ".join(str(problem).split())
    code = _code(problem)
    name = type(problem).__name__
    if code in _EXISTS or isinstance(problem, FileExistsError):
        return _AlreadyThereError(where)
    if code in {"InvalidRange", "416"}:
        return CorruptObjectError(f"{where}: is shorter than its header says")
    if code == "NoSuchBucket":
        return BucketMissingError(f"{uri}: the bucket does not exist: create it, or correct the address")
    if code in _CREDENTIALS:
        return AccessDeniedError(f"{where}: {_CREDENTIALS[code]}")
    if name in {
        "NoCredentialsError",
        "PartialCredentialsError",
        "TokenRetrievalError",
        "SSOTokenLoadError",
        "ProfileNotFound",
    }:
        return AccessDeniedError(f"{uri}: no usable AWS credentials ({said}): run `aws configure`, or set AWS_PROFILE")
    if isinstance(problem, PermissionError) or code in {"403", "AccessDenied"}:
        permission = _PERMISSIONS[operation] if uri.startswith("s3:") else f"permission to {operation}"
        return AccessDeniedError(f"{where}: access denied on {operation}: these credentials need {permission} there")
    if isinstance(problem, FileNotFoundError):
        return ObjectMissingError(where)
    if code in {"409", "ConditionalRequestConflict", "OperationAborted"} or isinstance(
        problem, (TimeoutError, ConnectionError)
    ):
        return StoreUnreachableError(f"{where}: no answer on {operation}: {said or 'time-out'}")
    if name in _UNREACHABLE or code in _TRANSIENT:
        return StoreUnreachableError(f"{where}: no answer on {operation}: {said}; check the endpoint and the network")
    if name in {"InvalidBucketName", "ParamValidationError", "InvalidRegionError", "NoRegionError"}:
        return ConfigurationError(f"{uri}: {said}")
    return StoreError(f"{where}: {operation} failed: {name}: {said}")


def _code(problem: BaseException | None) -> str | None:
    """The S3 error code of an exception or of one that caused it: s3fs raises FileNotFoundError for a bucket and a
    key alike.
    """
    while problem is not None:
        response = getattr(problem, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code"))
        problem = problem.__cause__
    return None
