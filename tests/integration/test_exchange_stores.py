"""The store operations that the protocol rests on, on each real store."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from diloco.embedded import environment
from diloco.errors import BucketMissingError, CorruptObjectError, ObjectMissingError, StoreUnreachableError
from diloco.exchange import membership
from diloco.exchange.layout import Member
from diloco.exchange.records import Claim
from diloco.exchange.store import BLOCK_BYTES, Entry, Range, check_store, create_once, open_store
from tests.support.stores import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from diloco.embedded import EmbeddedS3
    from diloco.exchange.store import Store


@asynccontextmanager
async def many(uri: str, count: int) -> AsyncIterator[list[Store]]:
    """As many members have it: one store each."""
    stores = [open_store(uri) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def test_the_first_contact_proves_the_store_and_leaves_nothing(store_uri: str) -> None:
    async def contact() -> list[Entry]:
        async with opened(store_uri) as store:
            await check_store(store)
            return await store.list("probes/")

    assert asyncio.run(contact()) == []


@pytest.mark.parametrize("body", [b"same for all", b""])
def test_a_create_has_exactly_one_winner(store_uri: str, body: bytes) -> None:
    async def race() -> tuple[list[bool], bytes]:
        async with many(store_uri, 4) as stores:
            bodies = [body or str(number).encode() for number in range(16)]
            won = await asyncio.gather(*(stores[n % 4].create("commits/00000001.json", bodies[n]) for n in range(16)))
            return won, await stores[0].read("commits/00000001.json")

    won, stored = asyncio.run(race())
    assert won.count(True) == 1
    assert stored == (body or str(won.index(True)).encode())


def test_every_writer_of_a_record_learns_who_won(store_uri: str) -> None:
    async def race() -> list[tuple[bool, bytes]]:
        async with many(store_uri, 4) as stores:
            records = [Claim(rank=1, attempt=1, host="here", pid=n) for n in range(16)]
            return await asyncio.gather(*(create_once(stores[n % 4], "run.json", records[n]) for n in range(16)))

    found = asyncio.run(race())
    assert [mine for mine, _ in found].count(True) == 1
    assert len({stored for _, stored in found}) == 1


def test_claims_race_to_an_attempt_each(store_uri: str) -> None:
    async def race() -> list[Member]:
        async with many(store_uri, 4) as stores:
            return await asyncio.gather(*(membership.claim(store, 7) for store in stores))

    assert sorted(asyncio.run(race())) == [Member(7, attempt) for attempt in (1, 2, 3, 4)]


def test_reading_whole_objects_and_ranges(store_uri: str) -> None:
    body = bytes(range(256)) * 10

    async def read() -> None:
        async with opened(store_uri) as store:
            await store.write("a/b", body)
            assert await store.read("a/b") == body
            assert await store.read("a/b", 0, 10) == body[:10]
            assert await store.read("a/b", 100, 300) == body[100:300]
            assert await store.read("a/b", len(body) - 1, len(body)) == body[-1:]
            assert await store.read("a/b", 2000) == body[2000:]

    asyncio.run(read())


@pytest.mark.parametrize(("start", "end"), [(2550, 2570), (2560, 2570), (5000, 5010)])
def test_a_range_beyond_the_end_is_a_corrupt_object(store_uri: str, start: int, end: int) -> None:
    async def read() -> None:
        async with opened(store_uri) as store:
            await store.write("a/b", bytes(2560))
            await store.read("a/b", start, end)

    with pytest.raises(CorruptObjectError, match="a/b"):
        asyncio.run(read())


def test_a_range_of_an_empty_object_is_a_corrupt_object(store_uri: str) -> None:
    async def read() -> None:
        async with opened(store_uri) as store:
            await store.write("a/b", b"")
            assert await store.read("a/b") == b""
            await store.read("a/b", 0, 10)

    with pytest.raises(CorruptObjectError, match="a/b"):
        asyncio.run(read())


def test_what_is_absent_is_named(store_uri: str) -> None:
    async def read(end: int | None) -> None:
        async with opened(store_uri) as store:
            await store.read("absent/key", 0, end)

    for end in (None, 10):
        with pytest.raises(ObjectMissingError, match="absent/key"):
            asyncio.run(read(end))


def test_streaming_gives_every_block_in_order(store_uri: str) -> None:
    body = bytes(n % 251 for n in range(10_000))

    async def stream(start: int, end: int, block: int) -> list[bytes]:
        async with opened(store_uri) as store:
            return [piece async for piece in store.stream("long", start, end, block)]

    async def write() -> None:
        async with opened(store_uri) as store:
            await store.write("long", body)

    async def leave_early() -> bytes:
        async with opened(store_uri) as store:
            pieces = store.stream("long", 0, 10_000, 100)
            async for piece in pieces:
                await pieces.aclose()
                return piece
        return b""

    asyncio.run(write())
    pieces = asyncio.run(stream(5, 9_999, 1_000))
    assert b"".join(pieces) == body[5:9_999]
    assert [len(piece) for piece in pieces] == [1_000] * 9 + [994]
    assert asyncio.run(stream(0, 10_000, 20_000)) == [body]
    assert asyncio.run(stream(7, 7, 10)) == []
    assert asyncio.run(leave_early()) == body[:100]


def test_ranges_of_several_objects_come_in_order(store_uri: str) -> None:
    async def fetch() -> None:
        async with opened(store_uri) as store:
            for name in "abc":
                await store.write(name, name.encode() * 100)
            ranges = [Range(name, start, start + 20) for name in "cab" for start in range(0, 100, 20)]
            found = [piece async for piece in store.fetch(ranges)]
            assert found == [one.key.encode() * 20 for one in ranges]
            broken = store.fetch([ranges[0], Range("absent", 0, 5), ranges[1]])
            assert await anext(broken) == b"c" * 20
            with pytest.raises(ObjectMissingError, match="absent"):
                await anext(broken)

    asyncio.run(fetch())


def test_later_ranges_are_asked_for_while_one_is_used_but_not_too_many() -> None:
    """Through S3's own scheduler, with reads that end when they are told."""
    store = open_store("s3://bucket/run")
    asked: list[int] = []
    answers: dict[int, asyncio.Future[bytes]] = {}

    async def read(_: str, start: int, __: int) -> bytes:
        asked.append(start)
        answers[start] = asyncio.get_running_loop().create_future()
        return await answers[start]

    async def until(count: int) -> None:
        for _ in range(20):  # turns of the loop, more than it takes
            await asyncio.sleep(0)
        assert len(asked) == count

    async def fetch() -> None:
        size = BLOCK_BYTES // 2
        fetched = store.fetch_with(read, [Range("k", n * size, (n + 1) * size) for n in range(9)])
        first = asyncio.ensure_future(anext(fetched))
        await until(4)  # two blocks' bytes
        answers[size].set_result(b"second")
        await until(4)  # the first is not there yet
        answers[0].set_result(b"first")
        assert await first == b"first"
        assert await anext(fetched) == b"second"
        await until(5)
        await fetched.aclose()
        assert all(answer.done() for answer in answers.values())
        large = store.fetch_with(read, [Range("k", n * 10**9, (n + 1) * 10**9) for n in range(10, 12)])
        first = asyncio.ensure_future(anext(large))
        await until(6)  # larger than all that may be ahead: alone
        first.cancel()

    asyncio.run(fetch())


