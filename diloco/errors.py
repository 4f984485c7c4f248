"""Every error a user can meet, and the exit code a replica ends with for it.

An error's text is one line: what happened, to which rank, round, key or setting, and what to do next. The command
line and the entrypoint print it without a traceback; anything that is not a :class:`DilocoError` is a bug and keeps
its traceback.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a replica's process ends. The launcher decides by these what may be relaunched."""

    OK = 0
    FAILED = 1
    """The run failed, or the trainer raised: a relaunch may help."""
    USAGE = 2
    """The command line itself was wrong."""
    LOST_RENDEZVOUS = 69
    """The object store could not be used (BSD's EX_UNAVAILABLE): a relaunch may help."""
    FENCED = 76
    """A newer attempt of this rank exists: never relaunched."""
    BAD_CONFIGURATION = 78
    """The settings can't work (BSD's EX_CONFIG): never relaunched."""
    INTERRUPTED = 143
    """Stopped by SIGTERM or SIGINT."""


class DilocoError(Exception):
    """Base of all errors that a user can cause or meet."""

    exit_code: ExitCode = ExitCode.FAILED


class ConfigurationError(DilocoError):
    """A setting that can't work; the text names it and what is allowed."""

    exit_code = ExitCode.BAD_CONFIGURATION


class RunMismatchError(ConfigurationError):
    """The run under this prefix was made with other settings or another model; the text names the first difference."""


class StoreError(DilocoError):
    """The object store failed for good, or for longer than the retries last."""

    exit_code = ExitCode.LOST_RENDEZVOUS


class StoreUnreachableError(StoreError):
    """No answer from the endpoint."""


class AccessDeniedError(StoreError):
    """Credentials are missing, expired, or lack a permission; the text names the key and the permission."""


class BucketMissingError(StoreError):
    """The bucket does not exist."""


class ConditionalWriteError(StoreError):
    """The store ignores create-if-absent, so two replicas could both win a commit."""


class OutcomeUnknownError(StoreError):
    """A create whose answer was lost: the object may or may not be there."""


class ObjectMissingError(DilocoError):
    """An object that should be there is not; the text is its key."""


class CorruptObjectError(DilocoError):
    """An object's bytes are not what its record says: refused, never averaged."""


class CorruptRoundError(CorruptObjectError):
    """A payload of a committed round is corrupt: the round can't be averaged any more."""

    def __init__(self, message: str, round_: int) -> None:
        super().__init__(message)
        self.round = round_


class FencedError(DilocoError):
    """A newer attempt of this rank has claimed its place."""

    exit_code = ExitCode.FENCED


class RoundError(DilocoError):
    """A round can't be completed; the text names rank, round and reason."""


class RoundTimeoutError(RoundError):
    """A bounded wait ended; the text names whom it waited for."""


class DivergedError(RoundError):
    """This replica's parameters are not those the others agreed on."""
