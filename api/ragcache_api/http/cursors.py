"""Cursors of pages, encrypted where they hold the ledger's ids or its clock.

Those count through all namespaces: two of them would show a tenant how much the others did in
between.
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
from ragcache_api.http.service import RequestContext

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CursorCipher:
    """Encrypts the ledger's cursors, with a key for each namespace.

    secret: the ledger's, so that every service over it can read them.
    """

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


def encrypt_next(context: RequestContext, page: PageOf[T]) -> PageOf[T]:
    """A page whose `next` is encrypted for the caller."""
    if page.next is None:
        return page
    following = _cipher(context).encrypt(page.next, context.caller.namespace)
    return page.model_copy(update={"next": following})


def decrypt_cursor(context: RequestContext, cursor: str | None) -> str | None:
    """The ledger's cursor from the caller's. Raises `InvalidRequest`."""
    return None if cursor is None else _cipher(context).decrypt(cursor, context.caller.namespace)


def page_of(
    items: Sequence[T], name: Callable[[T], str], cursor: str | None, limit: int
) -> PageOf[T]:  # fmt: skip
    """A page of a list that is small enough to be read whole.

    name: distinguishes and orders the items. Raises `InvalidRequest`.
    """
    last = after(cursor, str)
    left = sorted((i for i in items if last is None or name(i) > last[0]), key=name)
    chosen, more = cut(left, limit)
    following = cursor_of(name(chosen[-1])) if more else None
    return PageOf(items=list(chosen), next=following, total=len(items))


def _cipher(context: RequestContext) -> CursorCipher:
    cipher: CursorCipher = context.request.app.state.cursors
    return cipher
