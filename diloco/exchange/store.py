"""The few operations that the protocol needs of an object store, and what it assumes of it.

Assumed: read-after-write and list-after-write consistency, atomic whole-object writes, and atomic create-if-absent.
Amazon S3 gives all three (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html);
:func:`check_store` refuses a store that does not.

Repeating any operation is harmless: reads and lists change nothing, `write` puts the same bytes again, and `create`
of a record is recognised as one's own by its nonce (:func:`create_once`). Every failure is one of the errors in
:mod:`diloco.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from diloco.errors import (
    ConditionalWriteError,
    ConfigurationError,
    CorruptObjectError,
    DilocoError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreError,
    StoreUnreachableError,
)
from diloco.exchange import layout
from diloco.exchange.records import new_nonce

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from diloco.exchange.records import OnceRecord

T = TypeVar("T")

Data = bytes | bytearray | memoryview

BLOCK_BYTES = 8 * 2**20
"""How much of a large object is in flight in one piece."""

CREATE_ATTEMPTS = 5

CHECK_SECONDS = 8.0
"""How long a launcher's first contact with a store may take."""


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One listed object."""

    key: str
    size: int
    modified: float | None = field(default=None, compare=False)
    """When it was written, by the store's own clock (seconds since 1970); None if the store doesn't say. The protocol
    never looks at it.
    """


Entries = list[Entry]

Read = Callable[[str, int, int], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes `[start, end)` of an object."""

    key: str
    start: int
    end: int


@dataclass
class Stats:
    """What went through a store: requests as the protocol made them, bytes of bodies."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Store(ABC):
    """An object store below one URI. Keys are relative to it, with slashes."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.stats = Stats()

    async def open(self) -> None:  # noqa: B027 - most stores need nothing
        """Load and set up what the first operation would else have to: libraries, credentials."""

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """An object's bytes, or those in `[start, end)`. Raises ObjectMissingError, CorruptObjectError for a short
        answer.
        """
        self.stats.requests += 1
        data = await self._read(_inside(key), start, end)
        self.stats.bytes_down += len(data)
        if end is not None and len(data) != end - start:
            raise CorruptObjectError(f"{key}: asked for bytes {start}-{end}, got {len(data)} bytes")
        return data

    def stream(self, key: str, start: int, end: int, block: int = BLOCK_BYTES) -> AsyncGenerator[bytes]:
        """The bytes in `[start, end)` in order, `block` at a time (the last may be shorter)."""
        return self.fetch([Range(key, at, min(at + block, end)) for at in range(start, end, block)])

    def fetch(self, ranges: Iterable[Range]) -> AsyncGenerator[bytes]:
        """The bytes of each range, in this order. A store that can asks for the next ones while one is used, of at most
        two blocks together. Close the generator if you leave it early.
        """
        return self.fetch_with(self.read, ranges)

    async def fetch_with(self, read: Read, ranges: Iterable[Range]) -> AsyncGenerator[bytes]:
        """How this store fetches, with `read(key, start, end)` for each range."""
        for one in ranges:
            yield await read(one.key, one.start, one.end)

    async def meanwhile(self, work: Callable[[], T]) -> T:
        """Do what takes a processor's time; a store that can goes on transferring."""
        return work()

    async def each(
        self,
        calls: Sequence[Callable[[], Awaitable[None]]],
        *,
        at_once: int = 2,  # noqa: ARG002
        then: Callable[[], Awaitable[None]] | None = None,
        beside: Callable[[], Awaitable[object]] | None = None,  # noqa: ARG002
    ) -> None:
        """Make calls that transfer something, in this order, and `then` when all have ended; a store that can has
        `at_once` under way. The first that raises ends the others.

        `beside` only saves time: a store that can calls it, too, when one of them has ended and more are left, and
        lets it finish. What the store refuses to it is not raised.
        """
        for call in calls:
            await call()
        if then is not None:
            await then()

    async def create(self, key: str, data: Data) -> bool:
        """Write the object if it is absent. True: written now; False: it was there. Raises OutcomeUnknownError if the
        answer was lost.
        """
        self.stats.requests += 1
        created = await self._create(_inside(key), data)
        self.stats.bytes_up += len(data)
        return created

    async def write(self, key: str, data: Data) -> None:
        """Write the object whether or not it is there."""
        self.stats.requests += 1
        await self._write(_inside(key), data)
        self.stats.bytes_up += len(data)

    async def write_file(self, key: str, path: Path) -> None:
        """Write an object from a local file."""
        self.stats.requests += 1
        self.stats.bytes_up += path.stat().st_size
        await self._write_file(_inside(key), path)

    async def list(self, prefix: str) -> Entries:
        """All objects whose key starts with `prefix` (which ends in a slash), sorted by key. Never cached."""
        self.stats.requests += 1
        return sorted(entry for entry in await self._list(prefix) if _is_inside(entry.key))

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; absent ones are ignored."""
        for key in keys:
            self.stats.requests += 1
            await self._delete(_inside(key))

    async def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release connections."""

    @abstractmethod
    async def _read(self, key: str, start: int, end: int | None) -> bytes: ...

    @abstractmethod
    async def _create(self, key: str, data: Data) -> bool: ...

    @abstractmethod
    async def _write(self, key: str, data: Data) -> None: ...

    @abstractmethod
    async def _write_file(self, key: str, path: Path) -> None: ...

    @abstractmethod
    async def _list(self, prefix: str) -> Entries: ...

    @abstractmethod
    async def _delete(self, key: str) -> None: ...


