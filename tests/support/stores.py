"""Stores that misbehave on purpose, and one to build them from."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from diloco.errors import OutcomeUnknownError
from diloco.exchange.store import Data, Entry, Store, open_store
from diloco.exchange.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def opened(uri: str) -> AsyncIterator[Store]:
    """A store that is closed afterwards."""
    store = open_store(uri)
    try:
        yield store
    finally:
        await store.close()


class WrappedStore(Store):
    """Another store's objects, with a hook before each operation takes effect and one before its answer is seen.

    Each member of a run has its own, so that requests and bytes are counted by member.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner.uri)
        self.inner = inner

    async def before(self, operation: str, key: str) -> None:
        """Nothing yet; `operation` is read, create, write, list or delete."""

    async def after(self, operation: str, key: str) -> None:
        """Nothing yet."""

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        await self.before("read", key)
        data = await self.inner._read(key, start, end)
        await self.after("read", key)
        return data

    async def _create(self, key: str, data: Data) -> bool:
        await self.before("create", key)
        created = await self.inner._create(key, data)
        await self.after("create", key)
        return created

    async def _write(self, key: str, data: Data) -> None:
        await self.before("write", key)
        await self.inner._write(key, data)
        await self.after("write", key)

    async def _write_file(self, key: str, path: Path) -> None:
        await self.before("write", key)
        await self.inner._write_file(key, path)
        await self.after("write", key)

    async def _list(self, prefix: str) -> list[Entry]:
        await self.before("list", prefix)
        found = await self.inner._list(prefix)
        await self.after("list", prefix)
        return found

    async def _delete(self, key: str) -> None:
        await self.before("delete", key)
        await self.inner._delete(key)
        await self.after("delete", key)


class RecordingStore(WrappedStore):
    """Notes each operation and its key."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[tuple[str, str]] = []

    async def before(self, operation: str, key: str) -> None:
        self.operations.append((operation, key))


class LostAnswers(WrappedStore):
    """The answers to the first `times` creates are lost: after the object was written, or before.

    `rival`, if given, is what somebody else creates there just before.
    """

    def __init__(self, inner: Store, *, written: bool, times: int = 1, rival: bytes | None = None) -> None:
        super().__init__(inner)
        self._written = written
        self._rival = rival
        self.left = times

    async def before(self, operation: str, key: str) -> None:
        if operation == "create" and self.left:
            if self._rival is not None:
                await self.inner.create(key, self._rival)
            if not self._written:
                self._lose(key)

    async def after(self, operation: str, key: str) -> None:
        if operation == "create" and self.left:
            self._lose(key)

    def _lose(self, key: str) -> None:
        self.left -= 1
        raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create")


class UnconditionalStore(MemoryStore):
    """Ignores create-if-absent, as some S3 work-alikes do: the last write wins, and each is told that it has won."""

    async def _create(self, key: str, data: Data) -> bool:
        await self._write(key, data)
        return True


class UnlistedStore(MemoryStore):
    """Lists nothing that was written lately."""

    async def _list(self, prefix: str) -> list[Entry]:  # noqa: ARG002 - whatever is asked for
        return []
