"""The benchmarks' link: how long things take on it by its own schedule, and that all bytes arrive."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.link import Lane, Link, measure
from diloco.background import Background


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bytes_leave_one_after_another_at_the_bandwidth() -> None:
    clock = Clock()
    lane = Lane(mbps=8, clock=clock)  # a megabyte a second
    assert [lane.send(500_000) for _ in range(4)] == [100.5, 101.0, 101.5, 102.0]
    clock.now = 101.2  # still busy
    assert lane.send(500_000) == 102.5
    clock.now = 110.0  # idle since: nothing was saved up
    assert lane.send(500_000) == 110.5
    assert lane.bytes == 3_000_000


def test_without_a_bound_they_leave_at_once() -> None:
    lane = Lane(clock=Clock())
    assert [lane.send(10**9), lane.send(1)] == [100.0, 100.0]


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_no_transfer_is_faster_than_the_numbers_say(direction: str, connections: int) -> None:
    """How much slower it is than they say is the machine's, and `python -m benchmarks.link` tells it."""
    up, down = Lane(mbps=40, latency_ms=30), Lane(mbps=80, latency_ms=10)
    sizes = (600_000, 0) if direction == "up" else (0, 600_000)
    seconds = measure(up, down, *sizes, connections)
    assert seconds >= 600_000 * 8 / (40e6 if direction == "up" else 80e6) + 0.04
    assert max(up.bytes, down.bytes) >= 600_000


def test_all_bytes_arrive_in_order() -> None:
    sent = bytes(range(256)) * 2000

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(sent)))
        await writer.drain()
        writer.close()

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        back = await reader.read()
        writer.close()
        return back

    async def all_ask(port: int) -> list[bytes]:
        return await asyncio.gather(*(ask(port) for _ in range(3)))

    server = Background("answer")
    try:
        listening = server.call(asyncio.start_server(answer, "127.0.0.1", 0))
        target = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        with Link(target, Lane(mbps=400, latency_ms=1), Lane(mbps=400, latency_ms=1)) as link:
            port = int(link.endpoint_url.rpartition(":")[2])
            assert asyncio.run(all_ask(port)) == [sent] * 3
    finally:
        server.stop()
