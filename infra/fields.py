"""What settings are made of: text that a pattern decides about."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def checked(pattern: str | re.Pattern[str], allowed: str) -> AfterValidator:
    """A validator that takes what the pattern matches as a whole, and else says what is allowed."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(allowed)
        return value

    return AfterValidator(check)


Principal = Annotated[
    str,
    checked(r"arn:aws[a-z-]*:iam::\d{12}:(?:user|group|role)/[\w+=,.@/-]+", "the ARN of an IAM user, group or role"),
]
