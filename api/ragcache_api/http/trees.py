"""A schema as a tree of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ragcache_schemas import Chat, Layout, Module, Parameter, Schema, Slot, Span, Text, Union

PREVIEW, MOST = 80, 500  # characters of a text; children of one node


def tree(schema: Schema, layout: Layout) -> dict[str, Any]:
    """name, kind, tokens and children of everything, in the order of the schema. layout: of the
    same schema."""
    children = _nodes(schema.children, iter(layout.spans))
    return {"name": schema.name, "kind": "schema", "tokens": layout.length, "children": children}


def _nodes(nodes: Sequence[object], spans: Iterator[Span]) -> list[dict[str, Any]]:
    told = [_node(node, spans) for node in _flat(nodes)]
    left = len(told) - MOST
    if left > 0:
        rest = {"name": f"{left:,} more", "kind": "rest", "tokens": 0, "children": []}
        return [*told[:MOST], rest]
    return told


def _node(node: object, spans: Iterator[Span]) -> dict[str, Any]:
    span = next(spans)
    below: Sequence[object] = ()
    match node:
        case Text():
            kind, name = "text", " ".join(node.text[:PREVIEW].split())
        case Parameter():
            kind, name = "param", node.name
        case Slot():
            kind, name = "slot", f"{node.name} of {node.collection}"
        case Union():
            kind, name, below = "union", f"of {len(node.members)}", node.members
        case Module():
            kind, name, below = "module", node.name, node.children
        case _:
            raise TypeError(f"a schema holds no {type(node).__name__}")
    children = _nodes(below, spans)
    # where modules close up a slot has no length of its own
    below_it = [0, *(child["tokens"] for child in children)]
    tokens = span.length or (max(below_it) if kind == "union" else sum(below_it))
    return {"name": name, "kind": kind, "tokens": tokens, "children": children}


def _flat(nodes: Sequence[object]) -> Iterator[object]:
    """Turns of a chat have no place of their own."""
    for node in nodes:
        if isinstance(node, Chat):
            yield from _flat(node.children)
        else:
            yield node
