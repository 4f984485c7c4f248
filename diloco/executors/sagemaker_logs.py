"""The logs of all jobs of a run, merged by time: no line missed, none repeated.

Each start of a job's container is a stream `<job>/algo-1-<epoch>` of one log group. A stream is read with its own
forward token, which continues where the last answer ended, whatever the clocks say; streams that appear later
(restarts, relaunches) are found by listing those whose name begins with the run's.
https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING, Any

from diloco.executors import sagemaker_errors as errors
from diloco.executors.sagemaker_request import parse_job_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mypy_boto3_logs import CloudWatchLogsClient

GROUP = "/aws/sagemaker/TrainingJobs"
FOLLOW_EVERY = 2.0
"""Seconds between two looks at logs that are followed."""
LATE_SECONDS = 10.0
"""How long after the jobs' end lines may still arrive."""


@dataclass(frozen=True, order=True)
class LogLine:
    """One line; sorted by time, then rank, then as its stream holds it."""

    at: int
    """Milliseconds since the epoch."""
    rank: int
    stream: str
    number: int
    text: str


class LogReader:
    """Reads the streams whose name begins with `prefix`. Raises DilocoError for logs that may not be read."""

    def __init__(
        self, client: CloudWatchLogsClient, prefix: str, *, every: float = FOLLOW_EVERY, late: float = LATE_SECONDS
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._every = every
        self._late = late
        self._tokens: dict[str, str | None] = {}
        self._counts: dict[str, int] = {}

    def lines(self, *, follow: bool = False, ended: Callable[[], bool] = lambda: True) -> Iterator[LogLine]:
        """All lines so far, merged by time; with `follow`, until the jobs have `ended` and nothing more arrives."""
        quiet_since: float | None = None
        while True:
            over = ended()  # asked before reading: what a job wrote last is read below
            new = self._new()
            yield from new
            if not follow:
                return
            now = time.monotonic()
            quiet_since = None if new or not over else quiet_since or now
            if quiet_since is not None and now - quiet_since >= self._late:
                return
            time.sleep(self._every)

    def _new(self) -> list[LogLine]:
        """What has arrived since the last call, in order."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return list(merge(*(sorted(self._read(stream)) for stream in self._streams())))
        except ClientError as problem:
            if errors.code(problem) == "ResourceNotFoundException":
                return []  # no job of this account and region has logged anything yet
            raise errors.explained(problem) from None
        except BotoCoreError as problem:
            raise errors.explained(problem) from None

    def _streams(self) -> list[str]:
        pages = self._client.get_paginator("describe_log_streams").paginate(
            logGroupName=GROUP, logStreamNamePrefix=self._prefix
        )
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]

    def _read(self, stream: str) -> Iterator[LogLine]:
        parsed = parse_job_name(stream.partition("/")[0])
        rank = parsed[0] if parsed is not None else -1
        while True:
            token = self._tokens.get(stream)
            where: Any = {"startFromHead": True} if token is None else {"nextToken": token}
            answer = self._client.get_log_events(logGroupName=GROUP, logStreamName=stream, **where)
            for event in answer["events"]:
                number = self._counts.get(stream, 0)
                self._counts[stream] = number + 1
                yield LogLine(event["timestamp"], rank, stream, number, event["message"])
            self._tokens[stream] = answer["nextForwardToken"]
            # The end is where the token no longer changes; an empty page alone is not.
            if answer["nextForwardToken"] == token:
                return
