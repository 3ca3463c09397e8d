"""The ids of jobs, modules and evictions as the callers of a namespace see them.

In the ledger they count through all namespaces, so that the difference of two would tell a tenant
how much the others did between them; and so does the clock of uses, which a tenant is not told. In
`default`, which is the operator's, all are what they are.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from ragcache import RagCache
from ragcache.config import NAMESPACE
from ragcache.errors import InvalidRequest, UnknownJob, UnknownModule
from ragcache.store.paging import cursor_of, values_of
from ragcache_api.http.service import Call
from ragcache_api.http.wire.common import Numbered, PageOf

T = TypeVar("T")
N = TypeVar("N", bound=Numbered)

_HALF = 26  # bits; ids of twice as many are exact numbers in JavaScript too
_ROUNDS = 8
_VALUE = 2  # where a cursor of modules has what they are sorted by, whose name stands first


@dataclass(frozen=True, slots=True)
class Numbers:
    """A permutation of the ids of one namespace: a Feistel network whose rounds are keyed (Luby and
    Rackoff 1988). key: None changes nothing."""

    key: bytes | None

    def told(self, number: int) -> int:
        """The id that callers see of one in the ledger."""
        return self._permuted(number, range(_ROUNDS))

    def meant(self, number: int) -> int:
        """The id in the ledger of one that callers see."""
        return self._permuted(number, range(_ROUNDS - 1, -1, -1))

    def find(self, get: Callable[[int], T], number: int) -> T:
        """What `get` finds of an id that a caller sees. Raises `UnknownJob` or `UnknownModule`,
        which name no other."""
        try:
            return get(self.meant(number))
        except (UnknownJob, UnknownModule) as error:
            raise type(error)(f"nothing has the id {number}") from None

    def of(self, told: N) -> N:
        """A value as callers see it."""
        if self.key is None:
            return told
        return told.model_copy(update={"id": self.told(told.id), **told.hidden()})

    def page(self, page: PageOf[N]) -> PageOf[N]:
        """A page as callers see it. The id of its last item stands last in the cursor, after what
        it is sorted by."""
        following = None if page.next is None else self._cursor(page.next, self.told)
        return page.model_copy(
            update={"items": [self.of(each) for each in page.items], "next": following}
        )

    def cursor(self, cursor: str | None) -> str | None:
        """The ledger's cursor of one that callers see. Raises `InvalidRequest`."""
        return None if cursor is None else self._cursor(cursor, self.meant)

    def _cursor(self, cursor: str, number: Callable[[int], int]) -> str:
        if self.key is None:
            return cursor
        *place, last = values_of(cursor)
        if type(last) is not int:
            raise InvalidRequest("the cursor is not one of this list; begin without a cursor")
        if len(place) > _VALUE and place[0] == "last_use" and type(place[_VALUE]) is int:
            place[_VALUE] = number(place[_VALUE])
        return cursor_of(*place, number(last))

    def _permuted(self, number: int, rounds: range) -> int:
        if self.key is None or not 0 <= number < 1 << 2 * _HALF:
            return number
        left, right = number >> _HALF, number & (1 << _HALF) - 1
        for turn in rounds:
            left, right = right, left ^ self._drawn(turn, right)
        return right << _HALF | left  # with the halves exchanged the same rounds lead back

    def _drawn(self, turn: int, half: int) -> int:
        said = bytes((turn,)) + half.to_bytes(4, "little")
        drawn = blake2b(said, digest_size=4, key=self.key or b"").digest()
        return int.from_bytes(drawn, "little") >> 32 - _HALF


class Numbering:
    """The numbers of every namespace, by a secret that the ledger keeps."""

    def __init__(self, rag: RagCache) -> None:
        self._secret = rag.keys.service_secret()

    def of(self, namespace: str) -> Numbers:
        if namespace == NAMESPACE:
            return Numbers(None)
        return Numbers(hmac.digest(self._secret, namespace.encode(), "sha256"))


def numbers(call: Call) -> Numbers:
    """Those of the caller's namespace."""
    numbering: Numbering = call.request.app.state.numbering
    return numbering.of(call.caller.namespace)
