"""Hypothesis strategies for trees, and a token counter."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import ragcache_schemas as pml
from ragcache_schemas.text import RESERVED

NAMES = st.from_regex(r"\A[a-z_上下école][a-z0-9_.\-文é]{0,7}\Z").filter(
    lambda name: name not in RESERVED and not name.startswith("xml") and "slot-" not in name
)
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")
TEXTS = st.one_of(
    st.text(st.one_of(CHARACTERS, st.sampled_from("\n\t\r  <>&]\"'"))),
    st.sampled_from(
        ["", " ", "\n", "]]>", "\n  a\n    b\n", "a &amp; <b>", "\r\n x", "<!--", "x\n "]
    ),
)
LENGTHS = st.integers(1, 40)


def count_words(text: str) -> int:
    """A token counter: words."""
    return len(text.split())


@st.composite
def _scope(draw: st.DrawFn, depth: int, in_turn: bool) -> tuple[Any, ...]:
    """The children of a module or schema: names are unique within it."""
    names = iter(draw(st.lists(NAMES, max_size=8, unique=True)))
    slots = iter(range(1, 4))

    def module() -> pml.Module | None:
        name = next(names, None)
        if name is None:
            return None
        children = draw(_scope(depth - 1, in_turn)) if depth else (pml.Text(draw(TEXTS)),)
        return pml.Module(name, children, cache=draw(st.booleans()))

    def node(kind: str) -> Any:
        match kind:
            case "text":
                return pml.Text(draw(TEXTS))
            case "parameter":
                name = next(names, None)
                scaffold = draw(st.none() | TEXTS)
                return name and pml.Parameter(name, draw(LENGTHS), scaffold)
            case "module":
                return module()
            case "union":
                members = [m for m in (module() for _ in range(draw(st.integers(0, 3)))) if m]
                scaffold = draw(st.sampled_from([None, *[m.name for m in members]]))
                return pml.Union(tuple(members), scaffold)
            case _:
                number = next(slots, None)
                return number and pml.Slot(str(number), draw(NAMES))

    def content(turns: bool) -> tuple[Any, ...]:
        kinds = ["text", "text", "parameter", "module", "union", "slot"]
        out = []
        for kind in draw(st.lists(st.sampled_from(kinds + ["chat"] * turns), max_size=5)):
            if kind == "chat":
                role = draw(st.sampled_from(["system", "user", "assistant"]))
                flags = {"opens": draw(st.booleans()), "closes": draw(st.booleans())}
                out.append(pml.Chat(role, content(False), **flags))
            elif made := node(kind):
                out.append(made)
        return tuple(out)

    return content(not in_turn and depth == 2)


@st.composite
def schemas(draw: st.DrawFn) -> pml.Schema:
    """Valid schemas of every feature."""
    children = draw(_scope(2, False))
    tops = [n.name for n in children if isinstance(n, pml.Module)]
    chosen = draw(st.lists(st.sampled_from(tops), unique=True, min_size=1)) if tops else []
    scaffolds = (pml.Scaffold(tuple((name,) for name in chosen)),) if chosen else ()
    return pml.Schema(draw(NAMES), children, scaffolds)


@st.composite
def prompts(draw: st.DrawFn) -> pml.Prompt:
    """Valid prompts, of no schema in particular."""

    def arguments() -> dict[str, str]:
        names = NAMES.filter(lambda name: name != "schema")
        return draw(st.dictionaries(names, TEXTS, max_size=2))

    def nodes(depth: int, turns: bool) -> tuple[Any, ...]:
        out: list[Any] = []
        for kind in draw(st.lists(st.sampled_from(["text", "import", "chat"]), max_size=4)):
            if kind == "text":
                out.append(pml.Text(draw(TEXTS)))
            elif kind == "import" and depth:
                children = nodes(depth - 1, turns)
                out.append(pml.Import(draw(NAMES), arguments(), children))
            elif kind == "chat" and turns:
                out.append(pml.Chat("user", nodes(depth, False), opens=draw(st.booleans())))
        return tuple(out)

    return pml.Prompt(draw(NAMES), nodes(2, True), arguments())
