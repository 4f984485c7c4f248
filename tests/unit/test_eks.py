"""Tokens for EKS: what is presigned, for how long, and that nothing secret is written anywhere."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.stub import Stubber
from kubernetes.config import new_client_from_config_dict  # type: ignore[import-untyped]

from diloco import eks
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

KEY, SECRET, SESSION = "AKIDEXAMPLE", "secretOfATest", "sessionOfATest"
AUTHORITY = base64.b64encode(b"an authority").decode()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of nobody, for this process and its children."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def url(token: str) -> tuple[str, dict[str, str]]:
    """The request in a token: its address without the query, and the query."""
    assert token.startswith("k8s-aws-v1.")
    body = token.removeprefix("k8s-aws-v1.")
    assert "=" not in body
    assert not set(body) & set("+/")
    split = urlsplit(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode())
    query = parse_qs(split.query, strict_parsing=True)
    assert all(len(values) == 1 for values in query.values())
    return f"{split.scheme}://{split.netloc}{split.path}", {name: value for name, [value] in query.items()}


@pytest.mark.parametrize(
    ("region", "host"),
    [("eu-west-1", "sts.eu-west-1.amazonaws.com"), ("cn-north-1", "sts.cn-north-1.amazonaws.com.cn")],
)
@pytest.mark.usefixtures("credentials")
def test_a_token_is_a_presigned_get_caller_identity_for_one_cluster(region: str, host: str) -> None:
    address, query = url(eks.token("mine", region))
    assert address == f"https://{host}/"
    assert (query["Action"], query["Version"]) == ("GetCallerIdentity", "2011-06-15")
    assert query["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    signed = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - signed) < timedelta(minutes=5)
    assert query["X-Amz-Credential"] == f"{KEY}/{signed:%Y%m%d}/{region}/sts/aws4_request"
    # The cluster's name is signed, not sent: EKS sends it, so a token for one cluster is refused by another.
    assert query["X-Amz-SignedHeaders"] == "host;x-k8s-aws-id"
    assert "mine" not in json.dumps(query)
    assert 0 < int(query["X-Amz-Expires"]) <= 15 * 60
    assert "X-Amz-Security-Token" not in query


@pytest.mark.usefixtures("credentials")
def test_clusters_and_sessions_have_tokens_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = (url(eks.token(cluster, "us-east-1"))[1] for cluster in ("mine", "other"))
    assert mine["X-Amz-Signature"] != other["X-Amz-Signature"]
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    assert url(eks.token("mine", "us-east-1"))[1]["X-Amz-Security-Token"] == SESSION


@pytest.mark.usefixtures("credentials")
def test_the_plugin_answers_as_kubectl_asks() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    done = plugin()
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer.keys() == {"apiVersion", "kind", "status"}
    assert (answer["apiVersion"], answer["kind"]) == ("client.authentication.k8s.io/v1", "ExecCredential")
    assert answer["status"].keys() == {"token", "expirationTimestamp"}
    url(answer["status"]["token"])
    expires = datetime.fromisoformat(answer["status"]["expirationTimestamp"])
    # EKS takes a token for 15 minutes after it was signed.
    assert before + timedelta(minutes=1) < expires < before + timedelta(minutes=15)


def plugin() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco.eks", "--cluster", "mine", "--region", "eu-west-1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.usefixtures("credentials")
def test_without_credentials_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    with pytest.raises(ConfigurationError, match="no AWS credentials: log in, or set AWS_PROFILE"):
        eks.token("mine", "eu-west-1")
    done = plugin()
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == "diloco: error: no AWS credentials: log in, or set AWS_PROFILE\n"
    monkeypatch.setenv("AWS_PROFILE", "absent")
    done = plugin()
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("diloco: error: no AWS credentials: ")
    assert "absent" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("credentials")
def test_a_client_gets_its_token_from_the_plugin_and_no_log_has_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)  # a program's own choice at most: botocore's DEBUG says what it signs
    kubeconfig = eks.kubeconfig_document("mine", "eu-west-1", "https://127.0.0.1:9", AUTHORITY, python=sys.executable)
    assert "token" not in json.dumps(kubeconfig)
    [header] = new_client_from_config_dict(kubeconfig).configuration.auth_settings().values()
    scheme, token = header["value"].split(" ")
    assert scheme == "Bearer"
    _, query = url(token)
    written = caplog.text + json.dumps(kubeconfig)
    for secret in (SECRET, token, query["X-Amz-Signature"], KEY):
        assert secret not in written


@pytest.mark.usefixtures("credentials")
def test_a_kubeconfig_is_asked_of_eks_and_a_refusal_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.session.Session(region_name="eu-west-1").client("eks")
    monkeypatch.setattr(boto3.session.Session, "client", lambda *_: client)
    cluster: Any = {"name": "mine", "endpoint": "https://eks.test", "certificateAuthority": {"data": AUTHORITY}}
    with Stubber(client) as stub:
        stub.add_response("describe_cluster", {"cluster": cluster}, {"name": "mine"})
        assert eks.kubeconfig("mine", "eu-west-1") == eks.kubeconfig_document(
            "mine", "eu-west-1", "https://eks.test", AUTHORITY, python=sys.executable
        )
        stub.add_client_error("describe_cluster", "ResourceNotFoundException", "No cluster found for name: mine.")
        with pytest.raises(ConfigurationError) as refused:
            eks.kubeconfig("mine", "eu-west-1")
    assert str(refused.value).startswith("the EKS cluster mine in eu-west-1 can't be read: ")
    assert "No cluster found for name: mine." in str(refused.value)
