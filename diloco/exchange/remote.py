"""An S3 bucket, through s3fs: operations, uploads in parts, and what each failure means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

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
from diloco.exchange.store import BLOCK_BYTES, Data, Entry, Store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO, TypeVar

    from diloco.exchange.store import Range, Read

    T = TypeVar("T")

logger = logging.getLogger(__name__)

PART_BYTES = 5 * 2**20
"""Size of an upload's parts: each in flight is copied twice below us (its slice, and what the socket does not take at
once).
"""
MOST_PARTS = 10_000
CONCURRENT_PARTS = 4
CONCURRENT_OBJECTS = 2
CONCURRENT_RANGES = 4
AHEAD_BYTES = 2 * BLOCK_BYTES + 2**16
"""Two blocks, one of them with its object's framing."""
OPERATION_TIMEOUT = 30.0
ABORT_TIMEOUT = 5.0
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
    "ConnectionError",
    "HTTPClientError",
    "IncompleteReadError",
    "ReadTimeoutError",
    "ResponseParserError",
    "ResponseStreamingError",
    "TimeoutError",
    "ServerDisconnectedError",
}
_TRANSIENT = {
    "409",
    "500",
    "502",
    "503",
    "504",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
}
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "TokenRetrievalError",
}
_TOKEN_FILES = ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Name the file that a pod's identity is read from, whenever its credentials are renewed."""
_BAD_NAMES = {"InvalidBucketName", "InvalidRegionError", "NoRegionError", "ParamValidationError"}
_PERMISSIONS = {
    "read": "s3:GetObject",
    "create": "s3:PutObject",
    "write": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}


