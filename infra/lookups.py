"""Looking up what config names, so that a failure names the key and the fix instead of an API's exception."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import pulumi
import pulumi_aws as aws

from diloco.access import Place

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_NOISE = re.compile(r"^invoke of \S+ failed: (?:invoking \S+: )?| \(\)$")
"""What the engine puts around a provider's words."""


def found(key: str, value: str, fix: str, look_up: Callable[[], T]) -> T:
    """What the look-up returns; RunError with key, value, the provider's own words and the fix if it fails."""
    try:
        return look_up()
    except Exception as problem:  # noqa: BLE001 - the SDK raises Exception itself
        reason = _NOISE.sub("", " ".join(str(problem).split()))
        raise pulumi.RunError(f"diloco:{key} {value!r}: {reason}; {fix}") from None


def place() -> Place:
    """Region, account and partition that the provider works in."""
    account = found(
        "aws",
        "credentials",
        "set aws:profile, or AWS_PROFILE, to one that is logged in",
        lambda: aws.get_caller_identity().account_id,
    )
    region = found("aws", "region", "set it: pulumi config set aws:region us-west-2", lambda: aws.get_region().region)
    partition = found("aws", "partition", "check aws:region", lambda: aws.get_partition().partition)
    return Place(region=region, account=account, partition=partition)
