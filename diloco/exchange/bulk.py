"""Large transfers through obstore (https://developmentseed.org/obstore), which needs half of s3fs's processor time a
byte: `python -m benchmarks.transport`. An extra: without it, and for whatever it fails at, s3fs does the same.

Only what is simple goes this way: ranges, and objects that are created in one request. obstore can't create an object
in parts only if it is absent, and says less about failures; so any that is not an answer to the question is left to
s3fs, whose errors are explained.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3Store

    from diloco.exchange.store import Data

logger = logging.getLogger(__name__)

LEAST_BYTES = 2**20
"""Smaller transfers are mostly the store's answer: s3fs does them as fast."""
MOST_BYTES = 65 * 2**20
"""A created object may be so large: a shard's, with its framing. A lost request repeats all of it."""
MOST_FAILURES = 3
REST_SECONDS = 300.0
"""After so many failures in a row obstore is not asked for so long: they may be a proxy that it does not know."""


class Bulk:
    """Large transfers of one bucket. None for an answer: not done, s3fs should."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._failures = 0
        self._rests_until = 0.0

    @classmethod
    async def of(cls, s3: Any, bucket: str) -> Bulk | None:
        """With the endpoint, region and credentials of an `s3fs.S3FileSystem`; None where obstore can't have them."""
        try:
            from obstore.store import S3Store
        except ImportError:
            return None
        meta = (await s3.set_session()).meta
        credentials = await s3.session.get_credentials()
        if s3.anon or s3.key is not None or credentials is None or not meta.endpoint_url:
            return None
        if s3.session.get_config_variable("ca_bundle") is not None:
            return None  # obstore trusts the system's certificates alone

        async def current() -> S3Credential:
            frozen = await credentials.get_frozen_credentials()
            # As good as expired: botocore decides about each request when to renew them.
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC),
            }

        secure = meta.endpoint_url.startswith("https://")
        store = S3Store(
            bucket,
            endpoint=meta.endpoint_url,
            region=meta.region_name or "us-east-1",
            credential_provider=current,
            virtual_hosted_style_request=False,
            unsigned_payload=secure,  # as botocore does: TLS and our own digests guard what is sent
            client_options={"allow_http": not secure, "connect_timeout": "5s", "timeout": timedelta(hours=1)},
            retry_config={"max_retries": 0},  # trying again is RetryingStore's, with one budget for everything
        )
        return cls(store)

    def takes(self, size: int) -> bool:
        """Whether a transfer of so many bytes is for obstore."""
        return size >= LEAST_BYTES and time.monotonic() >= self._rests_until

    async def read(self, path: str, start: int, end: int) -> bytes | None:
        """The bytes `[start, end)`, or as many as are there."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            data = await obstore.get_range_async(self._store, path, start=start, end=end)
        except NotFoundError:
            return None
        except Exception as problem:  # noqa: BLE001 - whatever it is, s3fs meets it too, and explains it
            self._failed(problem)
            return None
        self._failures = 0
        return data.to_bytes()

    async def create(self, path: str, data: Data) -> bool | None:
        """Create an object; False if it is there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            await obstore.put_async(self._store, path, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            self._failures = 0
            return False
        except Exception as problem:  # noqa: BLE001 - as above; if the object was created all the same, it "exists"
            self._failed(problem)
            return None
        self._failures = 0
        return True

    def _failed(self, problem: Exception) -> None:
        self._failures += 1
        said = str(problem).partition("\n")[0]
        logger.debug("obstore: %s", said)
        if self._failures >= MOST_FAILURES:
            self._failures, self._rests_until = 0, time.monotonic() + REST_SECONDS
            logger.warning("obstore failed %d times in a row, s3fs goes on alone: %s", MOST_FAILURES, said)
