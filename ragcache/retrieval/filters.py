"""Metadata filters: conditions on documents in a search.

    {"year": 2024}                                equality
    {"year": {"$gte": 2020, "$lt": 2025}}         all operators must hold
    {"$or": [{"team": "ops"}, {"team": {"$exists": False}}]}

The operators come from MongoDB's query language: `$eq $ne $in $nin $gt $gte $lt $lte $exists $not`
on the value of a key, and `$and $or $not` on whole filters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from ragcache.errors import InvalidRequest

Filters = Mapping[str, Any]
Attributes = Mapping[str, Any]
Test = Callable[[Attributes], bool]
"""Tells whether a document with these attributes passes."""

_DEPTH = 32  # most levels of nesting
_ABSENT = object()
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_OPERATORS = ("$eq", "$ne", "$in", "$nin", *_ORDERS, "$exists", "$not")
_JUNCTIONS = ("$and", "$or", "$not")


def compile_filters(filters: Filters) -> Test:
    """Compile filters to a test of attributes. Filters without a condition accept all.

    A list in the attributes equals each value that it contains. A missing key equals nothing, so
    `$ne` and `$nin` accept it. Values of different kinds (text, number, boolean) are neither equal
    nor ordered. Dates compare as ISO 8601 text.

    Raises:
        InvalidRequest: An operator is unknown, or its operand cannot be used.

    Example:
        >>> recent = compile_filters({"year": {"$gte": 2020}})
        >>> recent({"year": 2024}), recent({})
        (True, False)
    """
    return _all_of(filters, _DEPTH)


def _all_of(filters: Any, depth: int) -> Test:
    if not isinstance(filters, Mapping):
        raise InvalidRequest(f"a filter is a mapping such as {{'year': 2024}}, not {filters!r}")
    if depth == 0:
        raise InvalidRequest(f"filters are nested more than {_DEPTH} deep")
    tests = [_one(key, wanted, depth) for key, wanted in filters.items()]
    return lambda attributes: all(test(attributes) for test in tests)


def _one(key: Any, wanted: Any, depth: int) -> Test:
    if not isinstance(key, str):
        raise InvalidRequest(f"a filter's keys are texts, not {key!r}")
    if not key.startswith("$"):
        held = _values(key, wanted, depth)
        return lambda attributes: held(attributes.get(key, _ABSENT))
    if key == "$not":
        refused = _all_of(wanted, depth - 1)
        return lambda attributes: not refused(attributes)
    if key not in _JUNCTIONS:
        known = ", ".join(_JUNCTIONS)
        raise InvalidRequest(f"unknown operator {key!r}; between filters stand {known}")
    if not isinstance(wanted, list | tuple) or not wanted:
        raise InvalidRequest(f"{key} takes a list of filters, not {wanted!r}")
    tests = [_all_of(each, depth - 1) for each in wanted]
    joined = all if key == "$and" else any
    return lambda attributes: joined(test(attributes) for test in tests)


def _values(key: str, wanted: Any, depth: int) -> Callable[[Any], bool]:
    """Compile the condition of one key to a test of its value, which may be `_ABSENT`."""
    if not isinstance(wanted, Mapping):
        return _operator(key, "$eq", wanted, depth)
    if not wanted:
        raise InvalidRequest(f"the filter of {key!r} is empty; say what its value should be")
    if depth == 0:
        raise InvalidRequest(f"filters are nested more than {_DEPTH} deep")
    tests = [_operator(key, name, operand, depth) for name, operand in wanted.items()]
    return lambda value: all(test(value) for test in tests)


def _operator(key: str, name: Any, operand: Any, depth: int) -> Callable[[Any], bool]:
    if name in ("$eq", "$ne"):
        _check_plain(key, name, operand)
        equal = name == "$eq"
        return lambda value: _equals(value, operand) is equal
    if name in ("$in", "$nin"):
        if not isinstance(operand, list | tuple | set | frozenset):
            raise InvalidRequest(f"{name} of {key!r} takes a list of values, not {operand!r}")
        for each in operand:
            _check_plain(key, name, each)
        among, choices = name == "$in", tuple(operand)
        return lambda value: any(_equals(value, each) for each in choices) is among
    if name in _ORDERS:
        if isinstance(operand, bool) or not isinstance(operand, int | float | str):
            raise InvalidRequest(f"{name} of {key!r} takes a number or a text, not {operand!r}")
        ordered, kind = _ORDERS[name], _kind(operand)
        return lambda value: _kind(value) is kind and ordered(value, operand)
    if name == "$exists":
        if not isinstance(operand, bool):
            raise InvalidRequest(f"$exists of {key!r} takes true or false, not {operand!r}")
        return lambda value: (value is not _ABSENT) is operand
    if name == "$not":
        if not isinstance(operand, Mapping):
            raise InvalidRequest(f"$not of {key!r} takes operators, not {operand!r}")
        refused = _values(key, operand, depth - 1)
        return lambda value: not refused(value)
    raise InvalidRequest(
        f"unknown operator {name!r} in the filter of {key!r}; operators: {', '.join(_OPERATORS)}"
    )


def _check_plain(key: str, name: str, operand: Any) -> None:
    items = operand if isinstance(operand, list | tuple) else (operand,)
    if not all(each is None or isinstance(each, bool | int | float | str) for each in items):
        raise InvalidRequest(
            f"{name} of {key!r} takes texts, numbers, truth values, None or a list of them, not "
            f"{operand!r}; metadata is kept as JSON"
        )


def _equals(value: Any, wanted: Any) -> bool:
    if isinstance(value, list):
        if isinstance(wanted, list | tuple):
            return len(value) == len(wanted) and all(map(_same, value, wanted))
        return any(_same(each, wanted) for each in value)
    return _same(value, wanted)


def _same(value: Any, wanted: Any) -> bool:
    return _kind(value) is _kind(wanted) and bool(value == wanted)


def _kind(value: Any) -> type:
    """Return the kind within which values compare. All numbers are one kind, without booleans."""
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
