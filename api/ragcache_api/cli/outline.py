"""A schema as a tree, with the positions and the tokens of everything in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text as Styled

from ragcache_api.schema_tree import SchemaNode, schema_nodes
from ragcache_schemas import Layout, Module, Parameter, PositionSpan, Schema, Slot, Text, Union

_STYLES = {"module": "bold", "union": "cyan", "param": "green", "slot": "cyan", "text": ""}
_WHITE = re.compile(r"\s+")
_PREVIEW = 200
_SHORTEST = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One line: the lines of the tree before it, what it is, where it stands, how it begins."""

    guide: str
    kind: str
    name: str
    span: PositionSpan
    preview: str = ""


def outline(schema: Schema, layout: Layout) -> list[Row]:
    """The rows of `schema`, whose spans are those of `layout`."""
    return list(_rows(schema_nodes(schema, layout), ""))


def _rows(nodes: Sequence[SchemaNode], guide: str) -> Iterator[Row]:
    for number, node in enumerate(nodes):
        last = number == len(nodes) - 1
        here, below = guide + ("└── " if last else "├── "), guide + ("    " if last else "│   ")
        match node.part:
            case Text(text=text):
                yield Row(here, node.kind, "", node.span, _WHITE.sub(" ", text[:_PREVIEW]))
            case Parameter(name=name):
                yield Row(here, node.kind, name, node.span, node.part.scaffold or "")
            case Slot(name=name, collection=collection):
                yield Row(here, node.kind, name, node.span, f"of the collection {collection}")
            case Union(members=members):
                yield Row(here, node.kind, f"of {len(members)}", node.span)
                yield from _rows(node.children, below)
            case Module(name=name, children=(Text(text=text),)):
                yield Row(here, node.kind, name, node.span, _WHITE.sub(" ", text[:_PREVIEW]))
            case Module(name=name, cache=cache):
                yield Row(here, node.kind, name, node.span, "" if cache else "not cached")
                yield from _rows(node.children, below)


def outline_lines(
    schema: Schema,
    layout: Layout,
    shown: Callable[[str], str] = lambda text: text,
    *,
    width: int = 100,
) -> Iterator[Styled]:
    """The outline as lines of about `width`; `shown` makes the text of a preview readable."""
    rows = outline(schema, layout)
    modules = sum(row.kind == "module" for row in rows)
    title = f"{schema.name} ({modules} modules)"
    widest = max(len(title), *(len(_what(row)) for row in rows)) if rows else len(title)
    room = max(_SHORTEST, width - widest - 28)
    yield Styled(f"{title:<{widest}}  {'positions':>13}  {'tokens':>7}  text", "bold")
    for row in rows:
        what = _what(row)
        what.pad_right(widest - len(what))
        tokens = f"≤ {row.span.length:,}" if row.kind == "param" else f"{row.span.length:,}"
        numbers = f"  {_positions(row.span):>13}  {tokens:>7}  "
        preview = shown(row.preview)
        short = preview if len(preview) <= room else preview[: room - 1] + "…"
        yield Styled.assemble(what, numbers, (short, "dim"))
    for scaffold in schema.scaffolds:
        paths = " ".join("/".join(path) for path in scaffold.modules)
        yield Styled.assemble(("scaffold ", "magenta"), paths)
    total = f"{'in all':<{widest}}  {'':>13}  {layout.length:>7,}  "
    yield Styled.assemble((total, "bold"), (_note(layout), "dim"))


def _what(row: Row) -> Styled:
    name = f" {row.name}" if row.name else ""
    return Styled.assemble((row.guide, "dim"), (row.kind, _STYLES[row.kind]), (name, "bold"))


def _positions(span: PositionSpan) -> str:
    return f"{span.start:,}–{span.end - 1:,}" if span.length else f"{span.start:,}"


def _note(layout: Layout) -> str:
    if layout.placement == "compact":
        return "what a prompt always holds; modules close up behind it"
    return "unions count with their longest member"
