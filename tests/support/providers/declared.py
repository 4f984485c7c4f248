"""What the real packages declare: arguments, their types, outputs, results of functions. Read from their own classes.

The Python packages are made from the real providers' schemas, so a stand-in that is held to them cannot accept what
the real provider would refuse as unknown.
"""

from __future__ import annotations

import collections.abc
import enum
import importlib
import threading
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

import pulumi
from pulumi import _types

from tests.support.providers.values import has_unknown

PACKAGES = {"aws": "pulumi_aws", "docker-build": "pulumi_docker_build"}
_importing = threading.Lock()  # the packages import their modules lazily, which two threads at once do not survive


@dataclass(frozen=True)
class Declared:
    """One resource class: argument → type hint, the required ones, and every output."""

    arguments: dict[str, Any]
    required: frozenset[str]
    outputs: frozenset[str]

    def problems(self, inputs: dict[str, Any]) -> dict[str, str]:
        """Argument → what is wrong with it, as the real provider's schema sees it."""
        found: dict[str, str] = dict.fromkeys(sorted(self.required - inputs.keys()), "is required")
        for name, value in inputs.items():
            if name.startswith("__"):  # the engine's and the bridge's own marks
                continue
            if name not in self.arguments:
                found[name] = f"no such argument; there are {', '.join(sorted(self.arguments))}"
            elif problem := mismatch(self.arguments[name], value, name):
                found[name] = problem
        return found


def resource(token: str) -> Declared:
    """What the class of a resource token (`aws:s3/bucket:Bucket`) declares. Raises KeyError if there is none."""
    with _importing:
        return _resource(token)


@cache
def _resource(token: str) -> Declared:
    cls = _named(token, token.rsplit(":", 1)[1])
    module = importlib.import_module(cls.__module__)
    # "InitArgs" where the plain name is taken by a nested type.
    args = getattr(module, f"{cls.__name__}InitArgs", None) or getattr(module, f"{cls.__name__}Args")
    arguments = _arguments(args)
    required = frozenset(name for name, hint in arguments.items() if type(None) not in typing.get_args(hint))
    return Declared(arguments, required, frozenset(_types.resource_types(cls)))


@cache
def provider(package: str) -> Declared:
    """The arguments of a package's explicit provider, which are also its configuration keys."""
    module = importlib.import_module(f"{PACKAGES[package]}.provider")
    return Declared(_arguments(module.ProviderArgs), frozenset(), frozenset())


def result(token: str) -> frozenset[str]:
    """The fields of a function's result."""
    with _importing:
        return _result(token)


@cache
def _result(token: str) -> frozenset[str]:
    name = token.rsplit(":", 1)[1]
    cls = _named(token, f"{name[0].upper()}{name[1:]}Result")
    return frozenset(_types._py_to_pulumi_names_from_py_properties(cls).values())


def mismatch(hint: Any, value: Any, path: str) -> str | None:
    """Say what keeps a value from being of an argument's type, None if nothing does."""
    if has_unknown(value) and isinstance(value, str):
        return None
    problems = []
    for alternative in _alternatives(hint):
        problem = _mismatch_one(alternative, value, path)
        if problem is None:
            return None
        problems.append(problem)
    return problems[0] if problems else None


def _mismatch_one(hint: Any, value: Any, path: str) -> str | None:
    origin = typing.get_origin(hint)
    if hint is Any:
        return None
    if origin is collections.abc.Sequence:
        if not isinstance(value, list):
            return f"{path}: a list is expected, not {value!r}"
        (item_hint,) = typing.get_args(hint)
        return next(filter(None, (mismatch(item_hint, item, f"{path}[{at}]") for at, item in enumerate(value))), None)
    if origin is collections.abc.Mapping:
        if not isinstance(value, dict):
            return f"{path}: a map is expected, not {value!r}"
        item_hint = typing.get_args(hint)[1]
        return next(filter(None, (mismatch(item_hint, item, f"{path}.{key}") for key, item in value.items())), None)
    if _types.is_input_type(hint):
        return _mismatch_object(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        allowed = [member.value for member in hint]
        return None if value in allowed else f"{path}: one of {allowed} is expected, not {value!r}"
    if hint in (str, int, float, bool):
        allowed_types: tuple[type, ...] = (int, float) if hint is float else (hint,)
        fits = isinstance(value, allowed_types) and isinstance(value, bool) == (hint is bool)
        return None if fits else f"{path}: a value of type {hint.__name__} is expected, not {value!r}"
    return None


def _mismatch_object(cls: Any, value: Any, path: str) -> str | None:
    if not isinstance(value, dict):
        return f"{path}: an object is expected, not {value!r}"
    arguments = _arguments(cls)
    for key, item in value.items():
        if key not in arguments:
            return f"{path}.{key}: no such argument; there are {', '.join(sorted(arguments))}"
        if problem := mismatch(arguments[key], item, f"{path}.{key}"):
            return problem
    missing = [name for name, hint in arguments.items() if type(None) not in typing.get_args(hint)]
    return next((f"{path}.{name}: is required" for name in missing if name not in value), None)


def _alternatives(hint: Any) -> list[Any]:
    """The types that a plain value of `Input[Optional[...]]` may have."""
    if typing.get_origin(hint) is not typing.Union:
        return [hint]
    kept = []
    for part in typing.get_args(hint):
        origin = typing.get_origin(part) or part
        wrapper = isinstance(part, typing.ForwardRef) or getattr(origin, "__name__", "") in {"Awaitable", "Output"}
        if part is not type(None) and not wrapper and not typing.is_typeddict(part):
            kept.append(part)
    return kept


@cache
def _arguments(cls: Any) -> dict[str, Any]:
    names = vars(importlib.import_module(cls.__module__)) | {"Output": pulumi.Output, "T": Any}
    hints = typing.get_type_hints(cls.__init__, globalns=names)
    return {wire_name: hints[name] for name, wire_name in _types.input_type_py_to_pulumi_names(cls).items()}


def _named(token: str, name: str) -> Any:
    package, where, _ = token.split(":")
    module = where.split("/")[0]
    try:
        home = importlib.import_module(PACKAGES[package] + ("" if module == "index" else f".{module}"))
        return getattr(home, name)
    except (ImportError, AttributeError):
        raise KeyError(token) from None
