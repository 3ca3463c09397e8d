"""A schema as a tree, with the positions and the tokens of everything in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text as Styled

from ragcache_schemas import Chat, Layout, Module, Parameter, Schema, Slot, Span, Text, Union

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
    span: Span
    preview: str = ""


def outline(schema: Schema, layout: Layout) -> list[Row]:
    """The rows of `schema`, whose spans are those of `layout`."""
    return list(_rows(schema.children, iter(layout.spans), ""))


def _rows(nodes: Sequence[object], spans: Iterator[Span], guide: str) -> Iterator[Row]:
    flat = list(_flat(nodes))
    for number, node in enumerate(flat):
        last = number == len(flat) - 1
        here, below = guide + ("└── " if last else "├── "), guide + ("    " if last else "│   ")
        span = next(spans)
        match node:
            case Text():
                yield Row(here, "text", "", span, _WHITE.sub(" ", node.text[:_PREVIEW]))
            case Parameter():
                yield Row(here, "param", node.name, span, node.scaffold or "")
            case Slot():
                yield Row(here, "slot", node.name, span, f"of the collection {node.collection}")
            case Union():
                yield Row(here, "union", f"of {len(node.members)}", span)
                yield from _rows(node.members, spans, below)
            case Module(name=name, children=(Text(text=text),)):
                next(spans)  # its text, which is shown beside it
                yield Row(here, "module", name, span, _WHITE.sub(" ", text[:_PREVIEW]))
            case Module():
                yield Row(here, "module", node.name, span, "" if node.cache else "not cached")
                yield from _rows(node.children, spans, below)


def _flat(nodes: Sequence[object]) -> Iterator[object]:
    for node in nodes:
        if isinstance(node, Chat):
            yield from _flat(node.children)
        else:
            yield node


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


def _positions(span: Span) -> str:
    return f"{span.start:,}–{span.end - 1:,}" if span.length else f"{span.start:,}"


def _note(layout: Layout) -> str:
    if layout.placement == "compact":
        return "what a prompt always holds; modules close up behind it"
    return "unions count with their longest member"
