"""Reads prompts: from the elements of a document to the tree (Prompt Cache, §3.2.1)."""

from __future__ import annotations

from typing import cast

from .document import Element
from .names import RESERVED, ROLES
from .reader import Reader, spelled
from .scanner import Tag
from .tree import Import, Prompt, PromptNode, Role

__all__ = ["PromptReader"]


class PromptReader(Reader[PromptNode]):
    """Builds one Prompt."""

    def prompt(self) -> Prompt:
        """The tree of the document, whose root must be <prompt>."""
        tag = self.next_tag()
        if self.root.tag != "prompt":
            expected = 'a prompt begins with <prompt schema="...">'
            self.report(self.misplaced(self.root, tag, expected))
        self.attributes(self.root, tag, ("schema",), optional=tuple(spelled(self.root)))
        arguments = spelled(self.root)
        schema = arguments.pop("schema", self.unnamed(tag))
        nodes = self.children(self.root, tag, self._node)
        return Prompt(schema, tuple(nodes), tuple(arguments.items()), location=tag.location)

    def _node(self, element: Element, tag: Tag) -> PromptNode | None:
        if element.tag in ROLES:
            return self.chat(element, tag, cast("Role", element.tag), self._node)
        if element.tag in RESERVED:
            expected = "a prompt imports a module by its own name, as in <miami/>"
            self.report(self.misplaced(element, tag, expected))
            self.pass_over(element, tag)
            return None
        nodes = self.children(element, tag, self._node)
        arguments = tuple(spelled(element).items())
        return Import(tag.name, arguments, tuple(nodes), location=tag.location)
