"""What SageMaker's refusals mean, and what to do about each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from diloco.errors import AccessDeniedError, ConfigurationError, DilocoError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

_SETTLING = re.compile(
    r"Could not assume role|Access denied to .*S3|Access denied for repository|Cannot find repository"
    r"|Unable to (?:access|evaluate)|is not authorized to perform: sts:AssumeRole",
    re.IGNORECASE,
)
"""What SageMaker says for some seconds after a role or a policy was made, since IAM is eventually consistent
(https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency), and says
for ever if it is true.
"""
_LIMIT = re.compile(
    r"limit '(?P<name>[^']+)' is (?P<limit>[\d.,]+)\D+utilization of (?P<used>[\d.,]+)\D+delta of (?P<more>[\d.,]+)"
)


def code(problem: ClientError) -> str:
    """The error's code."""
    return str(problem.response.get("Error", {}).get("Code", ""))


def text(problem: ClientError) -> str:
    """The error's message, in one line."""
    return " ".join(str(problem.response.get("Error", {}).get("Message", problem)).split())


def is_missing(problem: ClientError) -> bool:
    """Whether there is no job of that name: SageMaker says it as a ValidationException."""
    return code(problem) == "ResourceNotFound" or "not found" in text(problem).lower()


def is_settling(problem: ClientError) -> bool:
    """Whether it may pass by itself within a minute."""
    return code(problem) in ("ValidationException", "AccessDeniedException") and bool(_SETTLING.search(text(problem)))


def is_throttled(problem: ClientError) -> bool:
    """Whether the call was one too many; it was not carried out."""
    return code(problem) in ("ThrottlingException", "Throttling", "TooManyRequestsException", "RequestLimitExceeded")


def explained(problem: Any) -> DilocoError:
    """The same error for a user: what happened, and the fix."""
    from botocore.exceptions import ClientError, NoCredentialsError

    if isinstance(problem, NoCredentialsError):
        return AccessDeniedError("no AWS credentials: log in (aws sso login), or set AWS_PROFILE")
    if not isinstance(problem, ClientError):
        return DilocoError(f"SageMaker can't be reached: {problem}")
    said = text(problem)
    if code(problem) == "ResourceLimitExceeded":
        return DilocoError(limit_exceeded(said))
    if code(problem) in ("AccessDeniedException", "AccessDenied"):
        return AccessDeniedError(f"{said}: attach the stack's launcher policy (launcherPolicyArn) to who launches")
    if code(problem) in ("ExpiredTokenException", "UnrecognizedClientException", "InvalidClientTokenId"):
        return AccessDeniedError(f"{said} Log in again (aws sso login), or check AWS_PROFILE")
    if is_throttled(problem):
        return DilocoError("SageMaker throttles this account's calls for too long: try again later")
    if code(problem) == "ValidationException":
        return ConfigurationError(said)
    return DilocoError(f"{code(problem)}: {said}")


def limit_exceeded(said: str) -> str:
    """Which quota is exceeded, by how much, and what to do."""
    found = _LIMIT.search(said)
    if found is None:
        return f"{said} (raise the quota in Service Quotas)"
    limit, used, more = (float(found[name].replace(",", "").rstrip(".")) for name in ("limit", "used", "more"))
    return (
        f"the quota {found['name']!r} is {limit:g} and {used:g} are in use, so {used + more - limit:g} more are needed:"
        " raise it in Service Quotas (Amazon SageMaker), use another --instance-type, or wait"
    )
