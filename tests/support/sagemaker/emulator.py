"""Where the rest of AWS is for the tests' SageMaker: S3, IAM, STS, Logs, ECR of an emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Emulator:
    """Where the rest of AWS is: S3, IAM, STS, Logs, ECR."""

    endpoint_url: str
    region: str = "us-east-1"
    account: str = "123456789012"
    ca_bundle: str | None = None
    """Certificate of an endpoint that is https."""
    access_key: str = "test"
    secret_key: str = "test"  # noqa: S105 - MiniStack's root

    def client(self, service: str, credentials: Mapping[str, str] | None = None) -> Any:
        """A boto3 client, of the root unless credentials are given."""
        given = credentials or {"AccessKeyId": self.access_key, "SecretAccessKey": self.secret_key}
        session: Any = boto3.session.Session(
            aws_access_key_id=given["AccessKeyId"],
            aws_secret_access_key=given["SecretAccessKey"],
            aws_session_token=given.get("SessionToken"),
            region_name=self.region,
        )
        config = Config(s3={"addressing_style": "path"}, proxies={}, retries={"total_max_attempts": 2})
        return session.client(service, endpoint_url=self.endpoint_url, verify=self.ca_bundle, config=config)
