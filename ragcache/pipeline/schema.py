"""The schema that a collection stands for: preamble, slot unions, question."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.models import PromptFrame
from ragcache.store import ModuleRow
from ragcache_schemas import (
    Module,
    Schema,
    collection_schema,
    document_module,
    module_name,
    module_names,
)


def generated_schema(collection: str, frame: PromptFrame, slots: int) -> Schema:
    """The union schema of a collection. Its slots draw on the catalogue; see `members`."""
    return collection_schema(
        module_name(collection),
        frame.preamble,
        slots,
        collection,
        question_lead=frame.question,
        epilogue=frame.epilogue,
    )


def members(modules: Sequence[ModuleRow]) -> list[Module]:
    """The collection's documents as modules, their parts nested in them."""
    by_document: dict[str, list[str]] = {}
    for module in modules:
        by_document.setdefault(module.document, []).append(module.text)
    names = module_names(by_document)
    return [document_module(names[name], texts) for name, texts in by_document.items()]
