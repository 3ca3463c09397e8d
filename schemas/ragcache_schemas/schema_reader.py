"""Reads schemas: from the elements of a document to the tree (Prompt Cache, §3.2)."""

from __future__ import annotations

import re
from typing import cast

from .document import Element
from .errors import InvalidAttribute, MisplacedText, PMLWarning
from .names import ROLES
from .reader import Reader
from .scanner import Tag
from .tree import Module, Parameter, Role, Scaffold, Schema, SchemaNode, Slot, Text, Union

__all__ = ["SchemaReader"]

_LENGTH = re.compile(r"0*[1-9][0-9]{0,6}")


class SchemaReader(Reader[SchemaNode]):
    """Builds one Schema."""

    def schema(self) -> Schema:
        """The tree of the document, whose root must be <schema>."""
        tag = self.next_tag()
        self._scaffolds: list[Scaffold] = []
        if self.root.tag != "schema":
            expected = 'a schema begins with <schema name="...">'
            self.report(self.misplaced(self.root, tag, expected))
        name = self.attributes(self.root, tag, ("name",)).get("name", self.unnamed(tag))
        nodes = self.children(self.root, tag, self._top)
        return Schema(name, tuple(nodes), tuple(self._scaffolds), location=tag.location)

    def _top(self, element: Element, tag: Tag) -> SchemaNode | None:
        if element.tag == "scaffold":
            self._scaffolds.append(self._scaffold(element, tag))
            return None
        return self._node(element, tag)

    def _node(self, element: Element, tag: Tag) -> SchemaNode | None:
        match element.tag:
            case "module":
                return self._module(element, tag)
            case "union":
                return self._union(element, tag)
            case "param" | "parameter":
                return self._parameter(element, tag)
            case role if role in ROLES:
                return self.chat(element, tag, cast("Role", role), self._node)
            case "scaffold":
                expected = "put it directly inside <schema>"
                self.report(self.misplaced(element, tag, expected))
            case _:
                self.report(self.misplaced(element, tag))
        self.pass_over(element, tag)
        return None

    def _module(self, element: Element, tag: Tag) -> Module:
        found = self.attributes(element, tag, ("name",), optional=("cache",))
        cache = self._flag(found, "cache", tag, "true", "false")
        nodes = self.children(element, tag, self._node)
        name = found.get("name", self.unnamed(tag))
        return Module(name, tuple(nodes), cache=cache, location=tag.location)

    def _parameter(self, element: Element, tag: Tag) -> Parameter | None:
        known = ("len", "length", "scaffold")
        found = self.attributes(element, tag, ("name",), optional=known)
        self.no_children(element, tag)
        lengths = [found[name] for name in ("len", "length") if name in found]
        if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
            given = " and ".join(f'"{length}"' for length in lengths) or "none"
            problem = f"<{tag.name}> needs one length in tokens, and has {given}"
            expected = 'write len="N" with N from 1 to 9999999'
            self.report(InvalidAttribute(problem, tag.location, tag.name, expected))
            return None
        name, scaffold = found.get("name", self.unnamed(tag)), found.get("scaffold")
        return Parameter(name, int(lengths[0]), scaffold, location=tag.location)

    def _union(self, element: Element, tag: Tag) -> Union | Slot:
        if "slot" in element.attrib or "collection" in element.attrib:
            found = self.attributes(element, tag, ("slot", "collection"))
            self.no_children(element, tag)
            slot, collection = found.get("slot", ""), found.get("collection", "")
            return Slot(slot, collection, location=tag.location)
        scaffold = self.attributes(element, tag, optional=("scaffold",)).get("scaffold")
        members: list[Module] = []
        for node in self.children(element, tag, self._member):
            if isinstance(node, Module):
                members.append(node)
            elif isinstance(node, Text) and node.text.strip():
                expected = "put it into one of the modules, or outside the union"
                problem = "text directly inside <union>"
                self.report(MisplacedText(problem, node.location, "union", expected))
        if scaffold is not None and all(scaffold != member.name for member in members):
            problem = f"scaffold={scaffold!r} names no member of this union; the first stands in"
            self.warn(PMLWarning(problem, tag.location))
            scaffold = None
        return Union(tuple(members), scaffold, location=tag.location)

    def _member(self, element: Element, tag: Tag) -> Module | None:
        if element.tag == "module":
            return self._module(element, tag)
        self.report(self.misplaced(element, tag, "only <module> may stand directly in a union"))
        self.pass_over(element, tag)
        return None

    def _scaffold(self, element: Element, tag: Tag) -> Scaffold:
        paths = self.attributes(element, tag, ("modules",)).get("modules", "")
        self.no_children(element, tag)
        return Scaffold(tuple(tuple(p.split("/")) for p in paths.split()), location=tag.location)
