"""How the service says no."""

from __future__ import annotations


class ApiError(Exception):
    """An error that a caller sees: the service's code and message."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def not_found() -> ApiError:
    """For a job that is not there: SageMaker answers with a ValidationException, not with ResourceNotFound."""
    return ApiError("ValidationException", "Requested resource not found.")
