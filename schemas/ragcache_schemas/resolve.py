"""Resolution of prompts: states to reuse, and their positions (Prompt Cache, §3.4).

`SchemaIndex` is built once for a schema. `resolve_prompt` then touches only imported and always
included content, and returns a `Plan`.

Imported modules and anonymous text take the positions of the layout, arguments the positions of
their parameters. A run of new text starts at the end of the text before it. That text is the module
imported before it, or else the content that the schema always includes before the next imported
module. A run after the last import of its level starts after everything in that level. In the
placement "compact" the order is the same, and each piece starts at the end of the piece before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from operator import itemgetter
from typing import Literal, TypeAlias

from ragcache_schemas.errors import (
    DuplicateName,
    MissingArgument,
    PMLError,
    SpanTooLong,
    UnionConflict,
    UnknownName,
)
from ragcache_schemas.layout import CountTokens, Layout, Placement, lay_out
from ragcache_schemas.tree import (
    Arguments,
    Chat,
    Import,
    Location,
    Module,
    Node,
    Parameter,
    Path,
    Prompt,
    Role,
    Scaffold,
    Schema,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.validate import validate_schema

PieceKind: TypeAlias = Literal["module", "argument", "new"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text and its positions: `length` tokens from `start` on.

    A "module" piece has its states in the store (if `cached`). An "argument" and "new" text are
    computed. The tokens of an argument take the first of its parameter's `reserved` positions. The
    states of the placeholder are never used (§3.3).
    """

    kind: PieceKind
    path: Path
    """Path of the piece. `path[:-1]` is the module that it is encoded with."""
    text: str
    start: int
    length: int
    canonical: int
    """First position in the encoding. The states move by `start - canonical`."""
    role: Role | None = None
    cached: bool = False
    reserved: int = 0
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt resolved against its schema."""

    schema: str
    placement: Placement
    modules: tuple[Path, ...]
    """Paths of the imported modules, in the order of positions."""
    pieces: tuple[Piece, ...]
    """All text of the prompt, including anonymous text of the schema, in the order of positions."""
    scaffolds: tuple[Scaffold, ...]
    """Scaffolds whose modules are all imported. Their states override the single ones (§3.3)."""
    length: int
    """First position after the prompt."""
    crowded: tuple[Piece, ...] = ()
    """New texts with more tokens than free positions before the next module, with which they share
    positions. The paper assumes gaps there. A parameter makes a gap, and the placement "compact"
    never crowds."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens whose states are reused."""
        return sum(piece.length for piece in self.pieces if piece.cached)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens whose states are computed for this prompt."""
        return sum(piece.length for piece in self.pieces if not piece.cached)


ModuleLookup: TypeAlias = Callable[[str, str], Module | None]
"""Finds a module by collection and name. Returns None without such a module."""

TreeOrder: TypeAlias = tuple[int, ...]
"""Place of a node in document order: the numbers of child, grandchild, ..."""


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """The schema or one module: its own content, and the modules that may be imported in it."""

    path: Path
    place: TreeOrder
    texts: tuple[tuple[TreeOrder, Piece], ...]
    """Its own texts, as pieces of a plan."""
    parameters: Mapping[str, tuple[TreeOrder, Piece]]
    """Its own parameters, as pieces without their arguments. The text of such a piece is the
    scaffold."""
    children: Mapping[str, Scope]
    union: TreeOrder | None = None
    """Place of the union that it is a member of, if any."""
    slot: Slot | None = None
    role: Role | None = None
    """Turn that it is in, if any."""
    stand_ins: tuple[tuple[TreeOrder, Piece], ...] = ()
    """Texts that fill its unions while its own states are encoded (`scaffold=`)."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemaIndex:
    """A schema with its layout and its scopes, made by `SchemaIndex.build`."""

    schema: Schema
    layout: Layout
    root: Scope
    count_tokens: CountTokens = field(repr=False)
    lookup: ModuleLookup | None = field(default=None, repr=False)

    @classmethod
    def build(
        cls,
        schema: Schema,
        count_tokens: CountTokens,
        placement: Placement = "schema",
        *,
        lookup: ModuleLookup | None = None,
    ) -> SchemaIndex:
        """Validate, lay out and index a schema, in time linear in its size.

        Args:
            schema: The schema, its turns rendered (`render_schema_turns`).
            count_tokens: Function from a text to its number of tokens, without special tokens.
            placement: "schema" for the paper's fixed positions, "compact" without gaps.
            lookup: Finds the modules that prompts import through slots.

        Raises:
            PMLError: The schema's first problem.
        """
        validate_schema(schema)
        layout = lay_out(schema, count_tokens, placement)
        root = _Scopes(layout).scope((), (), schema.children, cache=True)
        return cls(schema, layout, root, count_tokens, lookup)

    def find_scope(self, scope: Scope, name: str) -> Scope | None:
        """Return the module `name` in `scope`. Looks it up if `scope` is a slot."""
        if scope.slot is None:
            return scope.children.get(name)
        module = self.lookup(scope.slot.collection, name) if self.lookup else None
        if module is None:
            return None
        wrapped = Schema(self.schema.name, (replace(module, name=name),))
        layout = lay_out(wrapped, self.count_tokens, self.layout.placement)
        span = self.layout[scope.path]
        if self.layout.placement == "schema" and layout.length:
            problem = f"the module {name!r} has no room: slots take no fixed positions"
            expected = "build the index with the placement 'compact'"
            raise SpanTooLong(problem, module.location, name, expected)
        scopes = _Scopes(layout, scope.path, span.start)
        slot = scopes.scope((), scope.place, wrapped.children, cache=True, role=scope.role)
        return replace(slot.children[name], union=scope.place)


