"""A loopback HTTP proxy in front of an S3 that fails on purpose: by script, or at random by a seed.

    with FaultProxy(s3.endpoint_url, [Rule("SlowDown", "PUT", "*/rounds/00000001/p/*", nth=2)]) as proxy:
        ...  # AWS_ENDPOINT_URL = proxy.endpoint_url

Bodies are streamed. A request is known by its operation and its object's key (bucket left out):

| operation | request | key |
|---|---|---|
| GET, HEAD, PUT, DELETE | of an object | the object's |
| LIST | of a bucket | the listed prefix |
| BEGIN, PART, COMPLETE, ABORT | of an upload in parts | the object's |
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from yarl import URL

from diloco.background import Background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from types import TracebackType

ERRORS = {
    "InternalError": 500,
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "AccessDenied": 403,
    "ExpiredToken": 400,
    "InvalidAccessKeyId": 403,
    "NoSuchBucket": 404,
}
"""Faults that answer with this S3 error: status by code
(https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html)."""

BREAKS = {
    "reset": "the connection is reset before the request goes through",
    "lost": "the request goes through, then the connection is reset instead of an answer",
    "cut": "half of the request's body goes through, then the connection is reset",
    "truncate": "half of the answer's body comes, then the connection ends",
    "slow": "the bodies trickle for `seconds`",
    "delay": "the request goes through `seconds` late",
    "hang": "the request does not go through, and nothing is answered",
    "stall": "half of the request's body goes through, then nothing moves any more",
}
"""The other faults."""

TRANSIENT = ("InternalError", "SlowDown", "reset", "lost", "cut", "truncate", "slow", "delay")
"""Faults that a client survives by trying again, and soon."""

_BLOCK = 2**16
_PIECES = 20  # of a body that trickles


@dataclass
class Rule:
    """Which requests meet which fault: of those that match, the `nth` (from 1) and the `times - 1` after it."""

    fault: str
    operation: str = "*"
    key: str = "*"
    nth: int = 1
    times: float = 1
    seconds: float = 0.5
    """For slow and delay."""
    matches: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)
    hit: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    """Set when the fault has taken effect: for `stall`, when half of the body has gone through."""

    def __post_init__(self) -> None:
        if self.fault not in ERRORS and self.fault not in BREAKS:
            raise ValueError(f"{self.fault}: the faults are {', '.join([*ERRORS, *BREAKS])}")

    def takes(self, operation: str, key: str) -> bool:
        """Whether this request is one of them; counts it."""
        if not (fnmatchcase(operation, self.operation) and fnmatchcase(key, self.key)):
            return False
        self.matches += 1
        if not self.nth <= self.matches < self.nth + self.times:
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Forwards a port on 127.0.0.1 to `upstream` (an `http://host:port`). Use it as a context manager.

    `rules` are asked first, in order; :meth:`add` and :meth:`clear` change them while it runs. Any other request meets
    one of `faults` with probability `rate`; both may be set while it runs, too. Its fate is a function of the seed,
    the operation, the key, and how often that operation was made on that key.
    """

    def __init__(
        self,
        upstream: str,
        rules: Iterable[Rule] = (),
        *,
        rate: float = 0.0,
        faults: Sequence[str] = TRANSIENT,
        seconds: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.rate = rate
        self.requests = 0
        self.counts: Counter[str] = Counter()
        """Faults by kind."""
        self.endpoint_url = ""
        self._upstream = upstream.rstrip("/")
        self._rules = list(rules)
        self.faults = tuple(faults)
        self._seconds = seconds
        self._seed = seed
        self._repeats: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._background = Background("fault-proxy")

    def __enter__(self) -> Self:
        self._background.call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.call(self._stop())
        self._background.stop()

    def add(self, rule: Rule) -> Rule:
        """Add a rule, which counts requests from now on; returns it."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Drop all rules. Requests that hang go on hanging."""
        with self._lock:
            self._rules.clear()

    async def _start(self) -> None:
        self._session = ClientSession(
            connector=TCPConnector(limit=0, force_close=False),
            timeout=ClientTimeout(total=None, connect=10),
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        # Not web.ServerRunner: at its end it would wait for requests that hang.
        handler = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0, backlog=256)
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        await self._session.close()

    def _fate(self, operation: str, key: str) -> Rule | None:
        with self._lock:
            self.requests += 1
            self._repeats[operation, key] += 1
            for rule in self._rules:
                if rule.takes(operation, key):
                    self.counts[rule.fault] += 1
                    return rule
            chance = random.Random(f"{self._seed}/{operation}/{key}/{self._repeats[operation, key]}")
            if chance.random() >= self.rate:
                return None
            rule = Rule(chance.choice(self.faults), seconds=self._seconds)
            self.counts[rule.fault] += 1
            return rule

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        operation, key = what(request.method, request.raw_path)
        rule = self._fate(operation, key)
        fault = rule.fault if rule is not None else None
        try:
            if rule is not None and fault != "stall":
                rule.hit.set()
            if fault in ERRORS:
                return await _error(request, fault, key)
            if fault == "reset":
                return _reset(request)
            if fault == "hang":
                await asyncio.Event().wait()
            if fault == "delay" and rule is not None:
                await asyncio.sleep(rule.seconds)
            return await self._forward(request, rule)
        except (ClientError, ConnectionError):
            return _reset(request)

    async def _forward(self, request: web.BaseRequest, rule: Rule | None) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_THE_HOP}
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=headers,
            data=_sent(request, rule) if request.can_read_body else None,
            allow_redirects=False,
        ) as answer:
            fault = rule.fault if rule is not None else None
            if fault == "lost":
                await answer.read()
                return _reset(request)
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in _OF_THE_HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            left = (answer.content_length or 0) // 2 if fault == "truncate" else None
            async for block in _trickled(answer.content.iter_chunked(_BLOCK), answer.content_length or 0, rule):
                await response.write(block if left is None else block[:left])
                if left is not None and (left := left - len(block)) <= 0:
                    break
            if fault == "truncate":
                if request.transport is not None:
                    request.transport.close()
                return response
            await response.write_eof()
            return response


