"""A stand-in for Service Quotas on 127.0.0.1, on the API's own shapes: no emulator has the quotas of SageMaker.

    with QuotaServer({"ml.g5.xlarge for training warm pool usage": 0}) as quotas:
        quotas.decide = "DENIED"          # what becomes of the next request
        boto3.client("service-quotas", endpoint_url=quotas.endpoint_url)

Requests and answers are checked against botocore's model, so what AWS would refuse as malformed is refused here.
https://docs.aws.amazon.com/servicequotas/2019-06-24/apireference/
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import botocore.session
from botocore.validate import ParamValidator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HOST = "127.0.0.1"
SERVICE = "sagemaker"
OPEN = ("PENDING", "CASE_OPENED")
CLOSED = ("APPROVED", "DENIED", "CASE_CLOSED", "NOT_APPROVED", "INVALID_REQUEST")
MOST_OPEN = 20
"""Open requests of an account, AWS's own quota
(https://docs.aws.amazon.com/general/latest/gr/servicequotas.html, read 2026-11)."""
_PAGE = 20  # small, so that every client pages
_KEY = re.compile(r"Credential=([^/]+)/")


class QuotaError(Exception):
    """An answer of the API that is an error."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Quota:
    """One quota: AWS's default, and what this account has (None: the default)."""

    name: str
    default: float
    applied: float | None = None
    adjustable: bool = True

    @property
    def code(self) -> str:
        """As AWS's look: L- and 8 digits that follow from nothing a client could know."""
        return "L-" + hashlib.sha256(self.name.encode()).hexdigest()[:8].upper()

    @property
    def value(self) -> float:
        return self.default if self.applied is None else self.applied


@dataclass
class Change:
    """A request for more."""

    id: str
    quota: Quota
    desired: float
    status: str
    created: float = field(default_factory=time.time)


class QuotaServer:
    """The server; use it as a context manager. Quotas are given as name → value in force.

    `decide` is what becomes of the next requests: PENDING (nobody has looked at it), CASE_OPENED, or a decision, which
    then holds at once. `authorise` gets a caller's access key and an action, and returns why not, or None.
    """

    def __init__(
        self,
        quotas: Mapping[str, float],
        *,
        region: str = "us-east-1",
        account: str = "123456789012",
        authorise: Callable[[str, str], str | None] | None = None,
    ) -> None:
        self.quotas = {name: Quota(name, value) for name, value in quotas.items()}
        self.changes: list[Change] = []
        self.calls: Counter[str] = Counter()
        self.decide = "PENDING"
        self._region, self._account, self._authorise = region, account, authorise
        self._model = botocore.session.get_session().get_service_model("service-quotas")
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint_url = f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="quotas", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def settle(self, status: str) -> None:
        """Decide what is open."""
        with self._lock:
            for change in self.changes:
                if change.status in OPEN:
                    _decided(change, status)

    # ------------------------------------------------------------------ the operations

    def _list_service_quotas(self, request: dict[str, Any]) -> dict[str, Any]:
        self._service(request)
        chosen = [quota for quota in self.quotas.values() if request.get("QuotaCode") in {None, quota.code}]
        return self._page(request, "Quotas", [self._told(quota, quota.value) for quota in chosen])

    def _list_aws_default_service_quotas(self, request: dict[str, Any]) -> dict[str, Any]:
        self._service(request)
        return self._page(request, "Quotas", [self._told(quota, quota.default) for quota in self.quotas.values()])

    def _get_service_quota(self, request: dict[str, Any]) -> dict[str, Any]:
        quota = self._quota(request)
        return {"Quota": self._told(quota, quota.value)}

    def _get_aws_default_service_quota(self, request: dict[str, Any]) -> dict[str, Any]:
        quota = self._quota(request)
        return {"Quota": self._told(quota, quota.default)}

    def _request_service_quota_increase(self, request: dict[str, Any]) -> dict[str, Any]:
        quota, desired = self._quota(request), float(request["DesiredValue"])
        if not quota.adjustable:
            raise QuotaError("IllegalArgumentException", f"The quota {quota.code} is not adjustable.")
        if desired <= quota.value:
            raise QuotaError("IllegalArgumentException", "You must provide a quota value greater than the current one.")
        still_open = [change for change in self.changes if change.status in OPEN]
        if any(change.quota is quota for change in still_open):
            raise QuotaError(
                "ResourceAlreadyExistsException", "Only one open service quota increase request is allowed"
            )
        if len(still_open) >= MOST_OPEN:
            raise QuotaError("QuotaExceededException", "You have exceeded your service quota of open requests.")
        change = Change(f"{len(self.changes):032x}", quota, desired, "PENDING")
        self.changes.append(change)
        if self.decide in CLOSED:
            _decided(change, self.decide)
        else:
            change.status = self.decide
        return {"RequestedQuota": self._told_change(change)}

    def _list_requested_service_quota_change_history_by_quota(self, request: dict[str, Any]) -> dict[str, Any]:
        quota = self._quota(request)
        chosen = [
            self._told_change(change)
            for change in self.changes
            if change.quota is quota and request.get("Status") in {None, change.status}
        ]
        return self._page(request, "RequestedQuotas", chosen)

    # ------------------------------------------------------------------ what they share

    def answer(self, operation: str, request: dict[str, Any], access_key: str) -> dict[str, Any]:
        """Answer a call as the API does. Raises QuotaError."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operation).lower()
        handler: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(self, f"_{name}", None)
        if handler is None or operation not in self._model.operation_names:
            raise QuotaError("UnknownOperationException", f"the stand-in has no operation {operation}")
        model = self._model.operation_model(operation)
        if problem := _malformed(request, model.input_shape):
            raise QuotaError("IllegalArgumentException", problem)
        if self._authorise is not None and (reason := self._authorise(access_key, f"servicequotas:{operation}")):
            raise QuotaError("AccessDeniedException", reason)
        with self._lock:
            self.calls[operation] += 1
            answer = handler(request)
        # An answer that AWS could not give is a fault of the stand-in.
        problem = _malformed(answer, model.output_shape)
        assert not problem, problem
        return answer

    def _service(self, request: dict[str, Any]) -> None:
        if request["ServiceCode"] != SERVICE:
            raise QuotaError("NoSuchResourceException", f"The service {request['ServiceCode']} is not here.")

    def _quota(self, request: dict[str, Any]) -> Quota:
        self._service(request)
        for quota in self.quotas.values():
            if quota.code == request["QuotaCode"]:
                return quota
        raise QuotaError("NoSuchResourceException", "The request failed because the specified quota does not exist.")

    def _page(self, request: dict[str, Any], name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        token = request.get("NextToken", "0")
        if not token.isdigit():
            raise QuotaError("InvalidPaginationTokenException", "Invalid NextToken was provided.")
        first, size = int(token), min(request.get("MaxResults", _PAGE), _PAGE)
        page: dict[str, Any] = {name: entries[first : first + size]}
        return page | ({"NextToken": str(first + size)} if first + size < len(entries) else {})

    def _told(self, quota: Quota, value: float) -> dict[str, Any]:
        return {
            "ServiceCode": SERVICE,
            "ServiceName": "Amazon SageMaker",
            "QuotaArn": f"arn:aws:servicequotas:{self._region}:{self._account}:{SERVICE}/{quota.code}",
            "QuotaCode": quota.code,
            "QuotaName": quota.name,
            "Value": float(value),
            "Unit": "None",
            "Adjustable": quota.adjustable,
            "GlobalQuota": False,
        }

    def _told_change(self, change: Change) -> dict[str, Any]:
        told = self._told(change.quota, change.quota.value)
        names = ("ServiceCode", "ServiceName", "QuotaCode", "QuotaName", "QuotaArn", "GlobalQuota", "Unit")
        return {name: told[name] for name in names} | {
            "Id": change.id,
            "DesiredValue": change.desired,
            "Status": change.status,
            "Created": change.created,
            "LastUpdated": change.created,
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        quotas = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
                key = _KEY.search(self.headers.get("Authorization", ""))
                try:
                    answer, status = (
                        quotas.answer(operation, json.loads(body or b"{}"), key.group(1) if key else ""),
                        200,
                    )
                except QuotaError as problem:
                    answer, status = {"__type": problem.code, "Message": str(problem)}, problem.status
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        return Handler


def _malformed(values: dict[str, Any], shape: Any) -> str:
    return str(ParamValidator().validate(values, shape).generate_report())


def _decided(change: Change, status: str) -> None:
    change.status = status
    if status == "APPROVED":
        change.quota.applied = change.desired


def sagemaker_quotas(**values: float) -> dict[str, float]:
    """The quotas of training on a few instance types, as AWS names and lists them: every usage, default 0.

    Keyword arguments set some: `ml_g5_xlarge_warm=4`; suffixes are `warm`, `job` and `spot`.
    """
    usages = {"job": "training job usage", "spot": "spot training job usage", "warm": "training warm pool usage"}
    types = [f"ml.{family}.{size}" for family in ("g4dn", "g5", "g6", "p4d", "p5") for size in _SIZES]
    quotas = {f"{name} for {usage}": 0.0 for name in types for usage in usages.values()}
    for key, value in values.items():
        name, _, usage = key.rpartition("_")
        quotas[f"{name.replace('_', '.')} for {usages[usage]}"] = value
    return quotas


_SIZES = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge")