class RemoteStore(Store):
    """Objects in an S3 bucket, through s3fs. Must be used from the event loop that made the first call."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        self._path = uri.partition("://")[2].rstrip("/")
        if not self._path:
            raise ConfigurationError(f"{uri}: names no bucket")
        self._options = dict(storage_options)
        self._s3: Any = None
        self._closed = False

    async def open(self) -> None:
        """Load s3fs and botocore, which takes a while, and make the client."""
        await self._do("open", "", self._client().set_session())

    def _client(self) -> Any:
        if self._closed:
            raise StoreError(f"{self.uri}: the store was closed")
        if self._s3 is None:
            try:
                import s3fs
            except ImportError as problem:
                raise ConfigurationError(f"{self.uri}: s3fs is missing: pip install 'diloco-aws[s3]'") from problem
            options = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
            self._s3 = s3fs.S3FileSystem(**(options | {"config_kwargs": _config(self._options)} | self._options))
            self._s3.retries = 1  # trying again is RetryingStore's, with one budget for everything
        return self._s3

    async def _do(self, operation: str, key: str, call: Awaitable[T], size: int = 0) -> T:
        try:
            # Not wait_for, which before Python 3.12 loses a cancellation that comes together with the answer.
            async with asyncio.timeout(OPERATION_TIMEOUT + SECONDS_PER_MIB * size / 2**20):
                return await call
        except DilocoError:
            raise
        except Exception as problem:  # s3fs, botocore and aiohttp have no common base
            raise explain(problem, operation, self.uri, key) from problem

    def _at(self, key: str) -> str:
        return f"{self._path}/{key}"

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        s3 = self._client()
        whole = start == 0 and end is None
        call = (
            s3._cat_file(self._at(key), max_concurrency=1)
            if whole
            else s3._cat_file(self._at(key), start=start, end=end)
        )
        data: bytes = await self._do("read", key, call, (end or start) - start)
        return data

    async def fetch_with(self, read: Read, ranges: Iterable[Range]) -> AsyncGenerator[bytes]:
        """As the base says, with later ranges requested while one is used: the link does not idle between two."""
        left = deque(ranges)
        asked: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        try:
            while left or asked:
                while left and _fits(left[0].end - left[0].start, [size for size, _ in asked]):
                    one = left.popleft()
                    asked.append((one.end - one.start, asyncio.ensure_future(read(one.key, one.start, one.end))))
                yield await asked.popleft()[1]
        finally:
            await _end([future for _, future in asked])

    async def meanwhile(self, work: Callable[[], T]) -> T:
        """In a thread: hashing and torch let go of the interpreter."""
        return await asyncio.to_thread(work)

    async def each(
        self,
        calls: Sequence[Callable[[], Awaitable[None]]],
        *,
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """As the base says, :data:`CONCURRENT_OBJECTS` at a time: the link does not idle between two."""
        waiting, left, look = iter(calls), len(calls), asyncio.Event()

        async def make() -> None:
            nonlocal left
            for call in waiting:
                await call()
                left -= 1
                look.set()

        async def watch() -> None:
            while beside is not None:
                await look.wait()
                look.clear()
                if not left:
                    return
                try:
                    await beside()
                except DilocoError as problem:
                    logger.warning("%s: %s", self.uri, problem)

        making = [asyncio.ensure_future(make()) for _ in range(CONCURRENT_OBJECTS)]
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*making)
            await watching
        finally:
            await _end([*making, watching])

    async def _create(self, key: str, data: Data) -> bool:
        try:
            await self._do("create", key, self._put(key, _Slices(data), {"IfNoneMatch": "*"}), len(data))
        except _AlreadyThereError:
            return False
        except (StoreUnreachableError, ObjectMissingError) as problem:
            # ObjectMissing here is NoSuchUpload: an earlier answer to CompleteMultipartUpload was lost.
            raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create: {problem}") from problem
        return True

    async def _write(self, key: str, data: Data) -> None:
        await self._do("write", key, self._put(key, _Slices(data), {}), len(data))

    async def _write_file(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            await self._do("write", key, self._put(key, _FileSlices(file, size), {}), size)

    async def _put(self, key: str, body: _Body, condition: dict[str, str]) -> None:
        """Write an object in one request, or in parts of which few are in memory at a time.

        s3fs would do both, but leaves an upload behind when it is cancelled, and goes on sending parts after it has
        aborted one.
        """
        s3 = self._client()
        bucket, path, _ = s3.split_path(self._at(key))
        place = {"Bucket": bucket, "Key": path}
        if body.size < 2 * PART_BYTES:
            await s3._call_s3("put_object", **place, Body=await body.slice(0, body.size), **condition)
            return
        upload = place | {"UploadId": (await s3._call_s3("create_multipart_upload", **place))["UploadId"]}
        part_bytes = max(PART_BYTES, -(-body.size // MOST_PARTS))
        turn = asyncio.Semaphore(CONCURRENT_PARTS)

        async def send(number: int, start: int) -> dict[str, Any]:
            async with turn:
                data = await body.slice(start, start + part_bytes)
                answer = await s3._call_s3("upload_part", **upload, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        starts = range(0, body.size, part_bytes)
        sending = [asyncio.ensure_future(send(number, start)) for number, start in enumerate(starts, 1)]
        try:
            parts = {"Parts": list(await asyncio.gather(*sending))}
            await s3._call_s3("complete_multipart_upload", **upload, MultipartUpload=parts, **condition)
        except BaseException:
            await _end(sending)
            abort = asyncio.ensure_future(s3._call_s3("abort_multipart_upload", **upload))
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(abort), ABORT_TIMEOUT)
            raise

    async def _list(self, prefix: str) -> list[Entry]:
        # s3fs's own find asks twice more when nothing is there, as in most polls, and may then find a folder.
        s3 = self._client()
        bucket, path, _ = s3.split_path(self._at(prefix))
        place, entries = {"Bucket": bucket, "Prefix": path}, list[Entry]()
        skip = len(path) - len(prefix)
        while True:
            page = await self._do("list", prefix, s3._call_s3("list_objects_v2", **place))
            for found in page.get("Contents", []):
                entries.append(Entry(found["Key"][skip:], int(found["Size"]), found["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return entries
            place["ContinuationToken"] = page["NextContinuationToken"]

    async def _delete(self, key: str) -> None:
        await self._do("delete", key, self._client()._rm_file(self._at(key)))

    async def close(self) -> None:
        """Close the HTTP session, for good."""
        self._closed = True
        client, self._s3 = getattr(self._s3, "_s3", None), None
        if client is not None:
            await client.__aexit__(None, None, None)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what is not done, and wait for it: again and again, since a library below may lose a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)


def _fits(size: int, asked: list[int]) -> bool:
    """Whether one more range of this size may be asked for: two blocks' bytes at once, or whatever if there is none."""
    return not asked or (len(asked) < CONCURRENT_RANGES and sum(asked) + size <= AHEAD_BYTES)


