"""A loopback proxy that is one replica's link to the store: its own bandwidth and latency in each direction.

So algorithms are compared by what is on the critical path, and not by how fast two cores copy. All connections through
one link share its bandwidth, a piece at a time in turn; latency is added behind it, as on a wire. What it leaves out:
opening a connection costs no round trip, and there is no slow start and no loss.

`python -m benchmarks.link` shows how exact it is. Claim: a raw transfer takes what the numbers say ± 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from benchmarks.common import print_result, say
from diloco.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PIECE_BYTES = 2**15
BACKLOG_SECONDS = 0.05
"""So far ahead of the wire is read, as a network card's queue does: else the wire would idle whenever this process is
late.
"""
WITHIN = 0.05


@dataclass
class Lane:
    """One direction: when what is handed over now has left, seen from `clock`."""

    mbps: float | None = None
    """10^6 bits a second; None: without bound."""
    latency_ms: float = 0.0
    """One way."""
    clock: Callable[[], float] = time.monotonic
    bytes: int = 0
    """What has gone through."""
    _free: float = field(default=0.0, init=False)

    def send(self, size: int) -> float:
        """When these bytes have left: after all that were handed over before."""
        self.bytes += size
        took = size * 8 / (self.mbps * 1e6) if self.mbps else 0.0
        self._free = max(self.clock(), self._free) + took
        return self._free


class Link:
    """Forwards a port on 127.0.0.1 to `target` (an `http://host:port`). Use it as a context manager."""

    def __init__(self, target: str, up: Lane, down: Lane) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.up, self.down = up, down
        self._background = Background("link")
        self.endpoint_url = ""

    def __enter__(self) -> Self:
        server = self._background.call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end, which asyncio's own stream protocol would report as an error.
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            await asyncio.gather(_pipe(reader, there_writer, self.up), _pipe(there_reader, writer, self.down))


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter, lane: Lane) -> None:
    wire: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await wire.get()
            if (early := due - lane.clock()) > 0:
                await asyncio.sleep(early)
            if not data:
                return
            sink.write(data)
            await sink.drain()

    arriving = asyncio.create_task(arrive())
    try:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE_BYTES):
                left = lane.send(len(data))
                wire.put_nowait((left + lane.latency_ms / 1000, data))
                if (early := left - lane.clock() - BACKLOG_SECONDS) > 0:
                    await asyncio.sleep(early)
        wire.put_nowait((lane.clock() + lane.latency_ms / 1000, b""))
        with contextlib.suppress(ConnectionError):
            await arriving
    finally:
        arriving.cancel()
        sink.close()


async def _echo_size(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server for raw transfers: reads `up down` and so many bytes, then answers with so many."""
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        up, down = map(int, (await reader.readline()).split())
        while up:
            up -= len(await reader.read(min(up, 2**18)))
        writer.write(bytes(down))
        await writer.drain()
        writer.close()


async def _transfer(url: str, up: int, down: int) -> float:
    """Seconds until so many bytes have gone up and so many have come down."""
    parts = urlsplit(url)
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"{up} {down}\n".encode())
    writer.write(bytes(up))
    await reader.readexactly(down)
    took = time.monotonic() - began
    writer.close()
    return took


def measure(up: Lane, down: Lane, bytes_up: int, bytes_down: int, connections: int) -> float:
    """Seconds of raw transfers over so many connections at once, each with its share of the bytes."""
    server = Background("raw")
    try:
        listening = server.call(asyncio.start_server(_echo_size, "127.0.0.1", 0))
        with Link(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", up, down) as link:

            async def together() -> None:
                shares = bytes_up // connections, max(bytes_down // connections, 1)
                await asyncio.gather(*(_transfer(link.endpoint_url, *shares) for _ in range(connections)))

            began = time.monotonic()
            asyncio.run(together())
            return time.monotonic() - began
    finally:
        server.stop()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts (default: %(default)s)")
    options = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for mbps, latency_ms, connections in ((50, 20, 1), (50, 20, 4), (200, 20, 1), (200, 20, 4), (200, 0, 4)):
        for direction in ("up", "down"):
            size = int(mbps * 1e6 / 8)  # one second of it
            sizes = (size, 0) if direction == "up" else (0, size)
            seconds = [
                measure(Lane(mbps, latency_ms), Lane(mbps, latency_ms), *sizes, connections)
                for _ in range(options.repeats)
            ]
            expected = size * 8 / (mbps * 1e6) + 2 * latency_ms / 1000
            one = {
                "mbps": mbps,
                "latency_ms": latency_ms,
                "connections": connections,
                "direction": direction,
                "expected_seconds": round(expected, 3),
                "of_expected": round(statistics.median(seconds) / expected, 4),
            }
            measured.append(one)
            say(str(one))
    holds = all(abs(one["of_expected"] - 1) <= WITHIN for one in measured)
    return print_result({"measured": measured, "within": WITHIN}, holds=holds)


if __name__ == "__main__":
    sys.exit(main())
