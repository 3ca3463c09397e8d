"""The syntax tree of PML (Prompt Cache, §3.2): the nodes of schemas and prompts.

Nodes are frozen and compare by content, without their place in the file. Neighboring texts are
joined and empty ones dropped, so that a tree equals the result of parsing its written form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, TypeAlias, TypeVar

Path: TypeAlias = tuple[str, ...]
"""Names from the schema down to a module. The schema itself is ()."""

Role: TypeAlias = Literal["system", "user", "assistant"]
Arguments: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file. Line and column count from 1, the column in characters."""

    line: int
    column: int
    source: str = "<string>"

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Text:
    """A text. In a schema it is always included, as an anonymous module (§3.2.1)."""

    text: str
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`<param name len scaffold>`: a named placeholder (§3.2.2)."""

    name: str
    length: int
    """Length in tokens."""
    scaffold: str | None = None
    """Text in its place while the module is encoded. Defaults to `length` placeholder tokens."""
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Module:
    """`<module name>`: text that a prompt may import, with nested modules (§3.2.3)."""

    name: str
    children: tuple[SchemaNode, ...] = ()
    cache: bool = field(default=True, kw_only=True)
    """Whether states are kept. If not, they are computed for every prompt."""
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", _joined(self.children))


@dataclass(frozen=True, slots=True)
class Union:
    """`<union scaffold>`: modules of which a prompt imports at most one (§3.2.3).

    The members share their start.
    """

    members: tuple[Module, ...] = ()
    scaffold: str | None = None
    """Member that is included while a module around the union is encoded. No member by default."""
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))


@dataclass(frozen=True, slots=True)
class Slot:
    """`<union slot="1" collection="handbook"/>`: a union of all modules of a collection.

    The members are looked up (`ModuleLookup`) and not written out. A slot is a scope of its own,
    called "slot-1", so that one document may be imported through any slot:
    `<slot-1><leave/></slot-1>`.
    """

    name: str
    collection: str
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def scope(self) -> str:
        """Name under which a prompt imports from this slot."""
        return f"slot-{self.name}"


@dataclass(frozen=True, slots=True)
class Chat:
    """`<system>`, `<user>` or `<assistant>`: one turn of the conversation (§3.2.3).

    The model's chat template writes it (`render_schema_turns`). A schema may leave its last turn
    open (`closes=False`). The prompt then continues the turn and ends it (`opens=False`).
    """

    role: Role
    children: tuple[Node, ...] = ()
    opens: bool = field(default=True, kw_only=True)
    closes: bool = field(default=True, kw_only=True)
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", _joined(self.children))


@dataclass(frozen=True, slots=True)
class Scaffold:
    """`<scaffold modules="a b/c">`: modules encoded together, in addition to singly (§3.3).

    Each path goes from the schema down, written with "/".
    """

    modules: tuple[Path, ...]
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(tuple(path) for path in self.modules))


@dataclass(frozen=True, slots=True)
class Schema:
    """`<schema name>`: modules, their relative positions and hierarchy (§3.2.1)."""

    name: str
    children: tuple[SchemaNode, ...] = ()
    scaffolds: tuple[Scaffold, ...] = ()
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", _joined(self.children))
        object.__setattr__(self, "scaffolds", tuple(self.scaffolds))


@dataclass(frozen=True, slots=True)
class Import:
    """`<miami days="3">` in a prompt: a module, its arguments, and nested imports.

    Text among the children is new text, computed for this prompt (§3.4).
    """

    name: str
    arguments: Arguments = ()
    children: tuple[PromptNode, ...] = ()
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", _pairs(self.arguments))
        object.__setattr__(self, "children", _joined(self.children))


@dataclass(frozen=True, slots=True)
class Prompt:
    """`<prompt schema>`: imports from a schema, and new text (§3.2.1)."""

    schema: str
    children: tuple[PromptNode, ...] = ()
    arguments: Arguments = ()
    """Arguments of parameters outside any module."""
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", _pairs(self.arguments))
        object.__setattr__(self, "children", _joined(self.children))


SchemaNode: TypeAlias = Text | Parameter | Module | Union | Slot | Chat
PromptNode: TypeAlias = Text | Import | Chat
Node: TypeAlias = SchemaNode | Import

_N = TypeVar("_N")


def _joined(nodes: Iterable[_N]) -> tuple[_N | Text, ...]:
    out: list[_N | Text] = []
    for are_texts, run in groupby(nodes, lambda node: isinstance(node, Text)):
        if not are_texts:
            out += run
        elif texts := [node for node in run if isinstance(node, Text) and node.text]:
            out.append(replace(texts[0], text="".join(text.text for text in texts)))
    return tuple(out)


def _pairs(arguments: Mapping[str, str] | Iterable[tuple[str, str]]) -> Arguments:
    items = arguments.items() if isinstance(arguments, Mapping) else arguments
    return tuple((name, value) for name, value in items)
