"""The AWS clients of a launcher: one session, one region, retries that adapt to throttling."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_iam import IAMClient
    from mypy_boto3_logs import CloudWatchLogsClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker import SageMakerClient
    from mypy_boto3_service_quotas import ServiceQuotasClient

ATTEMPTS = 8
"""Of each call, throttled ones included."""
ATTEMPTS_TO_CREATE = 3
"""Of each creation: what is still throttled then is tried again by the submitter, which can be interrupted."""
CONNECTIONS = 8


@dataclass
class Clients:
    """Made when first used. Endpoints come from the environment (AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_SAGEMAKER, …)."""

    region: str
    _session: Any = field(default=None, init=False)

    @cached_property
    def sagemaker(self) -> SageMakerClient:
        """Training jobs."""
        client: SageMakerClient = self._make("sagemaker")
        return client

    @cached_property
    def creating(self) -> SageMakerClient:
        """The same, for creations."""
        client: SageMakerClient = self._make("sagemaker", ATTEMPTS_TO_CREATE)
        return client

    @cached_property
    def logs(self) -> CloudWatchLogsClient:
        """Their logs."""
        client: CloudWatchLogsClient = self._make("logs")
        return client

    @cached_property
    def s3(self) -> S3Client:
        """Where a bucket is."""
        client: S3Client = self._make("s3")
        return client

    @cached_property
    def iam(self) -> IAMClient:
        """The jobs' role."""
        client: IAMClient = self._make("iam")
        return client

    @cached_property
    def quotas(self) -> ServiceQuotasClient:
        """Service Quotas."""
        client: ServiceQuotasClient = self._make("service-quotas")
        return client

    def _make(self, service: str, attempts: int = ATTEMPTS) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise ConfigurationError("SageMaker needs boto3: pip install 'diloco-aws[s3]'") from None
        if self._session is None:
            self._session = boto3.session.Session(region_name=self.region)
        config = Config(
            retries={"mode": "adaptive", "total_max_attempts": attempts},
            max_pool_connections=CONNECTIONS,
            connect_timeout=10,
            read_timeout=60,
        )
        return self._session.client(service, config=config)
