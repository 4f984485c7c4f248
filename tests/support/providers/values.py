"""Pulumi's wire values as plain Python, and when two of them mean the same to AWS."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pulumi.provider.experimental.property_value import PropertyValue
from pulumi.runtime.rpc import UNKNOWN

Plain = dict[str, Any]


def plain(value: PropertyValue) -> Any:
    """Unwrap a wire value: integral numbers become int, unknowns stay the string UNKNOWN."""
    inner = value.value
    if isinstance(inner, float) and inner.is_integer():
        return int(inner)
    if isinstance(inner, Mapping):
        return {key: plain(item) for key, item in inner.items()}
    if isinstance(inner, Sequence) and not isinstance(inner, str):
        return [plain(item) for item in inner]
    return inner


def plain_map(values: Mapping[str, PropertyValue]) -> Plain:
    """The same for a struct; nulls are what is absent."""
    return {key: unwrapped for key, item in values.items() if (unwrapped := plain(item)) is not None}


def wire(value: Any) -> PropertyValue:
    """Wrap plain Python; the wire knows no int."""
    if isinstance(value, Mapping):
        return PropertyValue({key: wire(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return PropertyValue([wire(item) for item in value])
    return PropertyValue(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def wire_map(values: Mapping[str, Any]) -> dict[str, PropertyValue]:
    """The same for a struct; what is None is left out."""
    return {key: wire(value) for key, value in values.items() if value is not None}


def has_unknown(value: Any) -> bool:
    """Whether any part of it is known only after the apply."""
    if isinstance(value, Mapping):
        return any(has_unknown(item) for item in value.values())
    if isinstance(value, list):
        return any(has_unknown(item) for item in value)
    return isinstance(value, str) and UNKNOWN in value


def same(one: Any, other: Any) -> bool:
    """Whether two values configure the same: unset equals empty, false and 0, and a list's order means nothing.

    So the Terraform types behind the real provider compare what these tests use: sets, and zero values as absent.
    """
    return bool(_normal(one) == _normal(other))


def same_document(one: Any, other: Any) -> bool:
    """Whether two JSON policies mean the same: a list of one equals its element, and key order means nothing."""
    if not (one and other):
        return not one and not other
    try:
        return bool(_normal(json.loads(one), unwrap=True) == _normal(json.loads(other), unwrap=True))
    except ValueError:
        return bool(one == other)


def _normal(value: Any, *, unwrap: bool = False) -> Any:
    if isinstance(value, Mapping):
        items = {key: _normal(item, unwrap=unwrap) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None} or None
    if isinstance(value, list):
        entries = [_normal(item, unwrap=unwrap) for item in value]
        if unwrap and len(entries) == 1:
            return entries[0]
        return sorted(entries, key=lambda entry: json.dumps(entry, sort_keys=True)) or None
    return value or None
