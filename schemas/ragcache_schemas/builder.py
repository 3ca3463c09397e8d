"""Schemas generated from collections of documents.

A collection becomes a schema of a preamble, k slots and the question. Each slot is a union whose
members are all modules of the collection, so that any k documents may be imported in any order;
the members are looked up in a catalogue and only `expand` writes them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from .checks import schema_problems
from .errors import InvalidAttribute, InvalidName, UnknownName
from .names import name_problem
from .tree import Chat, Module, Node, Parameter, Schema, SchemaNode, Slot, Text, Union

__all__ = ["collection_schema", "document_module", "expand"]


def collection_schema(
    name: str,
    preamble: str,
    slots: int,
    collection: str,
    *,
    question_lead: str = "",
    question_length: int = 512,
    epilogue: str = "",
) -> Schema:
    """preamble, `slots` slots, question_lead, the parameter `question`, epilogue.

    The texts are usually the model's chat template, cut inside the user turn. A question of more
    than `question_length` tokens does not fit.
    """
    if slots < 1:
        raise InvalidAttribute(f"{slots} slots", expected="give 1 or more")
    schema = Schema(
        name,
        (
            Text(preamble),
            *(Slot(str(number + 1), collection) for number in range(slots)),
            Text(question_lead),
            Parameter("question", question_length),
            Text(epilogue),
        ),
    )
    return _checked(schema)


def document_module(
    name: str, chunks: Iterable[str | tuple[str, str] | Module], *, heading: str = ""
) -> Module:
    """A document as a module, with its parts as modules nested in it.

    A chunk is its text, then named "c1", "c2", ... by its place, or a pair of name and text, or a
    module. `heading` is text of the document itself, imported with any of its parts. Raises
    InvalidName where `name` is no module name: `module_name(title)` makes one.
    """
    if problem := name_problem(name, "module"):
        raise InvalidName(problem.problem, expected=f"{problem.expected}; module_name() makes one")
    parts: list[SchemaNode] = [Text(heading)]
    for number, chunk in enumerate(chunks, 1):
        match chunk:
            case Module():
                parts.append(chunk)
            case str():
                parts.append(Module(f"c{number}", (Text(chunk),)))
            case (part, text):
                parts.append(Module(part, (Text(text),)))
    module = Module(name, tuple(parts))
    _checked(Schema("document", (module,)))
    return module


def expand(schema: Schema, members: Mapping[str, Sequence[Module]]) -> Schema:
    """`schema` with the members of every slot written out, from `members` by collection.

    A slot becomes a module of its scope's name ("slot-1") around a union, so that the same prompts
    fit both forms and the same document may stand in several slots.
    """

    nodes = cast("tuple[SchemaNode, ...]", _expanded(schema.children, members))
    return replace(schema, children=nodes)


def _expanded(nodes: Sequence[Node], members: Mapping[str, Sequence[Module]]) -> tuple[Node, ...]:
    return tuple(_expanded_node(node, members) for node in nodes)


def _expanded_node(node: Node, members: Mapping[str, Sequence[Module]]) -> Node:
    match node:
        case Slot():
            return _filled(node, members)
        case Module():
            inner = cast("tuple[SchemaNode, ...]", _expanded(node.children, members))
            return replace(node, children=inner)
        case Chat():
            return replace(node, children=_expanded(node.children, members))
        case Union():
            options = cast("tuple[Module, ...]", _expanded(node.members, members))
            return replace(node, members=options)
        case _:
            return node


def _filled(slot: Slot, members: Mapping[str, Sequence[Module]]) -> Module:
    if slot.collection not in members:
        known = ", ".join(sorted(members)) or "none"
        problem = f"no members given for the collection {slot.collection!r}"
        expected = f"the collections given are: {known}"
        raise UnknownName(problem, slot.location, "union", expected)
    union = Union(tuple(members[slot.collection]))
    return Module(slot.scope, (union,), location=slot.location)


def _checked(schema: Schema) -> Schema:
    for problem in schema_problems(schema):
        raise problem
    return schema
