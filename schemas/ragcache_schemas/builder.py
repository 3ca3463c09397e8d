"""Schemas of collections.

A collection becomes a schema of a preamble, k slots and the question. Each slot is a union whose
members are all modules of the collection, so that any k documents may be imported in any order. The
members are looked up; only `expand_slots` writes them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragcache_schemas.errors import InvalidAttribute, InvalidName, UnknownName
from ragcache_schemas.text import name_problem
from ragcache_schemas.tree import (
    Chat,
    Module,
    Node,
    Parameter,
    Schema,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.validate import validate_schema

QUESTION_TOKENS = 512
"""Maximum tokens of a question."""


def collection_schema(
    name: str,
    preamble: str,
    slots: int,
    collection: str,
    *,
    question_lead: str = "",
    epilogue: str = "",
) -> Schema:
    """Make the schema of a collection: preamble, slots, the parameter `question`, epilogue.

    The texts are usually the model's chat template, cut inside the user turn.

    Args:
        name: Name of the schema.
        preamble: Text before the slots.
        slots: Number of slots.
        collection: Collection whose modules fill the slots.
        question_lead: Text between slots and question.
        epilogue: Text after the question.

    Raises:
        PMLError: There is no slot, or a name is invalid.
    """
    if slots < 1:
        raise InvalidAttribute(f"{slots} slots", expected="give 1 or more")
    between = (Slot(str(number + 1), collection) for number in range(slots))
    question = (Text(question_lead), Parameter("question", QUESTION_TOKENS))
    return validate_schema(Schema(name, (Text(preamble), *between, *question, Text(epilogue))))


def document_module(name: str, chunks: Iterable[str]) -> Module:
    """Make the module of a document, with its chunks as nested modules.

    Args:
        name: Name of the module, as from `module_name(title)`.
        chunks: Texts of the chunks, which are named "c1", "c2", ... in order.

    Raises:
        InvalidName: `name` is no module name.
    """
    if problem := name_problem(name, "module"):
        raise InvalidName(problem.problem, expected=f"{problem.expected}; module_name() makes one")
    parts = (Module(f"c{number}", (Text(chunk),)) for number, chunk in enumerate(chunks, 1))
    return Module(name, tuple(parts))


def expand_slots(schema: Schema, members: Mapping[str, Sequence[Module]]) -> Schema:
    """Write out the members of every slot, from `members` by collection.

    A slot becomes a module of its scope's name ("slot-1") around a union, so that the same prompts
    fit both forms and several slots may hold the same document.

    Raises:
        UnknownName: `members` lacks a collection.
    """

    def expanded(nodes: Sequence[Node]) -> tuple[Any, ...]:
        return tuple(map(replaced, nodes))

    def replaced(node: Node) -> Node:
        match node:
            case Slot():
                return _filled(node, members)
            case Module() | Chat():
                return replace(node, children=expanded(node.children))
            case Union():
                return replace(node, members=expanded(node.members))
            case _:
                return node

    return replace(schema, children=expanded(schema.children))


def _filled(slot: Slot, members: Mapping[str, Sequence[Module]]) -> Module:
    if slot.collection not in members:
        known = ", ".join(sorted(members)) or "none"
        problem = f"no members given for the collection {slot.collection!r}"
        expected = f"the collections given are: {known}"
        raise UnknownName(problem, slot.location, "union", expected)
    union = Union(tuple(members[slot.collection]))
    return Module(slot.scope, (union,), location=slot.location)
