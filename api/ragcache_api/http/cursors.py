"""Cursors of pages.

In the ledger ids and the clock of uses count through all namespaces: a tenant who could read two of
them would learn how much the others did in between. Cursors that hold them are encrypted.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cryptography.fernet import Fernet, InvalidToken

from ragcache import RagCache
from ragcache.db.sql import NOT_OF_THIS_LIST, after, cursor_of, cut
from ragcache.errors import InvalidRequest
from ragcache_api.http.protocol import PageOf
from ragcache_api.http.service import Call

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CursorCipher:
    """Encrypts the ledger's cursors, with a key for each namespace. secret: the ledger's, so that
    every service over it reads them."""

    secret: bytes

    @classmethod
    def of(cls, rag: RagCache) -> CursorCipher:
        return cls(rag.keys.service_secret())

    def encrypt(self, cursor: str, namespace: str) -> str:
        """The cursor that callers see."""
        return self._key(namespace).encrypt(cursor.encode()).decode()

    def decrypt(self, cursor: str, namespace: str) -> str:
        """The ledger's cursor. Raises `InvalidRequest`."""
        try:
            return self._key(namespace).decrypt(cursor.encode()).decode()
        except InvalidToken:
            raise InvalidRequest(NOT_OF_THIS_LIST) from None

    def _key(self, namespace: str) -> Fernet:
        key = hmac.digest(self.secret, namespace.encode(), "sha256")
        return Fernet(urlsafe_b64encode(key))


def encrypted(call: Call, page: PageOf[T]) -> PageOf[T]:
    """A page as the caller sees it."""
    if page.next is None:
        return page
    following = _cipher(call).encrypt(page.next, call.caller.namespace)
    return page.model_copy(update={"next": following})


def decrypted(call: Call, cursor: str | None) -> str | None:
    """The ledger's cursor of a caller's. Raises `InvalidRequest`."""
    return None if cursor is None else _cipher(call).decrypt(cursor, call.caller.namespace)


def page_of(
    rows: Sequence[R], name: Callable[[R], str], told: Callable[[R], T], cursor: str | None,
    limit: int,
) -> PageOf[T]:  # fmt: skip
    """A page of a list that is small enough to be read whole: the items whose names come after the
    cursor's. name: distinguishes and orders the rows. Raises `InvalidRequest`."""
    last = after(cursor, str)
    ordered = sorted(rows, key=name)
    left = [row for row in ordered if last is None or name(row) > last[0]]
    chosen, more = cut(left, limit)
    following = cursor_of(name(chosen[-1])) if more else None
    return PageOf(items=[told(row) for row in chosen], next=following, total=len(ordered))


def _cipher(call: Call) -> CursorCipher:
    cipher: CursorCipher = call.request.app.state.cursors
    return cipher
