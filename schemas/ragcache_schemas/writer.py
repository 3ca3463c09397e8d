"""Writes trees as PML; lxml serializes the elements, so that text never becomes markup.

The form is stable: `parse(write(tree)) == tree`, and writing that again gives the same text.
Between elements there are line breaks and indentation where the white space rule (`text.tidy`)
drops them again; an element whose text that rule would change is written under
xml:space="preserve".
"""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from ragcache_schemas.errors import PMLSyntaxError
from ragcache_schemas.text import NOT_XML, PARAMETER, tidy
from ragcache_schemas.tree import (
    Arguments,
    Chat,
    Import,
    Module,
    Node,
    Parameter,
    Prompt,
    Scaffold,
    Schema,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.validate import prompt_problems, validate_schema

_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_INDENT = "  "


def write_schema(schema: Schema) -> str:
    """Writes a schema as PML.

    Raises:
        PMLError: The tree could not be parsed back.
    """
    validate_schema(schema)
    root = etree.Element("schema")
    _set(root, (("name", schema.name),))
    _fill(root, (*schema.children, *schema.scaffolds), 1, preserve=False)
    return etree.tostring(root, encoding="unicode") + "\n"


def write_prompt(prompt: Prompt) -> str:
    """Writes a prompt as PML.

    Raises:
        PMLError: The tree could not be parsed back.
    """
    for problem in prompt_problems(prompt):
        raise problem
    root = etree.Element("prompt")
    _set(root, (("schema", prompt.schema), *prompt.arguments))
    _fill(root, prompt.children, 1, preserve=False)
    return etree.tostring(root, encoding="unicode") + "\n"


def _fill(
    element: etree._Element, nodes: Sequence[Node | Scaffold], depth: int, *, preserve: bool
) -> None:
    """Puts `nodes` into `element`; `depth` is that of its children."""
    if not preserve and not _tidy_already(nodes):
        element.set(_SPACE, "preserve")
        preserve = True
    body = _Body(element)
    after_text = False
    for node in nodes:
        if isinstance(node, Text):
            body.append(_xml(node.text))
            after_text = True
            continue
        inline = isinstance(node, Parameter)
        if not preserve and not inline:
            body.break_line(depth, after_text)
        body.last = etree.SubElement(element, _tag(node))
        _describe(body.last, node, depth, preserve)
        after_text = inline
    if not preserve and nodes:
        body.break_line(depth - 1, after_text)


class _Body:
    """The content of an element; keeps its last child, since a search would not be linear."""

    def __init__(self, element: etree._Element) -> None:
        self.element = element
        self.last: etree._Element | None = None

    def append(self, text: str) -> None:
        if self.last is None:
            self.element.text = (self.element.text or "") + text
        else:
            self.last.tail = (self.last.tail or "") + text

    def break_line(self, depth: int, after_text: bool) -> None:
        # After text a line break may only be put where the text ends in one already: the rule
        # makes one line break of any white space with a line break in it.
        if not after_text:
            self.append("\n" + _INDENT * depth)
        else:
            text = self.element.text if self.last is None else self.last.tail
            if text and text.endswith("\n"):
                self.append(_INDENT * depth)


def _tidy_already(nodes: Sequence[Node | Scaffold]) -> bool:
    """Whether the white space rule leaves every flow in `nodes` as it is."""
    flow: list[str] = []
    for node in (*nodes, None):
        if isinstance(node, Text):
            flow.append(node.text)
        elif isinstance(node, Parameter):
            flow.append(PARAMETER)
        elif flow:
            text = "".join(flow)
            if tidy(text) != text:
                return False
            flow.clear()
    return True


def _tag(node: Node | Scaffold) -> str:
    match node:
        case Module():
            return "module"
        case Union() | Slot():
            return "union"
        case Chat():
            return node.role
        case Import():
            return node.name
        case Scaffold():
            return "scaffold"
        case _:
            return "param"


def _describe(child: etree._Element, node: Node | Scaffold, depth: int, preserve: bool) -> None:
    match node:
        case Parameter():
            scaffold = () if node.scaffold is None else (("scaffold", node.scaffold),)
            _set(child, (("name", node.name), ("len", str(node.length)), *scaffold))
        case Slot():
            _set(child, (("slot", node.name), ("collection", node.collection)))
        case Scaffold():
            _set(child, (("modules", " ".join("/".join(path) for path in node.modules)),))
        case Union():
            _set(child, () if node.scaffold is None else (("scaffold", node.scaffold),))
            _fill(child, node.members, depth + 1, preserve=preserve)
        case Module():
            cache = () if node.cache else (("cache", "false"),)
            _set(child, (("name", node.name), *cache))
            _fill(child, node.children, depth + 1, preserve=preserve)
        case Chat():
            opens = () if node.opens else (("opens", "no"),)
            closes = () if node.closes else (("closes", "no"),)
            _set(child, (*opens, *closes))
            _fill(child, node.children, depth + 1, preserve=preserve)
        case Import():
            _set(child, node.arguments)
            _fill(child, node.children, depth + 1, preserve=preserve)


def _set(element: etree._Element, attributes: Arguments) -> None:
    for name, value in attributes:
        element.set(name, _xml(value))


def _xml(text: str) -> str:
    if bad := NOT_XML.search(text):
        raise PMLSyntaxError(
            f"the character U+{ord(bad[0]):04X} cannot be written in XML",
            expected="sanitize_text(text) leaves out what XML cannot carry",
        )
    return text