class _Body(Protocol):
    """What is uploaded."""

    size: int

    async def slice(self, start: int, end: int) -> bytes | bytearray: ...


class _Slices:
    """Bytes in memory."""

    def __init__(self, data: Data) -> None:
        self.size = len(data)
        self._data = data

    async def slice(self, start: int, end: int) -> bytes | bytearray:
        if end - start >= self.size and not isinstance(self._data, memoryview):
            return self._data
        return bytes(memoryview(self._data)[start:end])  # botocore takes no memoryview


class _FileSlices:
    """A local file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file

    async def slice(self, start: int, end: int) -> bytes:
        return await asyncio.to_thread(os.pread, self._file.fileno(), min(end, self.size) - start, start)


class _AlreadyThereError(DilocoError):
    pass


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 30,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "max_attempts": 1},
    }
    variables = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = next(filter(None, (options.get("endpoint_url"), *variables)), "")
    if endpoint.startswith("http://"):
        # Over plain HTTP botocore hashes each body twice; our own chunk digests already guard what is averaged.
        config["request_checksum_calculation"] = "when_required"
    return config


def explain(problem: BaseException, operation: str, uri: str, key: str) -> DilocoError:
    """What s3fs, botocore or aiohttp raised, as one of our errors with one line of text."""
    where = f"{uri}/{key}"
    said = " ".join(str(problem).split())
    code = _code(problem)
    names = {kind.__name__ for kind in type(problem).__mro__}
    if operation == "create" and (code in _EXISTS or isinstance(problem, FileExistsError)):
        return _AlreadyThereError(where)
    if code == "NoSuchBucket":
        return BucketMissingError(f"{uri}: the bucket does not exist: create it, or correct the address")
    if (denied := _denied(problem, code, names, operation, uri, key)) is not None:
        return denied
    if code in {"InvalidRange", "416"}:
        return CorruptObjectError(f"{where}: is shorter than its header says")
    if isinstance(problem, FileNotFoundError):
        return ObjectMissingError(where)
    if code in _TRANSIENT or (code is None and names & _UNREACHABLE):
        return StoreUnreachableError(f"{where}: no answer on {operation}: {said or 'time-out'}")
    if names & _BAD_NAMES:
        return ConfigurationError(f"{uri}: {said}")
    return StoreError(f"{where}: {operation} failed: {type(problem).__name__}: {said}")


def _denied(
    problem: BaseException, code: str | None, names: set[str], operation: str, uri: str, key: str
) -> AccessDeniedError | None:
    if (said := _web_identity_refused(problem)) is not None:
        return AccessDeniedError(
            f"{uri}: no usable AWS credentials: STS gives none for the token of AWS_WEB_IDENTITY_TOKEN_FILE: {said}:"
            " check AWS_ROLE_ARN and that role's trust policy"
        )
    if code in _CREDENTIALS:
        return AccessDeniedError(f"{uri}/{key}: {_CREDENTIALS[code]}")
    if names & _NO_CREDENTIALS:
        said = " ".join(str(problem).split())
        return AccessDeniedError(f"{uri}: no usable AWS credentials ({said}): run `aws configure`, or set AWS_PROFILE")
    if isinstance(problem, OSError) and problem.filename is not None:
        for variable in _TOKEN_FILES:
            if os.environ.get(variable) == problem.filename:
                return AccessDeniedError(
                    f"{uri}: no usable AWS credentials: {problem.filename} of {variable} can't be read:"
                    f" {problem.strerror}: mount the token there, or correct {variable}"
                )
    if isinstance(problem, PermissionError) or code in {"403", "AccessDenied"}:
        permission = _PERMISSIONS.get(operation, "access")
        return AccessDeniedError(
            f"{uri}/{key}: access denied on {operation}: these credentials need {permission} there"
        )
    return None


def _web_identity_refused(problem: BaseException | None) -> str | None:
    """STS's words, if it was STS that refused: it speaks before S3 is asked."""
    while problem is not None:
        if getattr(problem, "operation_name", None) == "AssumeRoleWithWebIdentity":
            return " ".join(str(problem).split())
        problem = problem.__cause__
    return None


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
