"""A schema as a tree of nodes with their spans, and that tree as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_schemas import (
    Chat,
    Layout,
    Module,
    Parameter,
    PositionSpan,
    Schema,
    Slot,
    Text,
    Union,
)

PREVIEW, MOST = 80, 500  # characters of a text; children of one node
_KINDS = {Text: "text", Parameter: "param", Slot: "slot", Union: "union", Module: "module"}


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A part of a schema, with its span and the parts inside."""

    part: Text | Parameter | Slot | Union | Module
    kind: str
    span: PositionSpan
    children: tuple[SchemaNode, ...]


def schema_nodes(schema: Schema, layout: Layout) -> tuple[SchemaNode, ...]:
    """The nodes of a schema, in its order. layout: of the same schema. Turns of a chat, which have
    no span, are replaced by their children."""
    return _nodes(schema.children, iter(layout.spans))


def tree_to_dict(schema: Schema, layout: Layout) -> dict[str, Any]:
    """Name, kind, tokens and children of each node, in the schema's order. layout: of the same
    schema."""
    children = [_to_dict(node) for node in schema_nodes(schema, layout)]
    # where modules close up the layout counts no slot
    tokens = max(layout.length, sum(child["tokens"] for child in children))
    return _node_dict(schema.name, "schema", tokens, children)


def _nodes(parts: Sequence[object], spans: Iterator[PositionSpan]) -> tuple[SchemaNode, ...]:
    return tuple(_node(part, spans) for part in _flat(parts))


def _node(part: object, spans: Iterator[PositionSpan]) -> SchemaNode:
    if not isinstance(part, Text | Parameter | Slot | Union | Module):
        raise TypeError(f"a schema holds no {type(part).__name__}")
    span = next(spans)
    below = part.members if isinstance(part, Union) else getattr(part, "children", ())
    return SchemaNode(part, _KINDS[type(part)], span, _nodes(below, spans))


def _flat(parts: Sequence[object]) -> Iterator[object]:
    for part in parts:
        if isinstance(part, Chat):
            yield from _flat(part.children)
        else:
            yield part


def _to_dict(node: SchemaNode) -> dict[str, Any]:
    children = [_to_dict(child) for child in node.children]
    # where modules close up a slot has no length of its own
    below_it = [0, *(child["tokens"] for child in children)]
    tokens = node.span.length or (max(below_it) if node.kind == "union" else sum(below_it))
    return _node_dict(_name(node.part), node.kind, tokens, children)


def _node_dict(name: str, kind: str, tokens: int, children: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "tokens": tokens, "children": _at_most(children)}


def _at_most(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left = len(nodes) - MOST
    if left <= 0:
        return nodes
    return [*nodes[:MOST], {"name": f"{left:,} more", "kind": "rest", "tokens": 0, "children": []}]


def _name(part: Text | Parameter | Slot | Union | Module) -> str:
    match part:
        case Text():
            preview = " ".join(part.text.split())
            return preview if len(preview) <= PREVIEW else f"{preview[: PREVIEW - 1]}…"
        case Slot():
            return f"{part.name} of {part.collection}"
        case Union():
            return f"of {len(part.members)}"
    return part.name