class _Scopes:
    """Makes scopes from a tree and its layout. `base` and `start` place content of a slot."""

    def __init__(self, layout: Layout, base: Path = (), start: int = 0) -> None:
        self.layout, self.base, self.start = layout, base, start

    def scope(
        self,
        path: Path,
        place: TreeOrder,
        nodes: Sequence[Node],
        *,
        cache: bool,
        union: TreeOrder | None = None,
        role: Role | None = None,
    ) -> Scope:
        texts: list[tuple[TreeOrder, Piece]] = []
        parameters: dict[str, tuple[TreeOrder, Piece]] = {}
        children: dict[str, Scope] = {}
        stand_ins: list[tuple[TreeOrder, Piece]] = []

        def walk(nodes: Sequence[Node], place: TreeOrder, role: Role | None) -> None:
            for number, node in enumerate(nodes):
                at = (*place, number)
                match node:
                    case Text():
                        own = (*path, f"#{len(texts)}")
                        texts.append((at, self._piece("module", own, node.text, role, cache)))
                    case Parameter():
                        own = (*path, "@" + node.name)
                        piece = self._piece("argument", own, node.scaffold or "", role, False)
                        parameters[node.name] = (at, piece)
                    case Chat():
                        walk(node.children, at, node.role)
                    case Module():
                        children[node.name] = self._module(path, at, node, None, role)
                    case Union():
                        for member_number, member in enumerate(node.members):
                            inner = self._module(path, (*at, member_number), member, at, role)
                            children[member.name] = inner
                        if node.scaffold is not None and node.members:
                            names = [member.name for member in node.members]
                            # An unknown name is a warning; the first member stands in (lint).
                            name = node.scaffold if node.scaffold in names else names[0]
                            stand_ins.extend(children[name].texts)
                    case Slot():
                        inside = (*self.base, *path, node.scope)
                        children[node.scope] = Scope(inside, at, (), {}, {}, None, node, role)

        walk(nodes, place, role)
        own_path = (*self.base, *path)
        return Scope(
            own_path,
            place,
            tuple(texts),
            parameters,
            children,
            union,
            role=role,
            stand_ins=tuple(stand_ins),
        )

    def _module(
        self, path: Path, at: TreeOrder, node: Module, union: TreeOrder | None, role: Role | None
    ) -> Scope:
        inner = (*path, node.name)
        return self.scope(inner, at, node.children, cache=node.cache, union=union, role=role)

    def _piece(
        self, kind: PieceKind, path: Path, text: str, role: Role | None, cached: bool
    ) -> Piece:
        span = self.layout[path]
        start = self.start + span.start
        length, reserved = (span.length, 0) if kind == "module" else (0, span.length)
        whole = (*self.base, *path)
        return Piece(kind, whole, text, start, length, start, role, cached, reserved)


