"""Stores inside this machine: memory (unit tests, simulation) and a local or shared folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from diloco.errors import AccessDeniedError, ConfigurationError, ObjectMissingError, StoreError
from diloco.exchange.store import Entry, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    from diloco.exchange.store import Data

    P = ParamSpec("P")
    T = TypeVar("T")

_TEMPORARY = ".writing-"


class MemoryStore(Store):
    """Objects in this process's memory. Stores opened on the same `memory://` URI, from any thread, share them."""

    _shared: dict[str, dict[str, bytes]] = {}  # noqa: RUF012 - one namespace for the whole process is the point
    _lock = threading.Lock()

    def __init__(self, uri: str = "memory://") -> None:
        super().__init__(uri)
        with self._lock:
            self._objects = self._shared.setdefault(self.uri, {}) if self.uri != "memory:" else {}

    @classmethod
    def forget(cls, uri: str) -> None:
        """Drop what is stored under a URI."""
        cls._shared.pop(uri.rstrip("/"), None)

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        try:
            return self._objects[key][start:end]
        except KeyError:
            raise ObjectMissingError(f"{self.uri}/{key}") from None

    async def _create(self, key: str, data: Data) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    async def _write(self, key: str, data: Data) -> None:
        self._objects[key] = bytes(data)

    async def _write_file(self, key: str, path: Path) -> None:
        self._objects[key] = path.read_bytes()

    async def _list(self, prefix: str) -> list[Entry]:
        with self._lock:
            return [Entry(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]

    async def _delete(self, key: str) -> None:
        self._objects.pop(key, None)


class LocalStore(Store):
    """Files below a folder (`file:///folder`). A file appears whole: it is written aside, then linked or renamed to
    its name.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        parts = urlsplit(uri)
        if parts.netloc:
            raise ConfigurationError(f"{uri}: a local folder is written file:///absolute/path, with three slashes")
        self._root = Path(unquote(uri.removeprefix("file://")))

    async def _in_thread(self, function: Callable[P, T], key: str, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except FileNotFoundError as problem:
            if function.__name__ == "read":
                raise ObjectMissingError(f"{self.uri}/{key}") from None
            raise StoreError(f"{self.uri}: the folder can't be made ({problem.strerror}): give another one") from None
        except PermissionError as problem:
            raise AccessDeniedError(
                f"{self.uri}/{key}: {problem.strerror}: the folder must be writable for this user, on a file system "
                "with hard links"
            ) from problem
        except OSError as problem:
            raise StoreError(f"{self.uri}: {problem.strerror or problem}: give another folder") from problem

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        def read() -> bytes:
            with (self._root / key).open("rb") as file:
                file.seek(start)
                return file.read(-1 if end is None else end - start)

        return await self._in_thread(read, key)

    def _aside(self, target: Path, fill: Callable[[Path], object]) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
        os.close(handle)
        aside = Path(name)
        try:
            fill(aside)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return aside

    async def _create(self, key: str, data: Data) -> bool:
        def create() -> bool:
            target = self._root / key
            if target.exists():
                return False
            aside = self._aside(target, lambda path: path.write_bytes(data))
            try:
                # link(2) fails if the name exists: the only atomic create-with-contents that a file system has.
                os.link(aside, target)
            except FileExistsError:
                return False
            finally:
                aside.unlink(missing_ok=True)
            return True

        return await self._in_thread(create, key)

    async def _write(self, key: str, data: Data) -> None:
        def write() -> None:
            target = self._root / key
            self._aside(target, lambda path: path.write_bytes(data)).replace(target)

        await self._in_thread(write, key)

    async def _write_file(self, key: str, path: Path) -> None:
        def write() -> None:
            target = self._root / key
            self._aside(target, lambda aside: shutil.copyfile(path, aside)).replace(target)

        await self._in_thread(write, key)

    async def _list(self, prefix: str) -> list[Entry]:
        def walk() -> list[Entry]:
            found = []
            for folder, _, names in os.walk(self._root / prefix):
                for name in names:
                    if not name.startswith(_TEMPORARY):
                        path = Path(folder, name)
                        with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                            state = path.stat()
                            key = path.relative_to(self._root).as_posix()
                            found.append(Entry(key, state.st_size, state.st_mtime))
            return found

        return await self._in_thread(walk, prefix)

    async def _delete(self, key: str) -> None:
        await self._in_thread(lambda: (self._root / key).unlink(missing_ok=True), key)