_OF_THE_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "upgrade", "te"}


def what(method: str, path: str) -> tuple[str, str]:
    """The operation and the key of a request, by its method and its path with the query."""
    path, _, text = path.partition("?")
    query = parse_qs(text, keep_blank_values=True)
    key = unquote(path).lstrip("/").partition("/")[2]
    if not key:
        return ("LIST" if method == "GET" else method), query.get("prefix", [""])[0]
    if "uploads" in query:
        return "BEGIN", key
    if "uploadId" in query:
        return {"PUT": "PART", "POST": "COMPLETE", "DELETE": "ABORT"}.get(method, method), key
    return method, key


async def _sent(request: web.BaseRequest, rule: Rule | None) -> AsyncIterator[bytes]:
    """The request's body on its way upstream."""
    size = request.content_length or 0
    if rule is None or rule.fault not in ("cut", "stall"):
        async for block in _trickled(request.content.iter_chunked(_BLOCK), size, rule):
            yield block
        return
    left = size // 2
    while left > 0:
        block = (await request.content.readany())[:left]
        if not block:
            break
        left -= len(block)
        yield block
    if rule.fault == "stall":
        rule.hit.set()
        await asyncio.Event().wait()
    raise ConnectionResetError("cut")


async def _trickled(blocks: AsyncIterator[bytes], size: int, rule: Rule | None) -> AsyncIterator[bytes]:
    if rule is None or rule.fault != "slow":
        async for block in blocks:
            yield block
        return
    piece = max(size // _PIECES, 1)
    async for block in blocks:
        for start in range(0, len(block), piece):
            await asyncio.sleep(rule.seconds / _PIECES)
            yield block[start : start + piece]


async def _error(request: web.BaseRequest, code: str, key: str) -> web.Response:
    """An S3 error. The body that was sent is read first, as S3 does: else the client may see a reset instead."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        with suppress(ConnectionError):
            async for _ in request.content.iter_chunked(_BLOCK):
                pass
    text = f"<Error><Code>{code}</Code><Message>by the fault proxy</Message><Key>{key}</Key></Error>"
    return web.Response(
        status=ERRORS[code], text='<?xml version="1.0" encoding="UTF-8"?>\n' + text, content_type="application/xml"
    )


def _reset(request: web.BaseRequest) -> web.Response:
    """End the connection with a TCP reset. What is returned goes nowhere."""
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        if connection is not None:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response()
