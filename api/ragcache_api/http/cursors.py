"""Pages of lists. Their cursors are encrypted where they hold the ledger's ids or its clock, which
count through all namespaces and so would show a tenant how much the others did in between."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from cryptography.fernet import Fernet, InvalidToken
from fastapi import Depends

from ragcache import RagCache
from ragcache.db.sql import NOT_OF_THIS_LIST, after, cursor_of, cut
from ragcache.errors import InvalidRequest
from ragcache_api.http.protocol import Cursor, Limit, PageOf
from ragcache_api.http.service import ContextDep, RequestContext

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CursorCipher:
    """Encrypts the ledger's cursors, with a key for each namespace. secret: the ledger's, so that
    every service over it can read them."""

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


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The part of a list that a caller wants. cursor: None for its beginning."""

    context: RequestContext
    cursor: str | None
    limit: int

    @property
    def ledger_cursor(self) -> str | None:
        """The encrypted cursor as the ledger wrote it. Raises `InvalidRequest`."""
        if self.cursor is None:
            return None
        return self._cipher.decrypt(self.cursor, self.context.caller.namespace)

    def encrypt_next(self, page: PageOf[T]) -> PageOf[T]:
        """A page of the ledger, whose `next` is encrypted for the caller."""
        if page.next is None:
            return page
        following = self._cipher.encrypt(page.next, self.context.caller.namespace)
        return page.model_copy(update={"next": following})

    def cut(self, items: Sequence[T], name: Callable[[T], str]) -> PageOf[T]:
        """The page of a list that is small enough to be read whole, in the order of its names.
        Raises `InvalidRequest`."""
        last = after(self.cursor, str)
        left = sorted((i for i in items if last is None or name(i) > last[0]), key=name)
        chosen, more = cut(left, self.limit)
        following = cursor_of(name(chosen[-1])) if more else None
        return PageOf(items=list(chosen), next=following, total=len(items))

    @property
    def _cipher(self) -> CursorCipher:
        cipher: CursorCipher = self.context.request.app.state.cursors
        return cipher


async def _page(context: ContextDep, cursor: Cursor = None, limit: Limit = 100) -> PageRequest:
    return PageRequest(context, cursor, limit)


PageDep = Annotated[PageRequest, Depends(_page)]
