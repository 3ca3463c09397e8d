"""Pages of modules in any order: no statement reads all modules to give a hundred of them.

Where the filters leave much, a page is read along an index in its order; where they leave little,
from what they leave. The size and the uses of a module are the most of any of its states, and it
stands where these stand; modules without states come last in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Select, and_, exists, func, select, tuple_
from sqlalchemy.orm import aliased

from ragcache.errors import InvalidRequest
from ragcache.store.database import Database
from ragcache.store.listing import ModuleListing, listings
from ragcache.store.lookup import collection_id
from ragcache.store.module_filters import Condition, Matching, ModuleFilter
from ragcache.store.paging import Page, after, check_limit, cursor_of, cut
from ragcache.store.tables import EncodingTable, ModuleTable, NamespaceTable, StateTable

Sort = Literal["id", "name", "nbytes", "hits", "last_use"]
SORTS: tuple[str, ...] = get_args(Sort)

_KINDS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "id": (int,),
    "name": (str, int),
    **dict.fromkeys(("nbytes", "hits", "last_use"), ((int, type(None)), str, int)),
}

Place = tuple[Any, ...]
"""What a module is sorted by, its id last. Of one without states: (None, "", id)."""


def module_page(
    database: Database,
    namespace: str,
    wanted: ModuleFilter,
    sort: str = "id",
    *,
    descending: bool = False,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[ModuleListing]:
    """A page of a namespace's modules. `total` is told with the first page, unless all modules
    would have to be looked through to count them. Raises `InvalidRequest` or `UnknownCollection`.
    """
    if sort not in SORTS:
        raise InvalidRequest(f"unknown order {sort!r}; orders: {', '.join(SORTS)}")
    last = _last(cursor, sort, descending)
    check_limit(limit)
    with database.reading() as session:
        owner = None
        if wanted.collection is not None:
            owner = collection_id(session, wanted.collection, namespace)
        named = select(NamespaceTable.id).where(NamespaceTable.name == namespace)
        number = session.scalar(named)
        if number is None:
            return Page((), None, 0)
        matching = Matching(session, wanted, number, owner)
        walk = _Walk(matching, matching.few(), sort, descending, limit)
        places, more = cut(walk.places(last), limit)
        items = listings(session, [place[-1] for place in places])
        following = cursor_of(sort, int(descending), *places[-1]) if more else None
        return Page(tuple(items), following, walk.total() if last is None else None)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Modules in order. few: the ids among which they are, if they are few."""

    matching: Matching
    few: Sequence[int] | None
    sort: str
    descending: bool
    limit: int

    def places(self, last: Place | None) -> list[Place]:
        """Those of a page and of one module more."""
        if self.sort in ("id", "name"):
            return self._named(last)
        found: list[Place] = []
        if last is None or last[0] is not None:
            found, last = self._by_states(last), None
        lacking = self.limit + 1 - len(found)
        wanted = self.matching.wanted
        if lacking and wanted.tier is None and not wanted.pinned:
            found += self._without_states(last, lacking)
        return found

    def total(self) -> int | None:
        """How many modules there are; None where they would have to be looked through."""
        matching, wanted = self.matching, self.matching.wanted
        if self.few is not None:
            count = self._chosen(select(func.count()).select_from(ModuleTable), ModuleTable.id)
        elif wanted == ModuleFilter(collection=wanted.collection):
            count = matching.members(func.count())
        else:
            return None
        return int(matching.session.scalar(count))

    def _named(self, last: Place | None) -> list[Place]:
        columns = (ModuleTable.id,) if self.sort == "id" else (ModuleTable.name, ModuleTable.id)
        statement = self._chosen(select(*columns), ModuleTable.id)
        if last is not None:
            statement = statement.where(self._beyond(columns, last))
        return self._read(statement, columns)

    def _by_states(self, last: Place | None) -> list[Place]:
        """Along the states, each module with the highest of its own."""
        value, module = StateTable.__table__.c[self.sort], EncodingTable.module_id
        columns = (value, StateTable.key, module)
        state, encoding = aliased(StateTable), aliased(EncodingTable)
        here = tuple_(value, StateTable.key, StateTable.tier, StateTable.place)
        there = tuple_(getattr(state, self.sort), state.key, state.tier, state.place)
        higher = exists().where(
            encoding.module_id == module, state.key == encoding.key, there > here
        )
        joined = select(*columns).join(EncodingTable, EncodingTable.key == StateTable.key)
        statement = self._chosen(joined, module).where(~higher)
        if last is not None:
            same = and_(value == last[0], StateTable.key == last[1])
            passed = module >= last[2] if self.descending else module <= last[2]
            beyond = self._beyond(columns[:2], last[:2], or_equal=True)
            statement = statement.where(beyond, ~and_(same, passed))
        return self._read(statement, columns)

    def _without_states(self, last: Place | None, limit: int) -> list[Place]:
        held = exists().where(
            EncodingTable.module_id == ModuleTable.id, StateTable.key == EncodingTable.key
        )
        statement = self._chosen(select(ModuleTable.id), ModuleTable.id).where(~held)
        if last is not None:
            statement = statement.where(ModuleTable.id > last[2])
        rows = self.matching.session.scalars(statement.order_by(ModuleTable.id).limit(limit))
        return [(None, "", number) for number in rows]

    def _chosen(self, statement: Select[Any], module: Any) -> Select[Any]:
        chosen = statement.where(*self.matching.conditions(module))
        return chosen if self.few is None else chosen.where(module.in_(self.few))

    def _read(self, statement: Select[Any], columns: Sequence[Any]) -> list[Place]:
        order = [column.desc() if self.descending else column for column in columns]
        ordered = statement.order_by(*order).limit(self.limit + 1)
        return [tuple(row) for row in self.matching.session.execute(ordered)]

    def _beyond(self, columns: Sequence[Any], last: Place, *, or_equal: bool = False) -> Condition:
        row, values = (tuple_(*columns), last) if len(columns) > 1 else (columns[0], last[0])
        condition: Condition
        if or_equal:
            condition = row <= values if self.descending else row >= values
        else:
            condition = row < values if self.descending else row > values
        return condition


def _last(cursor: str | None, sort: str, descending: bool) -> Place | None:
    """Where the page before ended. Raises `InvalidRequest`, also for a cursor of another order."""
    values = after(cursor, str, int, *_KINDS[sort])
    if values is None:
        return None
    if values[:2] != [sort, int(descending)]:
        raise InvalidRequest("the cursor is of another order; begin without a cursor")
    return tuple(values[2:])
