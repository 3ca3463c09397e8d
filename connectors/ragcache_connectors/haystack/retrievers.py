"""A retriever of Haystack over a collection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haystack import Document, component, default_from_dict, default_to_dict

from ragcache.errors import InvalidRequest
from ragcache.params import SearchParams
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.retrieval import Hit, Selection

_OPERATORS = {
    "==": "$eq",
    "!=": "$ne",
    ">": "$gt",
    ">=": "$gte",
    "<": "$lt",
    "<=": "$lte",
    "in": "$in",
    "not in": "$nin",
}
_JUNCTIONS = {"AND": "$and", "OR": "$or"}


@component
class RagCacheTextRetriever:
    """A retriever of a collection's modules as documents, with Haystack's protocol `TextRetriever`.

    The contents of documents are read from their states when `RagCacheChatGenerator` finds them in
    a prompt. `meta` has the metadata of module and document, and `document`, `module` and `uri`.

    Example:
        >>> retriever = RagCacheTextRetriever("handbook", state="state/")  # doctest: +SKIP
        >>> retriever.run("Where is the boat?", top_k=4)["documents"]  # doctest: +SKIP
    """

    def __init__(
        self,
        collection: str,
        state: str | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        search: dict[str, Any] | None = None,
        *,
        rag: Any = None,
    ) -> None:
        """Search a collection.

        Args:
            collection: The collection.
            state: The state folder, which all components of this process share.
            filters: Conditions on metadata, as Haystack writes them.
            top_k: Most documents of a run.
            search: More fields of `SearchParams`, such as `{"search": "sparse"}`.
            rag: An open `RagCache`, instead of `state`. It is left out of `to_dict`.

        Raises:
            InvalidRequest: An option or a filter cannot be used.
        """
        self.collection, self.state, self.filters = collection, state, filters
        self.top_k, self.search, self.rag = top_k, search or {}, rag
        self._params(None, None)

    def to_dict(self) -> dict[str, Any]:
        """Return the component for a pipeline's file."""
        found: dict[str, Any] = default_to_dict(
            self,
            collection=self.collection,
            state=self.state,
            filters=self.filters,
            top_k=self.top_k,
            search=self.search,
        )
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagCacheTextRetriever:
        """Return the component of `to_dict`."""
        found: RagCacheTextRetriever = default_from_dict(cls, data)
        return found

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Find the best modules. Raises the errors of `RagCache.retrieve`.

        Args:
            query: The query.
            filters: As in the constructor; these come first.
            top_k: As in the constructor; this comes first.
        """
        retriever = self._open().retriever()
        return _found(retriever.retrieve(query, self.collection, self._params(filters, top_k)))

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Find the best modules as `run` does, without a waiting thread."""
        retriever, params = self._open().retriever(), self._params(filters, top_k)
        return _found(await retriever.aretrieve(query, self.collection, params))

    def _open(self) -> RagCache:
        return shared_rag(self.rag, self.state and Path(self.state))

    def _params(self, filters: Mapping[str, Any] | None, top_k: int | None) -> SearchParams:
        chosen, number = filters or self.filters, top_k or self.top_k
        options = self.search | ({} if number is None else {"k": number})
        return SearchParams(**options, filters=None if not chosen else convert_filters(chosen))


def _found(selection: Selection) -> dict[str, list[Document]]:
    return {"documents": [_document(hit) for hit in selection.hits]}


def _document(hit: Hit) -> Document:
    module = hit.module
    own = {"document": module.document, "module": module.name, "uri": module.uri}
    return Document(
        id=module.name,
        content=module.text.strip(),
        meta={**module.metadata, **own},
        score=hit.score,
    )


def convert_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return Haystack's filters as filters of `SearchParams`.

    Raises:
        InvalidRequest: The filters are malformed, or an operator has no counterpart.

    Example:
        >>> convert_filters({"field": "meta.year", "operator": ">=", "value": 2020})
        {'year': {'$gte': 2020}}
    """
    name = filters.get("operator")
    if "field" in filters:
        if name not in _OPERATORS or "value" not in filters:
            raise InvalidRequest(
                f"a comparison has `field`, `value`, and an operator of {', '.join(_OPERATORS)}; "
                f"this one is {dict(filters)!r:.200}"
            )
        return {str(filters["field"]).removeprefix("meta."): {_OPERATORS[name]: filters["value"]}}
    conditions = filters.get("conditions")
    if name not in (*_JUNCTIONS, "NOT") or not isinstance(conditions, list):
        raise InvalidRequest(
            f"filters have `conditions` and an operator AND, OR or NOT; these are "
            f"{dict(filters)!r:.200}"
        )
    parts = [convert_filters(each) for each in conditions]
    return {"$not": {"$and": parts}} if name == "NOT" else {_JUNCTIONS[name]: parts}
