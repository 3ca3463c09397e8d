"""Writer of trees as PML. lxml serializes the elements, so that text never becomes markup.

The form is stable: `parse(write(tree)) == tree`, and writing that again gives the same text. Line
breaks and indentation between elements are put only in places from which the white space rule
(`text.tidy`) drops them again. An element whose text that rule would change is written under
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
    """Write a schema as PML.

    Raises:
        PMLError: The tree could not be parsed back.
    """
    validate_schema(schema)
    root = etree.Element("schema")
    _set(root, (("name", schema.name),))
    _fill(root, (*schema.children, *schema.scaffolds), 1, preserve=False)
    return etree.tostring(root, encoding="unicode") + "\n"


def write_prompt(prompt: Prompt) -> str:
    """Write a prompt as PML.

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
    """Put `nodes` into `element`, whose children have this `depth`."""
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
        tag, attributes, content = _parts(node)
        body.last = etree.SubElement(element, tag)
        _set(body.last, attributes)
        if content is not None:
            _fill(body.last, content, depth + 1, preserve=preserve)
        after_text = inline
    if not preserve and nodes:
        body.break_line(depth - 1, after_text)


class _Body:
    """The content of an element. Keeps its last child, since a search would not be linear."""

    def __init__(self, element: etree._Element) -> None:
        self.element = element
        self.last: etree._Element | None = None

    def append(self, text: str) -> None:
        if self.last is None:
            self.element.text = (self.element.text or "") + text
        else:
            self.last.tail = (self.last.tail or "") + text

    def break_line(self, depth: int, after_text: bool) -> None:
        # After text, a line break is only added if the text already ends in one: the rule
        # makes one line break of any white space with a line break in it.
        if not after_text:
            self.append("\n" + _INDENT * depth)
        else:
            text = self.element.text if self.last is None else self.last.tail
            if text and text.endswith("\n"):
                self.append(_INDENT * depth)


def _tidy_already(nodes: Sequence[Node | Scaffold]) -> bool:
    """Whether the white space rule leaves every flow in `nodes` unchanged."""
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


def _parts(node: Node | Scaffold) -> tuple[str, Arguments, Sequence[Node] | None]:
    """Return the name, attributes and content of a node's element.

    An empty element has no content.
    """
    match node:
        case Parameter():
            scaffold = _optional("scaffold", node.scaffold)
            return "param", (("name", node.name), ("len", str(node.length)), *scaffold), None
        case Slot():
            return "union", (("slot", node.name), ("collection", node.collection)), None
        case Scaffold():
            paths = " ".join("/".join(path) for path in node.modules)
            return "scaffold", (("modules", paths),), None
        case Union():
            return "union", _optional("scaffold", node.scaffold), node.members
        case Module():
            cache = _optional("cache", None if node.cache else "false")
            return "module", (("name", node.name), *cache), node.children
        case Chat():
            opens = _optional("opens", None if node.opens else "no")
            closes = _optional("closes", None if node.closes else "no")
            return node.role, (*opens, *closes), node.children
        case Import():
            return node.name, node.arguments, node.children
    raise TypeError(f"{type(node).__name__} is no element")


def _optional(name: str, value: str | None) -> Arguments:
    return () if value is None else ((name, value),)


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