def test_listing_is_sorted_and_keeps_to_its_prefix(store_uri: str) -> None:
    async def listed() -> tuple[list[Entry], list[Entry], list[Entry]]:
        async with opened(store_uri) as store:
            for number, key in enumerate(("a/c", "a/b/2", "a/b/10", "ab/1", "a.json", "b/1")):
                await store.write(key, b"x" * number)
            return await store.list("a/"), await store.list("a/b/"), await store.list("nothing/")

    below_a, below_b, nothing = asyncio.run(listed())
    assert below_a == [Entry("a/b/10", 2), Entry("a/b/2", 1), Entry("a/c", 0)]
    assert below_b == [Entry("a/b/10", 2), Entry("a/b/2", 1)]
    assert nothing == []


def test_a_listing_sees_at_once_what_another_wrote_or_deleted(store_uri: str) -> None:
    async def watch() -> None:
        async with many(store_uri, 2) as (writer, reader):
            for number in range(5):
                await writer.create(f"h/{number}", b"1")
                assert len(await reader.list("h/")) == number + 1
            await writer.delete(["h/0", "h/4"])
            assert [entry.key for entry in await reader.list("h/")] == ["h/1", "h/2", "h/3"]

    asyncio.run(watch())


def test_a_long_listing_is_complete(store_uri: str) -> None:
    count = 1_003 if store_uri.startswith("memory:") else 40

    async def listed() -> list[str]:
        async with opened(store_uri) as store:
            await asyncio.gather(*(store.write(f"many/{number:05d}", b"") for number in range(count)))
            return [entry.key for entry in await store.list("many/")]

    assert asyncio.run(listed()) == [f"many/{number:05d}" for number in range(count)]


