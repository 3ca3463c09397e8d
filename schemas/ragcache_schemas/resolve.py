"""Resolves a prompt against its schema (Prompt Cache, §3.4): what is reused, and what goes where.

Imported modules and anonymous text take the positions of the layout, arguments those of their
parameters. A run of new text starts where what stands before it ends: the module imported before
it, else what the schema always includes before the module imported after it; a run after the last
import of its level starts after everything there. In the placement "compact" the same order holds,
and each piece starts where the one before it ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from operator import itemgetter
from typing import TypeAlias

from .errors import (
    DuplicateName,
    MissingArgument,
    PMLError,
    SpanTooLong,
    UnionConflict,
    UnknownName,
)
from .index import Place, SchemaIndex, Scope
from .plan import Piece, Plan
from .tree import Arguments, Chat, Import, Location, Path, Prompt, PromptNode, Role, Text

__all__ = ["resolve_prompt"]

_END = 1 << 60  # a place after all children
_Entry: TypeAlias = tuple[Place, Piece]


def resolve_prompt(index: SchemaIndex, prompt: Prompt) -> Plan:
    """The plan of `prompt`. Raises PMLError, with the place in the prompt.

    Takes time in the size of the prompt and of the text that is always included, not of the schema.
    """
    if prompt.schema != index.schema.name:
        problem = f"the prompt is for the schema {prompt.schema!r}"
        expected = f"this schema is called {index.schema.name!r}"
        raise UnknownName(problem, prompt.location, "prompt", expected)
    resolution = _Resolution(index)
    resolution.scope(index.root, prompt.arguments, prompt.children, prompt.location)
    return resolution.plan()


class _Resolution:
    def __init__(self, index: SchemaIndex) -> None:
        self.index = index
        self.entries: list[_Entry] = list(index.root.texts)
        self.modules: list[tuple[Place, Path]] = []
        self.new: list[Place] = []

    def scope(
        self,
        scope: Scope,
        arguments: Arguments,
        children: Sequence[PromptNode],
        location: Location | None,
    ) -> None:
        """Includes one module, or the schema."""
        self._arguments(scope, arguments, location)
        items = _flat(children, None)
        found = self._imports(scope, [node for node, _ in items])
        after: list[Scope | None] = [None]
        for module in reversed(found):
            after.append(module or after[-1])
        before: Scope | None = None
        for (node, role), module, following in zip(items, found, reversed(after[1:]), strict=True):
            if isinstance(node, Text):
                self._new(scope, before, following, node, role)
            elif module is not None:
                before = module
                self._import(module, node)

    def _import(self, module: Scope, node: Import) -> None:
        for entry in module.texts:
            self._insert(entry)
        if module.slot is None:
            self.modules.append((module.place, module.path))
        self.scope(module, node.arguments, node.children, node.location)

    def _imports(self, scope: Scope, nodes: Sequence[Import | Text]) -> list[Scope | None]:
        found: list[Scope | None] = []
        names: set[str] = set()
        unions: dict[Place, str] = {}
        for node in nodes:
            if isinstance(node, Text):
                found.append(None)
                continue
            module = self.index.find(scope, node.name)
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
                raise _too_long(name, scope, length, piece.reserved, location, element)
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
            if self.index.catalogue is None:
                problem = "the index was built without a catalogue, which slots need"
            expected = "ingest the document first, or check its name"
            return UnknownName(problem, node.location, node.name, expected)
        problem = f"{_called(scope)} has no module {node.name!r}"
        return UnknownName(problem, node.location, node.name, _known(node.name, scope.children))

    def plan(self) -> Plan:
        """Gives every piece its positions."""
        layout = self.index.layout
        crowded = self._close_up() if layout.placement == "compact" else self._fill_gaps()
        pieces = tuple(piece for _, piece in self.entries)
        modules = tuple(path for _, path in sorted(self.modules))
        included = set(modules)
        scaffolds = tuple(
            scaffold
            for scaffold in self.index.schema.scaffolds
            if included.issuperset(scaffold.modules)
        )
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
        """Places the new texts; everything else stands where the layout put it."""
        crowded: list[Piece] = []
        position = 0  # where the new texts so far end
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
    """The imports and texts of one level, each with its turn."""
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


def _too_long(
    name: str, scope: Scope, length: int, limit: int, location: Location | None, element: str
) -> SpanTooLong:
    called = _called(scope)
    problem = f"the argument {name!r} of {called} is {length} tokens long, the parameter {limit}"
    return SpanTooLong(problem, location, element, f"shorten it to {limit} tokens")
