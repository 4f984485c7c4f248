"""How pods on EKS become a role: the webhook that tells them where, and Pod Identity's agent on the node.

Associations, roles and credentials are MiniStack's (EKS, IAM, STS), tokens are the API server's. The agent reviews the
pod's token, finds the association, checks the role's trust, and hands out credentials that expire. A pod whose
ServiceAccount names a role (IRSA) asks STS itself; the agent is on the way only to make them as short-lived.
https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config

from tests.support.cluster import pod as pods
from tests.support.cluster.container import Mount
from tests.support.sagemaker.errors import ApiError
from tests.support.sagemaker.role import Roles

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sagemaker.emulator import Emulator

SERVICE = "pods.eks.amazonaws.com"
AUDIENCE = SERVICE
WEB_AUDIENCE = "sts.amazonaws.com"
ACCOUNT = "123456789012"
ROLE_ANNOTATION = "eks.amazonaws.com/role-arn"

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_INVALID_TOKEN = (
    b"<ErrorResponse><Error><Type>Sender</Type><Code>InvalidIdentityToken</Code>"
    b"<Message>The web identity token that was passed could not be validated</Message></Error></ErrorResponse>"
)
_POD_FOLDER = "/var/run/secrets/pods.eks.amazonaws.com/serviceaccount"
_WEB_FOLDER = "/var/run/secrets/eks.amazonaws.com/serviceaccount"


@dataclass
class Injected:
    """What the webhook adds to a pod."""

    env: dict[str, str] = field(default_factory=dict)
    mounts: list[Mount] = field(default_factory=list)


class PodIdentityAgent:
    """Use it as a context manager. Credentials live for `seconds`; `served` counts how often they were given out,
    `issued` how many there were, and `first` are the first of them.
    """

    def __init__(self, emulator: Emulator, cluster: str, *, seconds: int = 3600) -> None:
        self.core: Any = None
        self.authentication: Any = None
        self.seconds = seconds
        self.served = 0
        self.issued = 0
        self.first: dict[str, Any] | None = None
        self._emulator = emulator
        self._cluster = cluster
        self._clients: dict[str, Any] = {}
        self._roles = Roles(self._client, ACCOUNT, emulator.region, SERVICE)
        self._lock = threading.RLock()
        self._holders: dict[tuple[str, str], tuple[str, str]] = {}
        self._kept: dict[tuple[str, str], tuple[dict[str, Any], float]] = {}
        handler = type("Handler", (_Handler,), {"agent": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, pod: Any, folder: Path) -> Injected:
        """What EKS's webhook would have added to this pod: Pod Identity before a role in the ServiceAccount."""
        namespace, account = pod.metadata.namespace, pod.spec.service_account_name
        region = {"AWS_REGION": self._emulator.region, "AWS_DEFAULT_REGION": self._emulator.region}
        if self._association(namespace, account) is not None:
            self._write(folder / "eks-pod-identity-token", pod, AUDIENCE)
            env = {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self._url}/v1/credentials",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": f"{_POD_FOLDER}/eks-pod-identity-token",
            }
            return Injected(env | region, [Mount("ro", str(folder), _POD_FOLDER)])
        annotations = self.core.read_namespaced_service_account(account, namespace).metadata.annotations or {}
        if ROLE_ANNOTATION not in annotations:
            return Injected()
        self._write(folder / "token", pod, WEB_AUDIENCE)
        env = {
            "AWS_ROLE_ARN": annotations[ROLE_ANNOTATION],
            "AWS_WEB_IDENTITY_TOKEN_FILE": f"{_WEB_FOLDER}/token",
            "AWS_ENDPOINT_URL_STS": self._url,
        }
        return Injected(env | region, [Mount("ro", str(folder), _WEB_FOLDER)])

    def credentials(self, token: str) -> dict[str, Any] | None:
        """Credentials for the holder of a pod's token, or None for anybody else.

        Like the real agent it keeps them while they are fresh: clients wait for 2 s only.
        """
        with self._lock:
            holder = self._holder(token, AUDIENCE)
            role = None if holder is None else self._association(*holder)
            if holder is None or role is None:
                return None
            kept, until = self._kept.get(holder, ({}, 0.0))
            if time.monotonic() >= until:
                found = self._assume(role, *holder)
                if found is None:
                    return None
                kept, until = found, time.monotonic() + self.seconds / 4
                self._kept[holder] = kept, until
                self.issued += 1
                self.first = self.first or kept
            self.served += 1
            return kept

    def web_identity(self, body: bytes) -> tuple[int, bytes]:
        """STS's answer to a pod's AssumeRoleWithWebIdentity, which botocore asks without saying for how long."""
        asked = urllib.parse.parse_qs(body.decode()) | {"DurationSeconds": [str(self.seconds)]}
        token = asked["WebIdentityToken"][0]
        if self._holder(token, WEB_AUDIENCE) is None:
            return 400, _INVALID_TOKEN
        asked["WebIdentityToken"] = [_with_one_audience(token)]
        request = urllib.request.Request(  # noqa: S310 - http://127.0.0.1
            self._emulator.endpoint_url,
            urllib.parse.urlencode(asked, doseq=True).encode(),
            {"Content-Type": "application/x-www-form-urlencoded", "Host": "sts.amazonaws.com"},
        )
        try:
            with _DIRECT.open(request, timeout=30) as answer:
                status, found = answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()
        with self._lock:
            self.issued += 1
            self.served += 1
            self.first = self.first or _credentials(found)
        return status, found

    def _holder(self, token: str, audience: str) -> tuple[str, str] | None:
        """Namespace and ServiceAccount of a pod's token, if it is one and for this audience."""
        with self._lock:
            if (token, audience) not in self._holders:
                review = self.authentication.create_token_review({"spec": {"token": token, "audiences": [audience]}})
                if not review.status.authenticated or audience not in (review.status.audiences or ()):
                    return None
                _, _, namespace, account = review.status.user.username.split(":")
                self._holders[token, audience] = namespace, account
            return self._holders[token, audience]

    def _assume(self, role: str, namespace: str, account: str) -> dict[str, Any] | None:
        source = f"arn:aws:eks:{self._emulator.region}:{ACCOUNT}:cluster/{self._cluster}"
        tags = {
            "aws:RequestTag/kubernetes-namespace": namespace,
            "aws:RequestTag/kubernetes-service-account": account,
        }
        try:
            for action in ("sts:AssumeRole", "sts:TagSession"):
                self._roles.check_trust(role, source, action=action, request=tags)
        except ApiError:
            return None
        found = self._roles.credentials(role, self.seconds)
        expires: Any = found["Expiration"]
        return {
            "AccessKeyId": found["AccessKeyId"],
            "SecretAccessKey": found["SecretAccessKey"],
            "Token": found["SessionToken"],
            "AccountId": ACCOUNT,
            "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _association(self, namespace: str, account: str) -> str | None:
        """The role that a ServiceAccount is associated with."""
        eks = self._client("eks")
        try:
            found = eks.list_pod_identity_associations(
                clusterName=self._cluster, namespace=namespace, serviceAccount=account
            )["associations"]
        except eks.exceptions.ResourceNotFoundException:
            return None
        if not found:
            return None
        described = eks.describe_pod_identity_association(
            clusterName=self._cluster, associationId=found[0]["associationId"]
        )
        return str(described["association"]["roleArn"])

    def _client(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                session: Any = boto3.session.Session(
                    self._emulator.access_key, self._emulator.secret_key, region_name=self._emulator.region
                )
                # MiniStack lets sessions live for as short as one likes; botocore would not ask for less than 900 s.
                config = Config(proxies={}, parameter_validation=False)
                self._clients[service] = session.client(
                    service, endpoint_url=self._emulator.endpoint_url, config=config
                )
            return self._clients[service]

    def _write(self, path: Path, pod: Any, audience: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o755)
        path.write_text(pods.token(self.core, pod, audience, 3600))


def _with_one_audience(token: str) -> str:
    """The token with its only audience as a string: MiniStack finds none in a list. It leaves signatures unread."""
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    [claims["aud"]] = claims["aud"]
    return f"{head}.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.{signature}"


def _credentials(answer: bytes) -> dict[str, str]:
    """The credentials in STS's XML, as Pod Identity names them."""
    found = {
        name: re.search(f"<{name}>(.*?)</{name}>", answer.decode())
        for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")
    }
    values = {name: match.group(1) for name, match in found.items() if match is not None}
    return {
        "AccessKeyId": values["AccessKeyId"],
        "SecretAccessKey": values["SecretAccessKey"],
        "Token": values["SessionToken"],
    }


class _Handler(BaseHTTPRequestHandler):
    agent: PodIdentityAgent

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        found = self.agent.credentials(token) if self.path == "/v1/credentials" and token else None
        body = json.dumps(found or {"message": "no credentials for this token"}).encode()
        self.send_response(200 if found else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        status, body = self.agent.web_identity(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a request is no news."""
