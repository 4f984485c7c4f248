"""The service behind HTTP on 127.0.0.1: JSON 1.1 with `X-Amz-Target: SageMaker.*`, and the containers' credentials."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from tests.support.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from tests.support.sagemaker.service import Service

_CREDENTIAL = re.compile(r"Credential=([^/,]+)/\d{8}/[a-z0-9-]+/sagemaker/aws4_request")


class SageMakerServer:
    """Serves a service; a context manager. `url` is the endpoint for clients."""

    def __init__(self, service: Service, *, credential_seconds: int = 3600) -> None:
        self.service = service
        handler = type("Handler", (_Handler,), {"service": service, "credential_seconds": credential_seconds})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        service.url = self.url
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    service: Service
    credential_seconds: int
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Keep quiet."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        target = self.headers.get("X-Amz-Target", "")
        try:
            answer = self._answer(target, body)
        except ApiError as problem:
            self._send(problem.status, {"__type": problem.code, "message": problem.message})
            return
        if target == "SageMaker.CreateTrainingJob" and self.service.faults.lose_answer():
            self.close_connection = True
            self.connection.close()
            return
        self._send(200, answer)

    def _answer(self, target: str, body: bytes) -> dict[str, Any]:
        service, _, operation = target.partition(".")
        if service != "SageMaker":
            raise ApiError("UnknownOperationException", f"{target or 'no X-Amz-Target'} is not of this service", 404)
        signed = _CREDENTIAL.search(self.headers.get("Authorization", ""))
        if signed is None:
            raise ApiError("MissingAuthenticationTokenException", "Missing Authentication Token", 403)
        try:
            request = json.loads(body)
        except ValueError:
            raise ApiError("SerializationException", "the body is no JSON") from None
        return self.service.call(operation, request, signed[1])

    def do_GET(self) -> None:
        job = self.service.tokens.get(self.headers.get("Authorization", ""))
        if self.path != "/credentials" or job is None:
            self._send(403, {"message": "no such credentials"})
            return
        found = self.service.role_credentials(job)
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.credential_seconds))
        self._send(
            200,
            {
                "RoleArn": job.request["RoleArn"],
                "AccessKeyId": found["AccessKeyId"],
                "SecretAccessKey": found["SecretAccessKey"],
                "Token": found["SessionToken"],
                "Expiration": expires,
            },
        )

    def _send(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # whoever asked may have given up
            self.end_headers()
            self.wfile.write(body)
