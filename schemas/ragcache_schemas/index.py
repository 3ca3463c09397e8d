"""A schema made ready for prompts: what each module holds, where, and what may be imported in it.

Built once for a schema; resolving a prompt then touches only what the prompt imports and what is
always included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from .checks import schema_problems
from .errors import SpanTooLong
from .layout import CountTokens, Layout, Placement, lay_out
from .plan import Piece
from .tree import Chat, Module, Node, Parameter, Path, Role, Schema, Slot, Text, Union

__all__ = ["Catalogue", "Place", "SchemaIndex", "Scope"]

Catalogue: TypeAlias = Callable[[str, str], Module | None]
"""(collection, module name) to the module; None where the collection has no such module."""

Place: TypeAlias = tuple[int, ...]
"""Where in the tree: the numbers of child, grandchild, ...; they compare as the text runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """The schema or one module: its own content, and the modules that may be imported in it.

    `texts` are its own texts, as pieces of a plan, and `parameters` its own parameters as pieces
    whose argument is still to come. `union` is the place of the union that it is a member of,
    `role` the turn that it stands in. `stand_ins` are the texts that fill its unions while its
    own states are encoded (`scaffold=`); a parameter's stand-in is the text of its piece.
    """

    path: Path
    place: Place
    texts: tuple[tuple[Place, Piece], ...]
    parameters: Mapping[str, tuple[Place, Piece]]
    children: Mapping[str, Scope]
    union: Place | None = None
    slot: Slot | None = None
    role: Role | None = None
    stand_ins: tuple[tuple[Place, Piece], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SchemaIndex:
    """A schema, its layout and its scopes. Build it with `SchemaIndex.of`."""

    schema: Schema
    layout: Layout
    root: Scope
    count_tokens: CountTokens = field(repr=False)
    catalogue: Catalogue | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        schema: Schema,
        count_tokens: CountTokens,
        placement: Placement = "schema",
        *,
        catalogue: Catalogue | None = None,
        slot_length: Callable[[Slot], int] | None = None,
    ) -> SchemaIndex:
        """Checks, lays out and indexes `schema`; linear in its size. Raises PMLError.

        `catalogue` finds the modules that prompts import through slots; `slot_length` is that of
        `lay_out`.
        """
        for problem in schema_problems(schema):
            raise problem
        layout = lay_out(schema, count_tokens, placement, slot_length=slot_length)
        root = _Scopes(layout).scope((), (), schema.children, cache=True)
        return cls(schema, layout, root, count_tokens, catalogue)

    def find(self, scope: Scope, name: str) -> Scope | None:
        """The module `name` in `scope`, through the catalogue where `scope` is a slot."""
        if scope.slot is None:
            return scope.children.get(name)
        module = self.catalogue(scope.slot.collection, name) if self.catalogue else None
        if module is None:
            return None
        alone = Schema(self.schema.name, (replace(module, name=name),))
        layout = lay_out(alone, self.count_tokens, self.layout.placement)
        span = self.layout[scope.path]
        if self.layout.placement == "schema" and layout.length > span.length:
            problem = f"the module {name!r} is {layout.length} tokens long, its slot {span.length}"
            expected = "build the index with the slot_length of the longest module, or 'compact'"
            raise SpanTooLong(problem, module.location, name, expected)
        scopes = _Scopes(layout, scope.path, span.start)
        slot = scopes.scope((), scope.place, alone.children, cache=True, role=scope.role)
        return replace(slot.children[name], union=scope.place)


class _Scopes:
    """Walks a tree beside its layout; `base` and `start` place one that fills a slot."""

    def __init__(self, layout: Layout, base: Path = (), start: int = 0) -> None:
        self.layout, self.base, self.start = layout, base, start

    def scope(
        self,
        path: Path,
        place: Place,
        nodes: Sequence[Node],
        *,
        cache: bool,
        union: Place | None = None,
        role: Role | None = None,
    ) -> Scope:
        texts: list[tuple[Place, Piece]] = []
        parameters: dict[str, tuple[Place, Piece]] = {}
        children: dict[str, Scope] = {}
        stand_ins: list[tuple[Place, Piece]] = []

        def walk(nodes: Sequence[Node], place: Place, role: Role | None) -> None:
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
        self, path: Path, at: Place, node: Module, union: Place | None, role: Role | None
    ) -> Scope:
        inner = (*path, node.name)
        return self.scope(inner, at, node.children, cache=node.cache, union=union, role=role)

    def _piece(
        self,
        kind: Literal["module", "argument"],
        path: Path,
        text: str,
        role: Role | None,
        cached: bool,
    ) -> Piece:
        span = self.layout[path]
        start = self.start + span.start
        length, reserved = (span.length, 0) if kind == "module" else (0, span.length)
        whole = (*self.base, *path)
        return Piece(kind, whole, text, start, length, start, role, cached, reserved)