_END = 1 << 60  # place after all children
_Entry: TypeAlias = tuple[TreeOrder, Piece]


def resolve_prompt(index: SchemaIndex, prompt: Prompt) -> Plan:
    """Resolve a prompt against its schema.

    Takes time in the size of the prompt and of the always included text, not of the schema.

    Raises:
        PMLError: The prompt does not fit the schema; with its place in the prompt.
    """
    if prompt.schema != index.schema.name:
        problem = f"the prompt is for the schema {prompt.schema!r}"
        expected = f"this schema is called {index.schema.name!r}"
        raise UnknownName(problem, prompt.location, "prompt", expected)
    resolution = _Resolution(index)
    resolution.scope(index.root, prompt)
    return resolution.plan()


class _Resolution:
    def __init__(self, index: SchemaIndex) -> None:
        self.index = index
        self.entries: list[_Entry] = list(index.root.texts)
        self.modules: list[tuple[TreeOrder, Path]] = []
        self.new: list[TreeOrder] = []

    def scope(self, scope: Scope, node: Prompt | Import) -> None:
        """Include one module, or the schema."""
        self._arguments(scope, node.arguments, node.location)
        items = _flat(node.children, None)
        found = self._imports(scope, [item for item, _ in items])
        after: list[Scope | None] = [None]
        for module in reversed(found):
            after.append(module or after[-1])
        before: Scope | None = None
        for (item, role), module, following in zip(items, found, reversed(after[1:]), strict=True):
            if isinstance(item, Text):
                self._new(scope, before, following, item, role)
            elif module is not None:
                before = module
                for entry in module.texts:
                    self._insert(entry)
                if module.slot is None:
                    self.modules.append((module.place, module.path))
                self.scope(module, item)

    def _imports(self, scope: Scope, nodes: Sequence[Import | Text]) -> list[Scope | None]:
        found: list[Scope | None] = []
        names: set[str] = set()
        unions: dict[TreeOrder, str] = {}
        for node in nodes:
            if isinstance(node, Text):
                found.append(None)
                continue
            module = self.index.find_scope(scope, node.name)
            if module is None:
                raise self._unknown_module(scope, node)
            if node.name in names:
                problem = f"the module {node.name!r} is imported twice"
                raise DuplicateName(problem, node.location, node.name, "import it once")
            names.add(node.name)
            if module.union is not None:
                other = unions.setdefault(module.union, node.name)
                if other != node.name:
                    problem = f"{other!r} and {node.name!r} are members of one union"
                    expected = "import one of them"
                    raise UnionConflict(problem, node.location, node.name, expected)
            found.append(module)
        return found

    def _arguments(self, scope: Scope, arguments: Arguments, location: Location | None) -> None:
        element = scope.path[-1] if scope.path else "prompt"
        given: set[str] = set()
        for name, value in arguments:
            if name not in scope.parameters:
                problem = f"{_called(scope)} has no parameter {name!r}"
                raise UnknownName(problem, location, element, _known(name, scope.parameters))
            if name in given:
                problem = f"the argument {name!r} is given twice"
                raise DuplicateName(problem, location, element, "give it once")
            given.add(name)
            place, piece = scope.parameters[name]
            length = self.index.count_tokens(value) if value else 0
            if length > piece.reserved:
                problem = (
                    f"the argument {name!r} of {_called(scope)} is {length} tokens long, "
                    f"the parameter {piece.reserved}"
                )
                expected = f"shorten it to {piece.reserved} tokens"
                raise SpanTooLong(problem, location, element, expected)
            self._insert((place, replace(piece, text=value, length=length, location=location)))
        missing = [name for name in scope.parameters if name not in given]
        if missing:
            names = " and ".join(repr(name) for name in missing)
            problem = f"{_called(scope)} needs an argument for {names}"
            expected = f'write <{element} {missing[0]}="...">, with "" for none'
            raise MissingArgument(problem, location, element, expected)

    def _new(
        self, scope: Scope, before: Scope | None, after: Scope | None, node: Text, role: Role | None
    ) -> None:
        if after is None:
            place = (*scope.place, _END)
        elif before is not None:
            place = (*before.place, _END)
        else:
            place = (*after.place[:-1], after.place[-1] - 1, _END)
        length = self.index.count_tokens(node.text)
        path = (*scope.path, f"+{len(self.new)}")
        piece = Piece("new", path, node.text, 0, length, 0, role, location=node.location)
        place = (*place, len(self.new))
        self.new.append(place)
        self._insert((place, piece))

    def _insert(self, entry: _Entry) -> None:
        insort(self.entries, entry, key=itemgetter(0))

    def _unknown_module(self, scope: Scope, node: Import) -> PMLError:
        if scope.slot is not None:
            problem = f"the collection {scope.slot.collection!r} has no module {node.name!r}"
            if self.index.lookup is None:
                problem = "the index was built without a lookup, which slots need"
            expected = "ingest the document first, or check its name"
            return UnknownName(problem, node.location, node.name, expected)
        problem = f"{_called(scope)} has no module {node.name!r}"
        return UnknownName(problem, node.location, node.name, _known(node.name, scope.children))

    def plan(self) -> Plan:
        """Give every piece its positions."""
        layout = self.index.layout
        crowded = self._close_up() if layout.placement == "compact" else self._fill_gaps()
        pieces = tuple(piece for _, piece in self.entries)
        modules = tuple(path for _, path in sorted(self.modules))
        listed, included = self.index.schema.scaffolds, set(modules)
        scaffolds = tuple(each for each in listed if included.issuperset(each.modules))
        length = max((piece.end for piece in (*pieces[-1:], *crowded)), default=0)
        name = self.index.schema.name
        return Plan(name, layout.placement, modules, pieces, scaffolds, length, tuple(crowded))

    def _close_up(self) -> list[Piece]:
        position = 0
        for number, (place, piece) in enumerate(self.entries):
            canonical = position if piece.kind == "new" else piece.canonical
            self.entries[number] = (place, replace(piece, start=position, canonical=canonical))
            position += piece.length
        return []

    def _fill_gaps(self) -> list[Piece]:
        """Place the new texts. All other pieces have the positions of the layout."""
        crowded: list[Piece] = []
        position = 0  # end of the new texts so far
        for place in sorted(self.new):
            number = bisect_left(self.entries, place, key=itemgetter(0))
            if number:
                position = max(position, self.entries[number - 1][1].end)
            piece = replace(self.entries[number][1], start=position, canonical=position)
            self.entries[number] = (place, piece)
            position = piece.end
            number += 1
            while number < len(self.entries) and self.entries[number][1].kind == "new":
                number += 1
            if number < len(self.entries) and self.entries[number][1].start < position:
                crowded.append(piece)
        return crowded


def _flat(nodes: Sequence[object], role: Role | None) -> list[tuple[Import | Text, Role | None]]:
    """Return the imports and texts of one level, each with its turn."""
    out: list[tuple[Import | Text, Role | None]] = []
    for node in nodes:
        if isinstance(node, Chat):
            out += _flat(node.children, node.role)
        elif isinstance(node, Import | Text):
            out.append((node, role))
    return out


def _called(scope: Scope) -> str:
    return f"the module {'/'.join(scope.path)!r}" if scope.path else "the schema"


def _known(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if near := get_close_matches(name, names, n=1):
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there are none"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"there are: {', '.join(names[:8])}{more}"
