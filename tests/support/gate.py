"""A loopback HTTP proxy before an emulator of AWS that tells which calls were made, and holds one where a test asks.

    with Gate(emulator_url) as gate:
        held = gate.hold("s3", "CreateBucket", answered=True)   # the bucket is made, the caller never hears of it
        ...
        held.reached.wait(30)

    gate.refuse("s3", "PUT tagging")       # 403 instead of what AWS would say, until `allow`

A call is known by service and operation; of S3, whose operations are paths, only those below are named, others are
`PUT`, `GET`, … with the sub-resource, `PUT lifecycle`.
"""

from __future__ import annotations

import http.client
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST = "127.0.0.1"
MOST_HELD = 120.0
"""Seconds after which a held call goes on whatever happens, so that no test hangs."""
_READS = ("Get", "Describe", "List", "Head", "Simulate", "BatchGet", "BatchCheck")
_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"  # as S3 says it
_OF_THE_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "host"}


@dataclass(frozen=True)
class Call:
    """One request."""

    service: str
    operation: str
    path: str
    status: int

    @property
    def writes(self) -> bool:
        """Whether it can change anything."""
        if self.service in {"s3", "registry"}:
            return self.operation.split()[0] not in {"GET", "HEAD"}
        return not self.operation.startswith(_READS)


@dataclass
class Held:
    """A call that waits."""

    service: str
    operation: str
    answered: bool
    reached: threading.Event = field(default_factory=threading.Event)
    _open: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let it go on."""
        self._open.set()

    def wait(self) -> None:
        self.reached.set()
        self._open.wait(MOST_HELD)


class Gate:
    """The proxy; use it as a context manager."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._calls: list[Call] = []
        self._held: list[Held] = []
        self._refused: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint_url = f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="gate", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.release()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, service: str, operation: str, *, answered: bool = False) -> Held:
        """Hold the next such call: before it reaches AWS, or (`answered`) between AWS and its caller."""
        held = Held(service, operation, answered)
        with self._lock:
            self._held.append(held)
        return held

    def refuse(self, service: str, operation: str) -> None:
        """Answer AccessDenied to every such call."""
        with self._lock:
            self._refused.add((service, operation))

    def allow(self) -> None:
        """Refuse nothing any more."""
        with self._lock:
            self._refused.clear()

    def calls(self) -> list[Call]:
        """All so far."""
        with self._lock:
            return list(self._calls)

    def writes(self) -> list[Call]:
        """Those that can change something."""
        return [call for call in self.calls() if call.writes]

    def forget(self) -> None:
        """Begin the list anew."""
        with self._lock:
            self._calls.clear()

    def _take(self, service: str, operation: str, *, answered: bool) -> Held | None:
        with self._lock:
            for held in self._held:
                wanted = held.service, held.operation, held.answered
                if not held.reached.is_set() and wanted == (service, operation, answered):
                    held.reached.set()
                    return held
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                gate._forward(self, body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_one  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        return Handler

    def _forward(self, caller: BaseHTTPRequestHandler, body: bytes) -> None:
        service, operation = _known_as(caller.command, caller.path, dict(caller.headers.items()), body)
        with self._lock:
            refused = (service, operation) in self._refused
        if refused:
            caller.send_response(403)
            caller.send_header("Content-Length", str(len(_DENIED)))
            caller.end_headers()
            caller.wfile.write(_DENIED)
            return
        if held := self._take(service, operation, answered=False):
            held.wait()
        connection = http.client.HTTPConnection(self._upstream.hostname or HOST, self._upstream.port, timeout=60)
        try:
            headers = {name: value for name, value in caller.headers.items() if name.lower() not in _OF_THE_HOP}
            # The signature covers the host that the caller named.
            headers |= {"Host": caller.headers["Host"], "Content-Length": str(len(body))}
            connection.request(caller.command, caller.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        with self._lock:
            self._calls.append(Call(service, operation, caller.path, answer.status))
        if held := self._take(service, operation, answered=True):
            held.wait()
        try:
            caller.send_response(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_THE_HOP:
                    caller.send_header(name, value)
            length = answer.getheader("Content-Length") if caller.command == "HEAD" else str(len(content))
            caller.send_header("Content-Length", length or "0")
            caller.end_headers()
            caller.wfile.write(content)
        except ConnectionError:  # the caller is gone, as after a kill
            caller.close_connection = True


def _known_as(method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    scope = _SCOPE.search(headers.get("Authorization", ""))
    if scope is None:
        return "registry", method
    service = scope.group(1)
    if target := headers.get("X-Amz-Target"):
        return service, target.rpartition(".")[2]
    parts = urlsplit(path)
    if service != "s3":
        action = parse_qs(body.decode(errors="replace")).get("Action") or parse_qs(parts.query).get("Action")
        return service, action[0] if action else method
    if method == "PUT" and parts.path.strip("/").count("/") == 0 and not parts.query:
        return service, "CreateBucket"
    return service, " ".join(filter(None, (method, parts.query.split("&")[0].split("=")[0])))
