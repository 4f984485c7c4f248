"""What each failure of s3fs, botocore or aiohttp means, as one of our errors."""

from __future__ import annotations

import os

from diloco.errors import (
    AccessDeniedError,
    BucketMissingError,
    ConfigurationError,
    CorruptObjectError,
    DilocoError,
    ObjectMissingError,
    StoreError,
    StoreUnreachableError,
)

_EXISTS = {"PreconditionFailed", "412"}
_CREDENTIALS = {
    "ExpiredToken": "the credentials have expired: renew them",
    "ExpiredTokenException": "the credentials have expired: renew them",
    "InvalidAccessKeyId": "the access key id is unknown: check AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret access key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
}
_UNREACHABLE = {  # botocore's and aiohttp's
    "ClientConnectorError",
    "ClientOSError",
    "ClientPayloadError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteReadError",
    "ReadTimeoutError",
    "ResponseParserError",
    "ResponseStreamingError",
    "TimeoutError",
    "ServerDisconnectedError",
}
_TRANSIENT = {
    "409",
    "500",
    "502",
    "503",
    "504",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
}
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "TokenRetrievalError",
}
_TOKEN_FILES = ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Name the file that a pod's identity is read from, whenever its credentials are renewed."""
_BAD_NAMES = {"InvalidBucketName", "InvalidRegionError", "NoRegionError", "ParamValidationError"}
_PERMISSIONS = {
    "read": "s3:GetObject",
    "create": "s3:PutObject",
    "write": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}


class AlreadyThereError(DilocoError):
    """A create of an object that exists."""


def explain(problem: BaseException, operation: str, uri: str, key: str) -> DilocoError:
    """What s3fs, botocore or aiohttp raised, as one of our errors with one line of text."""
    where = f"{uri}/{key}"
    said = " ".join(str(problem).split())
    code = _code(problem)
    names = {kind.__name__ for kind in type(problem).__mro__}
    if operation == "create" and (code in _EXISTS or isinstance(problem, FileExistsError)):
        return AlreadyThereError(where)
    if code == "NoSuchBucket":
        return BucketMissingError(f"{uri}: the bucket does not exist: create it, or correct the address")
    if (denied := _denied(problem, code, names, operation, uri, key)) is not None:
        return denied
    if code in {"InvalidRange", "416"}:
        return CorruptObjectError(f"{where}: is shorter than its header says")
    if isinstance(problem, FileNotFoundError):
        return ObjectMissingError(where)
    if code in _TRANSIENT or (code is None and names & _UNREACHABLE):
        return StoreUnreachableError(f"{where}: no answer on {operation}: {said or 'time-out'}")
    if names & _BAD_NAMES:
        return ConfigurationError(f"{uri}: {said}")
    return StoreError(f"{where}: {operation} failed: {type(problem).__name__}: {said}")


def _denied(
    problem: BaseException, code: str | None, names: set[str], operation: str, uri: str, key: str
) -> AccessDeniedError | None:
    if (said := _web_identity_refused(problem)) is not None:
        return AccessDeniedError(
            f"{uri}: no usable AWS credentials: STS gives none for the token of AWS_WEB_IDENTITY_TOKEN_FILE: {said}:"
            " check AWS_ROLE_ARN and that role's trust policy"
        )
    if code in _CREDENTIALS:
        return AccessDeniedError(f"{uri}/{key}: {_CREDENTIALS[code]}")
    if names & _NO_CREDENTIALS:
        said = " ".join(str(problem).split())
        return AccessDeniedError(f"{uri}: no usable AWS credentials ({said}): run `aws configure`, or set AWS_PROFILE")
    if isinstance(problem, OSError) and problem.filename is not None:
        for variable in _TOKEN_FILES:
            if os.environ.get(variable) == problem.filename:
                return AccessDeniedError(
                    f"{uri}: no usable AWS credentials: {problem.filename} of {variable} can't be read:"
                    f" {problem.strerror}: mount the token there, or correct {variable}"
                )
    if isinstance(problem, PermissionError) or code in {"403", "AccessDenied"}:
        permission = _PERMISSIONS.get(operation, "access")
        return AccessDeniedError(
            f"{uri}/{key}: access denied on {operation}: these credentials need {permission} there"
        )
    return None


def _web_identity_refused(problem: BaseException | None) -> str | None:
    """STS's words, if it was STS that refused: it speaks before S3 is asked."""
    while problem is not None:
        if getattr(problem, "operation_name", None) == "AssumeRoleWithWebIdentity":
            return " ".join(str(problem).split())
        problem = problem.__cause__
    return None


def _code(problem: BaseException | None) -> str | None:
    """The S3 error code of an exception or of one that caused it: s3fs raises FileNotFoundError for a bucket and a
    key alike.
    """
    while problem is not None:
        response = getattr(problem, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code"))
        problem = problem.__cause__
    return None
