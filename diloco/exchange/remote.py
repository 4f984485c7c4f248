"""An S3 bucket, through s3fs, and obstore for large transfers if it is there: operations, and uploads in parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from diloco.errors import (
    ConfigurationError,
    DilocoError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreError,
    StoreUnreachableError,
)
from diloco.exchange.bulk import LEAST_BYTES, MOST_BYTES, Bulk
from diloco.exchange.s3_errors import AlreadyThereError, explain
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
CONCURRENT_RANGES = 4
AHEAD_BYTES = 2 * BLOCK_BYTES + 2**16
"""Two blocks, one of them with its object's framing."""
OPERATION_TIMEOUT = 30.0
ABORT_TIMEOUT = 5.0
SECONDS_PER_MIB = 1.0
"""A transfer may take so much longer per MiB before it counts as hung."""


class RemoteStore(Store):
    """Objects in an S3 bucket. Must be used from the event loop that made the first call."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(uri)
        self._path = uri.partition("://")[2].rstrip("/")
        if not self._path:
            raise ConfigurationError(f"{uri}: names no bucket")
        self._options = dict(storage_options)
        self._s3: Any = None
        self._closed = False
        self._bulk: Bulk | None = None
        self._bulk_known = False

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
        data: bytes = await self._do("read", key, self._get(key, start, end), (end or start) - start)
        return data

    async def _get(self, key: str, start: int, end: int | None) -> bytes:
        s3, place = self._client(), self._at(key)
        if end is not None and (bulk := await self._for_bulk(end - start)) is not None:
            found = await bulk.read(self._in_bucket(key), start, end)
            if found is not None:
                return found
        whole = start == 0 and end is None
        data: bytes = await (
            s3._cat_file(place, max_concurrency=1) if whole else s3._cat_file(place, start=start, end=end)
        )
        return data

    async def _for_bulk(self, size: int) -> Bulk | None:
        """What transfers so many bytes, if not s3fs."""
        if not self._bulk_known and size >= LEAST_BYTES:
            self._bulk = await Bulk.of(self._client(), self._path.partition("/")[0])
            self._bulk_known = True
        return self._bulk if self._bulk is not None and self._bulk.takes(size) else None

    def _in_bucket(self, key: str) -> str:
        return self._at(key).partition("/")[2]

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
        at_once: int = 2,
        then: Callable[[], Awaitable[None]] | None = None,
        beside: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """As the base says: the link does not idle between two."""
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

        making = [asyncio.ensure_future(make()) for _ in range(at_once)]
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*making)
            if then is not None:
                await then()
            await watching
        finally:
            await _end([*making, watching])

    async def _create(self, key: str, data: Data) -> bool:
        try:
            return await self._do("create", key, self._put_new(key, data), len(data))
        except AlreadyThereError:
            return False
        except (StoreUnreachableError, ObjectMissingError) as problem:
            # ObjectMissing here is NoSuchUpload: an earlier answer to CompleteMultipartUpload was lost.
            raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create: {problem}") from problem

    async def _put_new(self, key: str, data: Data) -> bool:
        if len(data) <= MOST_BYTES and (bulk := await self._for_bulk(len(data))) is not None:
            created = await bulk.create(self._in_bucket(key), data)
            if created is not None:
                return created
        await self._put(key, _Slices(data), {"IfNoneMatch": "*"})
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
