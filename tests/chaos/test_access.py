"""Permissions and keys that are taken away in mid-run, on an S3 that checks them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import boto3
import pytest

from diloco import guard
from diloco.embedded import BUCKET, REGION, EmbeddedS3
from diloco.errors import ExitCode
from tests.chaos.harness import Run, held, payload, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT_KEY = "test"  # MiniStack's


class CheckingS3(EmbeddedS3):
    """The embedded S3 with IAM, every request checked."""

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        settings = {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self._port),
            "SERVICES": "s3,iam,sts",
            "AUTH": "true",
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
        }
        with self._log.open("ab") as output:
            self._server = guard.spawn([sys.executable, "-m", "ministack"], env=os.environ | settings, output=output)
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        until(self._answers, "MiniStack")
        self.client("s3").create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=2):
            return True
        return False

    def client(self, service: str) -> Any:
        """A client of the root user."""
        return boto3.client(
            service,  # type: ignore[call-overload]  # any service
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=ROOT_KEY,
            aws_secret_access_key=ROOT_KEY,
        )


class User:
    """An IAM user with one access key, who may use a run's prefix."""

    def __init__(self, s3: CheckingS3) -> None:
        self._iam = s3.client("iam")
        self.name = f"replica-{secrets.token_hex(4)}"
        self._iam.create_user(UserName=self.name)
        self.key = self._iam.create_access_key(UserName=self.name)["AccessKey"]
        self.allow()

    def allow(self, *, but: str | None = None) -> None:
        """All that a replica needs; `but` is what is denied of it: `s3:PutObject some/key/*`."""
        statements = [
            {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": f"arn:aws:s3:::{BUCKET}"},
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": f"arn:aws:s3:::{BUCKET}/*",
            },
        ]
        if but is not None:
            action, key = but.split()
            statements.append({"Effect": "Deny", "Action": action, "Resource": f"arn:aws:s3:::{BUCKET}/{key}"})
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        self._iam.put_user_policy(UserName=self.name, PolicyName="replica", PolicyDocument=policy)

    def delete_key(self) -> None:
        self._iam.delete_access_key(UserName=self.name, AccessKeyId=self.key["AccessKeyId"])

    @property
    def env(self) -> dict[str, str | None]:
        return {
            "AWS_ACCESS_KEY_ID": self.key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": self.key["SecretAccessKey"],
        }


@pytest.fixture(scope="module")
def checking_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckingS3]:
    with CheckingS3(tmp_path_factory.mktemp("checking") / "s3") as s3:
        yield s3


@pytest.mark.parametrize("what", ["the key is deleted", "a permission is taken away"])
def test_access_that_is_taken_away_in_mid_run_ends_the_replica_at_once(
    checking_s3: CheckingS3, tmp_path: Path, what: str
) -> None:
    """With ten minutes for retries, of which nothing is used; the other one goes on by itself."""
    run_id = f"access-{secrets.token_hex(2)}"
    exchange = {"retry_for": 600, "min_replicas": 1}
    with Run(checking_s3, tmp_path, run_id, replicas=2, rounds=4, exchange=exchange) as run:
        user = User(checking_s3)
        other, denied = run.start(0, acts=[held(2, "go")]), run.start(1, acts=[held(2, "go")], env=user.env)
        run.commit(1)
        if what == "the key is deleted":
            user.delete_key()
        else:
            user.allow(but=f"s3:PutObject {run_id}/rounds/*")
        run.create("go", b"")
        assert run.end(other, denied) == [0, ExitCode.LOST_RENDEZVOUS]
        said = denied.text().strip().splitlines()[-1]
        if what == "the key is deleted":
            assert "the access key id is unknown" in said  # whichever request was first
            assert said.startswith(f"diloco: error: {run.uri}/")
        else:
            assert said.startswith(f"diloco: error: {run.uri}/{payload(2, 1)}: access denied on create")
            assert "need s3:PutObject there" in said
        assert "Traceback" not in denied.text()
        run.check(reported={0: 1})
