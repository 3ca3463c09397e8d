"""A retriever of LlamaIndex over a collection, and the nodes of modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from ragcache.db import ModuleRow
from ragcache.errors import InvalidRequest
from ragcache.params import SearchParams
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.retrieval import Selection

_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
    FilterOperator.CONTAINS: "$eq",  # a list equals each value that it contains
    FilterOperator.ANY: "$in",
}
_OWN = ("document", "module", "uri")
"""Metadata that nodes of modules have in addition to the document's."""


class RagCacheNodeRetriever(BaseRetriever):
    """A retriever of a collection's modules as nodes.

    The texts of nodes are read from their states when `RagCacheLLM` finds them in a prompt. Nodes
    have the metadata of module and document, and `document`, `module` and `uri`, which prompts
    leave out.

    Example:
        >>> retriever = RagCacheNodeRetriever("handbook", state="state/", k=4)  # doctest: +SKIP
        >>> RetrieverQueryEngine.from_args(retriever, RagCacheLLM(state="state/"))  # doctest: +SKIP
    """

    def __init__(
        self,
        collection: str,
        *,
        rag: RagCache | None = None,
        state: str | Path | None = None,
        filters: MetadataFilters | Mapping[str, Any] | None = None,
        callback_manager: Any = None,
        **search: Any,
    ) -> None:
        """Search a collection.

        Args:
            collection: The collection.
            rag: An open `RagCache`.
            state: The state folder to open instead of `rag`, at first use.
            filters: Conditions on metadata, LlamaIndex's or ragcache's.
            callback_manager: As in LlamaIndex.
            **search: Fields of `SearchParams`, such as `k`.

        Raises:
            InvalidRequest: An option or a filter cannot be used.
        """
        converted = convert_filters(filters) if isinstance(filters, MetadataFilters) else filters
        self._params = SearchParams(**search, filters=converted)
        self._collection, self._rag, self._state = collection, rag, state
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        rag = shared_rag(self._rag, self._state)
        found = rag.retriever().retrieve(query_bundle.query_str, self._collection, self._params)
        return self._nodes(found)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        retriever = shared_rag(self._rag, self._state).retriever()
        query = query_bundle.query_str
        return self._nodes(await retriever.aretrieve(query, self._collection, self._params))

    def _nodes(self, found: Selection) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=module_node(self._collection, hit.module), score=hit.score)
            for hit in found.hits
        ]


def module_node(collection: str, module: ModuleRow) -> TextNode:
    """Return the node of a module. Its source is the module's document."""
    own = {"document": module.document, "module": module.name, "uri": module.uri}
    return TextNode(
        id_=f"{collection}/{module.name}",
        text=module.text.strip(),
        metadata={**module.metadata, **own},
        excluded_llm_metadata_keys=list(_OWN),
        excluded_embed_metadata_keys=list(_OWN),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=module.document)},
    )


def convert_filters(filters: MetadataFilters) -> dict[str, Any]:
    """Return LlamaIndex's filters as filters of `SearchParams`.

    Raises:
        InvalidRequest: An operator has no counterpart.
    """
    parts = [
        convert_filters(each) if isinstance(each, MetadataFilters) else _convert_filter(each)
        for each in filters.filters
    ]
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.NOT:
        return {"$not": {"$and": parts}}
    return {"$or" if condition == FilterCondition.OR else "$and": parts}


def _convert_filter(each: MetadataFilter) -> dict[str, Any]:
    if each.operator not in _OPERATORS:
        raise InvalidRequest(
            f"the filter operator {each.operator.value!r} of LlamaIndex has no counterpart; use "
            f"one of {', '.join(operator.value for operator in _OPERATORS)}"
        )
    return {each.key: {_OPERATORS[each.operator]: each.value}}
