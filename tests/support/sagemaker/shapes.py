"""Checks a request against every constraint that botocore's model of SageMaker states: the service enforces them,
botocore itself does not (https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import regex  # type: ignore[import-untyped]  # the patterns are Java's, with classes such as \p{L} that `re` lacks
from botocore.loaders import Loader

from tests.support.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float, str),
    "list": (list,),
    "map": (dict,),
    "structure": (dict,),
}


@cache
def model() -> dict[str, Any]:
    """The service's model as botocore ships it."""
    loaded: dict[str, Any] = Loader().load_service_model("sagemaker", "service-2")
    return loaded


def check(operation: str, request: dict[str, Any]) -> None:
    """Raise the service's ValidationException that lists all violated constraints of a request."""
    name = model()["operations"][operation]["input"]["shape"]
    problems = list(_problems(name, request, ""))
    if problems:
        noun = "error" if len(problems) == 1 else "errors"
        raise ApiError("ValidationException", f"{len(problems)} validation {noun} detected: {'; '.join(problems)}")


def _problems(shape_name: str, value: Any, path: str) -> Iterator[str]:
    shape = model()["shapes"][shape_name]
    kind = shape["type"]
    expected: Any = _TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        raise ApiError("SerializationException", f"{path or 'the request'} must be of type {kind}")
    if kind == "structure":
        yield from _in_structure(shape, value, path)
    elif kind == "list":
        yield from _length(shape, value, path, len(value))
        for index, item in enumerate(value, 1):
            yield from _problems(shape["member"]["shape"], item, f"{path}.{index}.member")
    elif kind == "map":
        yield from _length(shape, value, path, len(value))
        for key, item in value.items():
            yield from _problems(shape["key"]["shape"], key, f"{path}.key")
            yield from _problems(shape["value"]["shape"], item, f"{path}.{key}.member")
    elif kind == "string":
        yield from _in_string(shape, value, path)
    elif kind in ("integer", "long", "float", "double"):
        yield from _range(shape, value, path)


def _in_structure(shape: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    members = shape["members"]
    unknown = sorted(set(value) - set(members))
    if unknown:
        raise ApiError("SerializationException", f"{path or 'the request'} has no member {', '.join(unknown)}")
    for name in shape.get("required", ()):
        if value.get(name) is None:
            yield _failed("null", _join(path, name), "Member must not be null")
    for name, item in value.items():
        if item is not None:
            yield from _problems(members[name]["shape"], item, _join(path, name))


def _in_string(shape: dict[str, Any], value: str, path: str) -> Iterator[str]:
    if "enum" in shape and value not in shape["enum"]:
        yield _failed(f"'{value}'", path, f"Member must satisfy enum value set: [{', '.join(shape['enum'])}]")
    yield from _length(shape, value, path, len(value))
    pattern = shape.get("pattern")
    if pattern is not None and regex.fullmatch(pattern, value) is None:
        yield _failed(f"'{value}'", path, f"Member must satisfy regular expression pattern: {pattern}")


def _length(shape: dict[str, Any], value: Any, path: str, length: int) -> Iterator[str]:
    if length < shape.get("min", 0):
        yield _failed(f"'{value}'", path, f"Member must have length greater than or equal to {shape['min']}")
    if length > shape.get("max", length):
        yield _failed(f"'{value}'", path, f"Member must have length less than or equal to {shape['max']}")


def _range(shape: dict[str, Any], value: float, path: str) -> Iterator[str]:
    if value < shape.get("min", value):
        yield _failed(f"'{value}'", path, f"Member must have value greater than or equal to {shape['min']}")
    if value > shape.get("max", value):
        yield _failed(f"'{value}'", path, f"Member must have value less than or equal to {shape['max']}")


def _failed(value: str, path: str, constraint: str) -> str:
    return f"Value {value} at '{path}' failed to satisfy constraint: {constraint}"


def _join(path: str, name: str) -> str:
    member = name[0].lower() + name[1:]
    return f"{path}.{member}" if path else member