def _inside(key: str) -> str:
    """The key itself, or CorruptObjectError for one that could lead out of the store: keys come from listings, too."""
    if not _is_inside(key):
        raise CorruptObjectError(f"{key!r} is no key of a run")
    return key


def _is_inside(key: str) -> bool:
    return not key.startswith("/") and ".." not in key.split("/")


def open_store(uri: str, *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store at `s3://bucket/prefix`, `file:///folder` or `memory://name`.

    `storage_options` go to s3fs; what they leave out comes from the environment (AWS_ENDPOINT_URL, credentials, …).
    Raises ConfigurationError for a scheme that can't be used.
    """
    scheme = urlsplit(uri).scheme
    if scheme == "memory":
        from diloco.exchange.stores import MemoryStore

        return MemoryStore(uri)
    if scheme == "file":
        from diloco.exchange.stores import LocalStore

        return LocalStore(uri)
    if scheme != "s3":
        what = f"is {scheme}://" if scheme else "has no scheme"
        raise ConfigurationError(f"rendezvous {uri!r} {what}: write s3://bucket/prefix or file:///folder")
    from diloco.exchange.remote import RemoteStore

    return RemoteStore(uri, storage_options or {})


async def create_once(store: Store, key: str, record: OnceRecord) -> tuple[bool, bytes]:
    """Create a record if absent; returns whether the stored one is mine, and its bytes.

    A lost answer is settled by reading back: the object is mine exactly if it holds my nonce.
    """
    body = record.to_json()
    for attempt in range(CREATE_ATTEMPTS):
        try:
            if await store.create(key, body):
                return True, body
        except OutcomeUnknownError:
            if attempt == CREATE_ATTEMPTS - 1:
                raise
        try:
            stored = await store.read(key)
        except ObjectMissingError:
            continue
        return stored == body, stored
    raise OutcomeUnknownError(f"{store.uri}/{key}: the store says that it exists, and that it does not")


async def create_same(store: Store, key: str, data: Data, *, nonce_in: int | None = None) -> bool:
    """Create an object of which every writer writes the same bytes; returns whether the stored ones are these.

    A lost answer is settled by reading back: the first `nonce_in` bytes where they hold a nonce, else all.
    """
    for attempt in range(CREATE_ATTEMPTS):
        try:
            if await store.create(key, data):
                return True
        except OutcomeUnknownError:
            if attempt == CREATE_ATTEMPTS - 1:
                raise
        try:
            return await _holds(store, key, memoryview(data)[:nonce_in])
        except CorruptObjectError:
            return False
        except ObjectMissingError:
            continue
    raise OutcomeUnknownError(f"{store.uri}/{key}: the store says that it exists, and that it does not")


async def _holds(store: Store, key: str, data: memoryview) -> bool:
    at, same = 0, True
    async for block in store.stream(key, 0, len(data)):
        same = same and data[at : at + len(block)] == block
        at += len(block)
    return same


async def read_if_there(store: Store, key: str) -> bytes | None:
    """An object's bytes, or None."""
    try:
        return await store.read(key)
    except ObjectMissingError:
        return None


async def check_store(store: Store, *, seconds: float = CHECK_SECONDS) -> None:
    """Prove with two writes to a fresh key that create-if-absent works, and that listing and deleting are allowed.

    Raises ConditionalWriteError for a store that lets both writes win, StoreUnreachableError if it takes longer than
    `seconds`, else what the operation itself raises (BucketMissingError, AccessDeniedError).
    """
    await store.open()
    try:
        async with asyncio.timeout(seconds):
            await _probe(store)
    except TimeoutError:
        raise _no_answer(store, seconds) from None


async def check_read(store: Store, *, seconds: float = CHECK_SECONDS) -> None:
    """Make sure within `seconds` that a store answers, without writing anything. Raises as :func:`check_store`."""
    await store.open()
    try:
        async with asyncio.timeout(seconds):
            await store.list(layout.COMMITS)
    except TimeoutError:
        raise _no_answer(store, seconds) from None


def _no_answer(store: Store, seconds: float) -> StoreUnreachableError:
    return StoreUnreachableError(
        f"{store.uri}: no answer within {seconds:.0f} s: check the address, the endpoint (AWS_ENDPOINT_URL) and "
        "the network"
    )


@contextlib.asynccontextmanager
async def _deleted_after(store: Store, key: str) -> AsyncIterator[None]:
    """Delete the object at the end; a failure of that is raised only if nothing worse was."""
    try:
        yield
    except DilocoError:
        with contextlib.suppress(StoreError):
            await store.delete([key])
        raise
    await store.delete([key])


async def _probe(store: Store) -> None:
    key = f"{layout.PROBES}{new_nonce()}.json"
    try:
        await store.create(key, b"first")
    except OutcomeUnknownError as problem:
        raise StoreUnreachableError(str(problem)) from problem
    async with _deleted_after(store, key):
        second = await store.create(key, b"second")
        if second or await store.read(key) != b"first":
            raise ConditionalWriteError(
                f"{store.uri}: this store ignores conditional writes (If-None-Match: *), so two replicas could both "
                "commit a round; use Amazon S3, MinIO, SeaweedFS, MiniStack, or a local folder"
            )
        try:
            await store.read(key, 1, 3)
        except CorruptObjectError as problem:
            raise ConfigurationError(
                f"{store.uri}: this store ignores ranges, it answers with whole objects ({problem}); use Amazon S3, "
                "MinIO, SeaweedFS, MiniStack, or a local folder"
            ) from problem
        if not any(entry.key == key for entry in await store.list(layout.PROBES)):
            raise ConditionalWriteError(
                f"{store.uri}: an object that was just written is not listed; a strongly consistent store is needed"
            )
