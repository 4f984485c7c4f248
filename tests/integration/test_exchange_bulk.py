"""Large transfers through obstore, and through s3fs alone: the same answers, from a real server."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore
import pytest

from diloco.embedded import BUCKET, environment
from diloco.errors import ConfigurationError, CorruptObjectError, ObjectMissingError
from diloco.exchange.bulk import LEAST_BYTES, MOST_BYTES, MOST_FAILURES, Bulk
from diloco.exchange.remote import RemoteStore
from diloco.exchange.store import check_store, open_store
from tests.support.stores import opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.embedded import EmbeddedS3

DATA = bytearray(os.urandom(2**16) * 40)


@pytest.fixture(params=["obstore", "s3fs"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With obstore, which then must be what carries; and as if it were not installed."""
    name: str = request.param
    if name == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
        monkeypatch.setitem(sys.modules, "obstore.store", None)
    return name


def carried_by_s3fs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that s3fs is asked for from now on."""
    import s3fs

    asked, call = [], s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **options: Any) -> Any:
        asked.append(method)
        return await call(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    return asked


def test_large_objects_are_created_once_and_read_in_ranges(
    embedded_s3: EmbeddedS3, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = carried_by_s3fs(monkeypatch)

    async def transfer() -> None:
        async with opened(f"s3://{BUCKET}/bulk-{carrier}") as store:
            assert await store.create("rounds/0/p", memoryview(DATA)[100:])
            assert not await store.create("rounds/0/p", DATA)
            assert await store.read("rounds/0/p", 0, LEAST_BYTES) == DATA[100 : 100 + LEAST_BYTES]
            assert await store.read("rounds/0/p", 5, 5 + LEAST_BYTES) == DATA[105 : 105 + LEAST_BYTES]
            with pytest.raises(ObjectMissingError, match="rounds/0/none"):
                await store.read("rounds/0/none", 0, LEAST_BYTES)
            with pytest.raises(CorruptObjectError):
                await store.read("rounds/0/p", 1, len(DATA) + 1)
            with pytest.raises(CorruptObjectError):
                await store.read("rounds/0/p", len(DATA) + 1, len(DATA) + 1 + LEAST_BYTES)
            assert await store.read("rounds/0/p") == DATA[100:]

    with environment(embedded_s3.env):
        asyncio.run(transfer())
    assert ("put_object" in asked) == (carrier == "s3fs")


def test_what_is_too_large_for_one_request_goes_up_in_parts(
    embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = carried_by_s3fs(monkeypatch)
    large = bytearray(MOST_BYTES + 1)
    large[-1] = 1

    async def transfer() -> None:
        async with opened(f"s3://{BUCKET}/bulk-large") as store:
            assert await store.create("p", large)
            assert not await store.create("p", large)
            assert (await store.read("p", len(large) - LEAST_BYTES, len(large)))[-1] == 1

    with environment(embedded_s3.env):
        asyncio.run(transfer())
    assert "complete_multipart_upload" in asked


def test_after_failures_s3fs_goes_on_alone(
    embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import obstore

    tried = 0

    async def refused(*_: Any, **__: Any) -> Any:
        nonlocal tried
        tried += 1
        raise OSError("no way through the proxy\n\nDebug source: much more")

    monkeypatch.setattr(obstore, "get_range_async", refused)
    monkeypatch.setattr(obstore, "put_async", refused)

    async def transfer() -> None:
        async with opened(f"s3://{BUCKET}/bulk-failing") as store:
            for number in range(3):
                assert await store.create(f"p{number}", DATA)
                assert await store.read(f"p{number}", 0, LEAST_BYTES) == DATA[:LEAST_BYTES]

    with environment(embedded_s3.env):
        asyncio.run(transfer())
    assert tried == MOST_FAILURES
    [said] = [record.getMessage() for record in caplog.records if record.name == "diloco.exchange.bulk"]
    assert said.endswith("s3fs goes on alone: no way through the proxy")


def test_a_create_whose_answer_was_lost_is_not_made_twice(
    embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore's own failure is settled by s3fs, which finds the object there."""
    import obstore

    put = obstore.put_async

    async def lost(*args: Any, **options: Any) -> Any:
        await put(*args, **options)
        raise OSError("connection reset")

    monkeypatch.setattr(obstore, "put_async", lost)

    async def transfer() -> tuple[bool, bytes]:
        async with opened(f"s3://{BUCKET}/bulk-lost") as store:
            return await store.create("p", DATA), await store.read("p")

    with environment(embedded_s3.env):
        created, stored = asyncio.run(transfer())
    assert not created, "who asked reads it back, and finds its own bytes"
    assert stored == DATA


@pytest.mark.parametrize("told", ["keys", "certificates"])
def test_what_only_s3fs_is_told_of_stays_with_it(embedded_s3: EmbeddedS3, told: str) -> None:
    keys = {"key": embedded_s3.env["AWS_ACCESS_KEY_ID"], "secret": embedded_s3.env["AWS_SECRET_ACCESS_KEY"]}

    async def transfer() -> Bulk | None:
        store = RemoteStore(f"s3://{BUCKET}/bulk-{told}", keys if told == "keys" else {})
        try:
            assert await store.create("p", DATA)
            return await store._for_bulk(LEAST_BYTES)
        finally:
            await store.close()

    bundle = {"AWS_CA_BUNDLE": str(Path(botocore.__file__).with_name("cacert.pem")) if told == "certificates" else None}
    with environment(embedded_s3.env | bundle):
        assert asyncio.run(transfer()) is None


class _Rangeless(BaseHTTPRequestHandler):
    """A store that answers each GET with the whole object, whatever range was asked for."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.path.partition("?")[0]
        taken = self.headers.get("If-None-Match") and key in self.objects
        if not taken:
            self.objects[key] = body
        self._answer(412 if taken else 200, b"", etag='"x"')

    def do_GET(self) -> None:
        found = self.objects.get(self.path.partition("?")[0])
        self._answer(404 if found is None else 200, found or b"", etag='"x"')

    def do_DELETE(self) -> None:
        self._answer(204, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (
            {"content-length": str(len(body)), "last-modified": self.date_time_string()} | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def rangeless() -> Iterator[str]:
    handler = type("Handler", (_Rangeless,), {"objects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_store_that_ignores_ranges_is_refused(embedded_s3: EmbeddedS3, carrier: str) -> None:
    async def transfer(uri: str) -> None:
        store = open_store(uri)
        try:
            assert await store.create("p", DATA)
            with pytest.raises(CorruptObjectError, match=f"asked for bytes 5-{5 + LEAST_BYTES}, got {len(DATA)} bytes"):
                await store.read("p", 5, 5 + LEAST_BYTES)
            with pytest.raises(ConfigurationError, match="ignores ranges"):
                await check_store(store)
        finally:
            await store.close()

    with rangeless() as url, environment(embedded_s3.env | {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url}):
        asyncio.run(transfer(f"s3://{BUCKET}/{carrier}"))
