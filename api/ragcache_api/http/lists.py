"""Lists in OpenAI's shape, which are cut by ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from ragcache_api.http.bodies import invalid
from ragcache_api.http.protocol import ResponseModel


class Identified(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str:
        """Id of the item."""


T = TypeVar("T")
Item = TypeVar("Item", bound=Identified)


class ListOf(ResponseModel, Generic[T]):
    """A page of a list."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # as in `PageOf`
    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: Annotated[
        bool, Field(description="Whether the list goes on behind the last item.")
    ] = False


class ListRequest(BaseModel):
    """The query of a page."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    limit: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Most items of the page."""
    order: Literal["asc", "desc"] = "desc"
    """`desc` lists the newest item first."""
    after: Annotated[str | None, Field(max_length=500)] = None
    """Id of the item before the page."""
    before: Annotated[str | None, Field(max_length=500)] = None
    """Id of the item behind the page."""

    def cut(self, oldest_first: Sequence[Item]) -> ListOf[Item]:
        """Cut the page out of a whole list. Raises `HTTPProblem` (400) for an unknown id."""
        items = [*oldest_first] if self.order == "asc" else [*reversed(oldest_first)]
        places = {each.id: place for place, each in enumerate(items)}
        for name in (self.after, self.before):
            if name is not None and name not in places:
                raise invalid("after", f"no item of this list is {name!r:.200}")
        begin = 0 if self.after is None else places[self.after] + 1
        end = len(items) if self.before is None else places[self.before]
        page = items[begin:end]
        more = len(page) > self.limit
        page = page[-self.limit :] if self.before and not self.after else page[: self.limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return ListOf(data=page, first_id=first, last_id=last, has_more=more)


ListQuery = Annotated[ListRequest, Query()]