def test_writing_replaces_and_deleting_what_is_absent_is_harmless(store_uri: str) -> None:
    async def write() -> None:
        async with opened(store_uri) as store:
            await store.write("beat", b"first and long")
            await store.write("beat", b"second")
            assert await store.read("beat") == b"second"
            await store.delete(["beat", "never/there"])
            with pytest.raises(ObjectMissingError):
                await store.read("beat")
            assert await store.create("beat", b"again")

    asyncio.run(write())


def test_files_are_written_whole(store_uri: str, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(bytes(range(256)) * 5_000)

    async def write() -> bytes:
        async with opened(store_uri) as store:
            await store.write_file("final/model/weights", source)
            await store.write_file("final/model/weights", source)
            assert store.stats.bytes_up == 2 * 1_280_000
            return await store.read("final/model/weights")

    assert asyncio.run(write()) == source.read_bytes()


def test_bytearrays_of_many_parts_are_created_once(store_uri: str) -> None:
    body = bytearray(b"0123456789abcdef" * (17 * 2**16))  # 17 MiB: more than one part of a multipart upload

    async def create() -> None:
        async with opened(store_uri) as store:
            assert await store.create("payload", body)
            assert not await store.create("payload", bytearray(len(body)))
            assert await store.read("payload") == body

    asyncio.run(create())


def test_a_bucket_that_does_not_exist_is_named(embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in embedded_s3.env.items():
        if value is not None:
            monkeypatch.setenv(name, value)

    async def contact() -> None:
        async with opened("s3://no-such-bucket/run") as store:
            await check_store(store)

    with pytest.raises(BucketMissingError, match="s3://no-such-bucket/run: the bucket does not exist"):
        asyncio.run(contact())


def test_an_endpoint_that_is_down_is_named(embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in embedded_s3.env.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def contact() -> None:
        async with opened("s3://diloco/run") as store:
            await check_store(store)

    with pytest.raises(StoreUnreachableError, match="s3://diloco/run"):
        asyncio.run(contact())


def test_polling_what_is_not_there_yet_is_one_request(embedded_s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def poll() -> list[Entry]:
        async with opened(f"{embedded_s3.uri}/polled") as store:
            await store.write("other/a", b"")
            client = store._client()  # type: ignore[attr-defined]
            call = client._call_s3

            async def counted(method: str, *args: Any, **kwargs: Any) -> Any:
                asked.append(method)
                return await call(method, *args, **kwargs)

            monkeypatch.setattr(client, "_call_s3", counted)
            return await store.list("rounds/00000001/h/")

    with environment(embedded_s3.env):
        assert asyncio.run(poll()) == []
    assert asked == ["list_objects_v2"]


def test_a_listing_of_several_pages_is_whole(embedded_s3: EmbeddedS3) -> None:
    keys = [f"many/{number:04d} é+%" for number in range(1003)]

    async def fill() -> list[str]:
        async with opened(f"{embedded_s3.uri}/pages") as store:
            for start in range(0, len(keys), 50):
                await asyncio.gather(*(store.write(key, b"") for key in keys[start : start + 50]))
            return [entry.key for entry in await store.list("many/")]

    with environment(embedded_s3.env):
        assert asyncio.run(fill()) == keys
