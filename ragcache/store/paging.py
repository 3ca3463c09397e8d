"""Pages of long lists: where the last one ended stands in an opaque cursor."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ragcache.errors import InvalidRequest

MOST = 1000  # items of a page
NOT_OF_THIS_LIST = "the cursor is not one of this list; begin without a cursor"

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """Some items of a list. next: the cursor of those that follow, None after the last. total: of
    the whole list, None where counting it would take long."""

    items: tuple[ItemT, ...]
    next: str | None = None
    total: int | None = None


def cursor_of(*values: int | float | str | None) -> str:
    """A cursor: what the last item was sorted by, and its id."""
    told = json.dumps(values, ensure_ascii=False)  # of names in other scripts half as long
    return base64.urlsafe_b64encode(told.encode()).decode().rstrip("=")


def after(cursor: str | None, *kinds: type | tuple[type, ...]) -> list[Any] | None:
    """The values of a cursor, one of each kind. Raises `InvalidRequest` for any other text."""
    if cursor is None:
        return None
    values = _values_of(cursor)
    if len(values) != len(kinds) or not all(
        isinstance(value, kind) and _fits(value) for value, kind in zip(values, kinds, strict=True)
    ):
        raise InvalidRequest(NOT_OF_THIS_LIST)
    return values


def _values_of(cursor: str) -> list[Any]:
    """What a cursor was made of; at least one value. Raises `InvalidRequest`."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise InvalidRequest(NOT_OF_THIS_LIST)
    return values


def check_limit(limit: int) -> int:
    """Raises `InvalidRequest` for a size that no page may have."""
    if not 1 <= limit <= MOST:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {MOST}")
    return limit


def cut(items: Sequence[ItemT], limit: int) -> tuple[tuple[ItemT, ...], bool]:
    """The items of a page, of one more that were read, and whether there are more."""
    return tuple(items[:limit]), len(items) > limit


def _fits(value: object) -> bool:
    """Whether a database takes a number of this size; true and false are no numbers."""
    if isinstance(value, bool):
        return False
    return not isinstance(value, int) or -(2**63) <= value < 2**63
