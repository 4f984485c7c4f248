"""Containers' logs on the kubelet's port: `GET /containerLogs/<namespace>/<pod>/<container>`, for the API server."""

from __future__ import annotations

import datetime
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster.certificates import Authority


class ContainerLog:
    """Lines of one container with their times, for readers that may follow."""

    def __init__(self) -> None:
        self._lines: list[tuple[datetime.datetime, str]] = []
        self._changed = threading.Condition()
        self._closed = False

    def write(self, line: str) -> None:
        """Add a line, now."""
        with self._changed:
            self._lines.append((datetime.datetime.now(datetime.UTC), line))
            self._changed.notify_all()

    def close(self) -> None:
        """No line follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> str:
        """What a termination message is made of: the last 80 lines, at most 2048 characters."""
        return "\n".join(line for _, line in self._lines[-80:])[-2048:]

    def read(
        self, *, follow: bool, tail: int | None, since: datetime.datetime | None, stop: threading.Event
    ) -> Iterator[tuple[datetime.datetime, str]]:
        """Lines so far, at most the last `tail`, not older than `since`; with `follow` until the container's end."""
        with self._changed:
            at = 0 if tail is None else max(0, len(self._lines) - tail)
        while True:
            with self._changed:
                if follow and at >= len(self._lines) and not self._closed and not stop.is_set():
                    self._changed.wait(0.5)
                new, closed = self._lines[at:], self._closed
            at += len(new)
            yield from (each for each in new if since is None or each[0] >= since)
            if not follow or (closed and not new) or stop.is_set():
                return


class LogServer:
    """Serves over TLS to whom the authority has certified."""

    def __init__(self, authority: Authority) -> None:
        self._logs: dict[tuple[str, str, str], ContainerLog] = {}
        self._stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"logs": self._logs, "stopping": self._stopping})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        pair = authority.pair("kubelet")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        context.load_verify_locations(authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, namespace: str, pod: str, container: str, log: ContainerLog) -> None:
        self._logs[namespace, pod, container] = log


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    logs: dict[tuple[str, str, str], ContainerLog]
    stopping: threading.Event

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        log = self.logs.get((parts[1], parts[2], parts[3])) if len(parts) == 4 else None
        if parts[0] != "containerLogs" or log is None:
            self.send_error(404)
            return
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = log.read(
            follow=options.get("follow") == "true",
            tail=int(options["tailLines"]) if "tailLines" in options else None,
            since=_since(options),
            stop=self.stopping,
        )
        stamped = options.get("timestamps") == "true"
        with suppress(OSError):  # who read it has left
            for moment, line in lines:
                stamp = f"{moment.strftime('%Y-%m-%dT%H:%M:%S.%f')}000Z " if stamped else ""
                self._chunk(f"{stamp}{line}\n".encode())
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Nothing: a request is no news."""


def _since(options: dict[str, str]) -> datetime.datetime | None:
    if "sinceSeconds" in options:
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=int(options["sinceSeconds"]))
    if "sinceTime" in options:
        return datetime.datetime.fromisoformat(options["sinceTime"])
    return None
