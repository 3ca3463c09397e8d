"""Pages of lists that are small enough to be read whole."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TypeVar

from ragcache_api.http.errors import Refusal
from ragcache_api.http.wire.common import PageOf

T = TypeVar("T")
R = TypeVar("R")


def page_of(
    rows: Sequence[R], name: Callable[[R], str], told: Callable[[R], T], cursor: str | None,
    limit: int,
) -> PageOf[T]:  # fmt: skip
    """The items whose names come after the cursor's. name: distinguishes and orders the rows."""
    last = None if cursor is None else _read(cursor)
    ordered = sorted(rows, key=name)
    left = [row for row in ordered if last is None or name(row) > last]
    chosen = left[:limit]
    more = _write(name(chosen[-1])) if len(left) > limit else None
    return PageOf(items=[told(row) for row in chosen], next=more, total=len(ordered))


def _write(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _read(cursor: str) -> str:
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise Refusal(400, "bad-cursor", "the cursor is not one of this list") from None
