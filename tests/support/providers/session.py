"""The AWS that the provider talks to: region, endpoints, credentials and default tags from its configuration."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import boto3
import botocore.config

from tests.support.providers.resource import RefusedError

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

PARTITION = "aws"
_JSON = ("endpoints", "defaultTags", "assumeRoles", "allowedAccountIds", "forbiddenAccountIds")


class AwsSession:
    """boto3 clients by service and region, made once each."""

    def __init__(self, config: Plain) -> None:
        config = {name: _decoded(value) if name in _JSON else value for name, value in config.items()}
        region = config.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not region:
            raise RefusedError("no AWS region: pulumi config set aws:region us-east-1")
        self.region: str = region
        self.default_tags: Plain = (config.get("defaultTags") or {}).get("tags", {})
        self.endpoints = {
            service: url for entry in config.get("endpoints") or [] for service, url in entry.items() if url
        }
        self._path_style = str(config.get("s3UsePathStyle", "")).lower() == "true"
        self._boto3: Any = boto3.Session(
            aws_access_key_id=config.get("accessKey"),
            aws_secret_access_key=config.get("secretKey"),
            aws_session_token=config.get("token"),
            profile_name=config.get("profile"),
            region_name=region,
        )
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()  # boto3 sessions are not thread-safe, their clients are
        self._account: str | None = None

    def client(self, service: str, region: str | None = None) -> Any:
        """A client of a service."""
        key = service, region or self.region
        with self._lock:
            if key not in self._clients:
                self._clients[key] = self._boto3.client(
                    service,
                    region_name=key[1],
                    endpoint_url=self.endpoints.get(service),
                    config=botocore.config.Config(
                        retries={"max_attempts": 3, "mode": "standard"},
                        s3={"addressing_style": "path" if self._path_style else "auto"},
                    ),
                )
            return self._clients[key]

    @property
    def account(self) -> str:
        """The caller's account id."""
        if self._account is None:
            self._account = str(self.client("sts").get_caller_identity()["Account"])
        return self._account


def tag_list(tags: Plain) -> list[dict[str, str]]:
    """AWS's `[{Key, Value}]` of a map."""
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def tag_map(tags: list[dict[str, str]] | None) -> Plain:
    """The other way; AWS's own tags are not ours."""
    return {tag["Key"]: tag["Value"] for tag in tags or [] if not tag["Key"].startswith("aws:")}


def _decoded(value: Any) -> Any:
    """Nested configuration arrives as JSON text."""
    return json.loads(value) if isinstance(value, str) else value
