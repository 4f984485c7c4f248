"""A container's output on its way to CloudWatch Logs, written as the execution role (as the service does)."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "/aws/sagemaker/TrainingJobs"
_FLUSH_SECONDS = 0.2


class LogWriter:
    """One stream, `<job>/algo-1-<epoch>`; lines are sent in batches by a thread of its own.

    `client` returns a Logs client that may do the action it is given on the stream that it is given, or raises
    ClientError; `failed` hears what could not be written.
    """

    def __init__(self, client: Callable[[str, str], Any], job: str, failed: Callable[[str], None]) -> None:
        self._client = client
        self.stream = f"{job}/algo-1-{time.time_ns() // 1_000_000}"
        self._failed = failed
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._writer: Any = None
        self._thread = threading.Thread(target=self._run, name=f"logs-{job}", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Note one line, at the present time."""
        with self._lock:
            self._lines.append({"timestamp": time.time_ns() // 1_000_000, "message": line or " "})

    def close(self) -> None:
        """Send what is left and return."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._create()
            while not self._ended.wait(_FLUSH_SECONDS):
                self._flush()
            self._flush()
        except ClientError as problem:
            self._failed(f"logs: {problem}")

    def _create(self) -> None:
        group = self._client("logs:CreateLogGroup", "")
        with suppress(group.exceptions.ResourceAlreadyExistsException):
            group.create_log_group(logGroupName=GROUP)
        self._client("logs:CreateLogStream", self.stream).create_log_stream(
            logGroupName=GROUP, logStreamName=self.stream
        )

    def _flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        if lines:
            self._writer = self._writer or self._client("logs:PutLogEvents", self.stream)
            self._writer.put_log_events(logGroupName=GROUP, logStreamName=self.stream, logEvents=lines)
