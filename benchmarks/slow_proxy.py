"""A loopback proxy that delays everything by a fixed time in each direction: an object store that is far away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from diloco.background import Background

if TYPE_CHECKING:
    from types import TracebackType


class SlowProxy:
    """Forwards a port on 127.0.0.1 to `target` (an `http://host:port`), `seconds` late each way. Use it as a context
    manager.
    """

    def __init__(self, target: str, seconds: float) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._seconds = seconds
        self._background = Background("slow-proxy")
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
        with contextlib.suppress(asyncio.CancelledError):
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            await asyncio.gather(self._pipe(reader, there_writer), self._pipe(there_reader, writer))

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Late, but not slower: what arrives together leaves together."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        delivery = asyncio.create_task(deliver())
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**18):
                queue.put_nowait((loop.time() + self._seconds, data))
        queue.put_nowait((loop.time() + self._seconds, b""))
        with contextlib.suppress(ConnectionError):
            await delivery
        sink.close()
