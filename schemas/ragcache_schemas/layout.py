"""Layout of a schema: positions of modules, texts and parameters (Prompt Cache, §3.3).

A module starts at its absolute location in the schema: the sum of the lengths before it. The
members of a union share their start, and the union counts with the length of its largest member. A
parameter takes as many positions as its `len`, however long its argument is.

Tokens are counted by the caller's function, once for each maximal run of text. A run is the text
between two tags in the written schema; parameters and chat tags are tags, too. Chat turns have no
positions here: render them with the model's template first (`render_schema_turns`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias

from ragcache_schemas.errors import PMLWarning
from ragcache_schemas.tree import Chat, Module, Node, Parameter, Path, Schema, Slot, Text, Union

CountTokens: TypeAlias = Callable[[str], int]
Placement: TypeAlias = Literal["schema", "compact"]


@dataclass(frozen=True, slots=True)
class PositionSpan:
    """A run of `length` positions from `start` on."""

    path: Path
    """Names from the schema down. The last one gives the kind: a module has its name; within its
    scope the n-th text is "#n", a parameter "@name", the n-th union "|n", a slot "slot-name", all
    from n = 0. Unions and turns are no part of the paths of the nodes in them."""
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Layout:
    """The spans of a schema.

    In the placement "schema" these are the paper's fixed positions. In "compact", optional content
    takes no room: each module starts at the end of the text before it that is always included, as
    if no other module were imported, and its length counts only its own text and parameters. It is
    encoded at these positions, and a prompt moves it from there.
    """

    spans: tuple[PositionSpan, ...]
    """Spans in the order of the schema's text."""
    length: int
    """Length of the schema in positions."""
    placement: Placement = "schema"
    _by_path: dict[Path, PositionSpan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_path", {span.path: span for span in self.spans})

    def __getitem__(self, path: Path | str) -> PositionSpan:
        """Return the span at `path`. "plan/miami" is short for ("plan", "miami")."""
        return self._by_path[tuple(path.split("/")) if isinstance(path, str) else path]


def lay_out(schema: Schema, count_tokens: CountTokens, placement: Placement = "schema") -> Layout:
    """Lay out a schema, in time linear in its size.

    Args:
        schema: The schema.
        count_tokens: Function from a text to its number of tokens, without special tokens.
        placement: "schema" for the paper's fixed positions, "compact" without gaps.

    Warns:
        PMLWarning: The scaffold text of a parameter does not fit. As in the reference
            implementation, only the part that fits is encoded.

    Example:
        >>> schema = Schema("s", (Text("Be brief."), Module("tone", (Text("Kindly."),))))
        >>> lay_out(schema, lambda text: len(text.split()))["tone"].start
        2
    """
    walk = _Walk(count_tokens, placement == "compact")
    length = walk.scope((), schema.children, 0)
    return Layout(tuple(walk.spans), length, placement)


class _Walk:
    def __init__(self, count_tokens: CountTokens, compact: bool) -> None:
        self.count_tokens = count_tokens
        self.compact = compact
        self.spans: list[PositionSpan] = []

    def scope(self, path: Path, children: Sequence[Node], start: int) -> int:
        """Lay out the content of one module or schema. Returns its end."""
        return self._content(path, children, start, {"#": count(), "|": count()})

    def _content(
        self, path: Path, children: Sequence[Node], start: int, numbers: dict[str, Iterator[int]]
    ) -> int:
        for node in children:
            match node:
                case Text():
                    length = self.count_tokens(node.text)
                    start = self._span((*path, f"#{next(numbers['#'])}"), start, length)
                case Parameter():
                    start = self._span((*path, "@" + node.name), start, self._parameter(node))
                case Chat():
                    start = self._content(path, node.children, start, numbers)
                case Module() | Union():
                    name = f"|{next(numbers['|'])}" if isinstance(node, Union) else node.name
                    end = self._nested((*path, name), path, node, start)
                    start = start if self.compact else end
                case Slot():
                    start = self._span((*path, node.scope), start, 0)
        return start

    def _span(self, path: Path, start: int, length: int) -> int:
        self.spans.append(PositionSpan(path, start, length))
        return start + length

    def _parameter(self, node: Parameter) -> int:
        if node.scaffold is not None:
            length = self.count_tokens(node.scaffold)
            if length > node.length:
                warnings.warn(
                    PMLWarning(
                        f"the scaffold of the parameter {node.name!r} is {length} tokens long, "
                        f"and the parameter holds {node.length}: the rest of it is not encoded; "
                        f'shorten the scaffold, or write len="{length}"',
                        node.location,
                    ),
                    stacklevel=2,
                )
        return node.length

    def _nested(self, own: Path, outer: Path, node: Module | Union, start: int) -> int:
        """Lay out a module, or the members of a union, which share their start.

        `outer` is the path of the scope that the members belong to.
        """
        index = len(self.spans)
        self._span(own, start, 0)
        if isinstance(node, Module):
            end = self.scope(own, node.children, start)
        else:
            ends = (self._nested((*outer, m.name), outer, m, start) for m in node.members)
            end = max(ends, default=start)
        self.spans[index] = PositionSpan(own, start, end - start)
        return end
