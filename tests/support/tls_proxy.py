"""What stands between a client and an emulator on this machine, as AWS's front end does: TLS, and IAM's simulation.

    with FrontEnd(emulator.endpoint_url, folder) as front:
        boto3.client("s3", endpoint_url=front.endpoint_url, verify=front.ca_bundle)

MiniStack takes `X-Forwarded-Proto: https` for TLS, so a call through here satisfies `aws:SecureTransport`, and one that
goes to MiniStack directly does not. Given an :class:`~tests.support.iam_authority.Authority`, IAM's
SimulatePrincipalPolicy is answered here with context entries and every resource, which MiniStack ignores; MiniStack is
still asked first, so that it authenticates the caller.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import re
import ssl
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web
from yarl import URL

from diloco.background import Background
from tests.support.iam_simulation import ACTION, Answer, simulate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.iam_authority import Authority

HOST = "127.0.0.1"
_OF_THE_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "upgrade", "te"}
_MAX_BODY = 2**30
_REFUSED = re.compile(rf"User: (?P<caller>\S+) is not authorized to perform: iam:{ACTION}")


class FrontEnd:
    """Forwards a port on 127.0.0.1 to `upstream`; its key and certificate go to `folder`. Use it as a context
    manager. Without `folder` it is plain HTTP, for what else it does.
    """

    def __init__(self, upstream: str, folder: Path | None = None, *, authority: Authority | None = None) -> None:
        self.endpoint_url = ""
        self.ca_bundle: str | None = None
        """The certificate to trust."""
        self._upstream = upstream.rstrip("/")
        self._folder = folder
        self._authority = authority
        self._background = Background("front-end")

    def __enter__(self) -> Self:
        self._background.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._background.call(self._stop())
        self._background.stop()

    async def _start(self) -> None:
        self._session = ClientSession(
            timeout=ClientTimeout(total=None, connect=10),
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        context = None
        if self._folder is not None:
            certificate, key = self_signed(self._folder)
            self.ca_bundle = str(certificate)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
        handler = web.Server(self._handle, access_log=None)
        self._server = await asyncio.get_running_loop().create_server(handler, HOST, 0, ssl=context)
        scheme = "http" if context is None else "https"
        self.endpoint_url = f"{scheme}://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = request.clone(client_max_size=_MAX_BODY)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_THE_HOP}
        if self.ca_bundle is not None:
            headers["X-Forwarded-Proto"] = "https"
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            content = await answer.read()
            if self._authority is not None and request.method == "POST" and ACTION.encode() in body:
                simulated = await asyncio.to_thread(
                    _simulated, self._authority, dict(parse_qsl(body.decode())), answer.status, content.decode()
                )
                if simulated is not None:
                    return web.Response(status=simulated.status, text=simulated.text, content_type="text/xml")
            response = web.Response(status=answer.status, reason=answer.reason, body=content)
            for name, value in answer.headers.items():
                if name.lower() not in _OF_THE_HOP | {"content-length"}:
                    response.headers[name] = value
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                response.headers["Content-Length"] = answer.headers["Content-Length"]
            return response


def _simulated(authority: Authority, form: dict[str, str], status: int, answer: str) -> Answer | None:
    """The simulation, unless it is none or the caller may not ask. MiniStack authenticates, and authorises for any
    principal: where that fails, whether the caller may ask about this one is decided here.
    """
    if form.get("Action") != ACTION:
        return None
    refused = _REFUSED.search(answer) if status == 403 else None
    if refused is not None:
        allowed = bool(authority.authorise(refused["caller"], f"iam:{ACTION}", form["PolicySourceArn"]))
    else:
        allowed = status == 200
    return simulate(authority, form) if allowed else None


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, and its key, both PEM and valid for a day; returns their paths."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "tls.crt", folder / "tls.key"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file
