"""From elements to nodes: what the schema reader and the prompt reader share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from .document import Document, Element, Report, Warn
from .errors import InvalidAttribute, MisplacedText, UnknownElement
from .scanner import CDATA_ADVICE, Tag
from .space import PARAMETER, tidy
from .tree import Chat, Location, Node, Parameter, Role, Text

__all__ = ["Reader", "spelled"]

_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_FOREIGN = "{http://www.w3.org/2001/XMLSchema-instance}"

N = TypeVar("N")


class _Flow(Generic[N]):
    """Collects the content of one element, and decides what its white space means."""

    def __init__(self, preserve: bool) -> None:
        self.preserve = preserve
        self.nodes: list[N] = []
        self.texts: list[str] = [""]
        self.places: list[Location | None] = [None]
        self.inline: list[N] = []

    def text(self, text: str | None, place: Location | None) -> None:
        if text:
            self.texts[-1] += text  # at most twice between two tags
            self.places[-1] = self.places[-1] or place

    def parameter(self, node: N) -> None:
        self.inline.append(node)
        self.texts.append("")
        self.places.append(None)

    def end(self) -> None:
        texts = self.texts
        if not self.preserve:
            texts = tidy(PARAMETER.join(texts)).split(PARAMETER)
        for index, text in enumerate(texts):
            if text:
                self.nodes.append(cast("N", Text(text, location=self.places[index])))
            if index < len(self.inline):
                self.nodes.append(self.inline[index])
        self.texts, self.places, self.inline = [""], [None], []


class Reader(Generic[N]):
    """Walks elements and tags together; problems go to `report`."""

    def __init__(self, document: Document, report: Report, warn: Warn) -> None:
        self.root = document.root
        self.report = report
        self.warn = warn
        self._tags = iter(document.tags)
        self._last: Tag | None = None
        self._preserve = False
        self._turn: str | None = None

    def next_tag(self) -> Tag:
        """The next tag in the text."""
        self._last = next(self._tags)
        return self._last

    def children(
        self, element: Element, tag: Tag, make: Callable[[Element, Tag], N | None]
    ) -> list[N]:
        """The content of `element`, whose start tag is `tag`; `make` turns elements into nodes."""
        outer = self._preserve
        self._preserve = self._keeps_space(element, tag)
        flow = _Flow[N](self._preserve)
        flow.text(element.text, tag.text)
        for child in element:
            node = make(child, self.next_tag())
            if isinstance(node, Parameter):
                flow.parameter(node)
            else:
                flow.end()
                if node is not None:
                    flow.nodes.append(node)
            assert self._last is not None
            flow.text(child.tail, self._last.text)
        flow.end()
        if tag.kind == "start":
            self.next_tag()
        self._preserve = outer
        return flow.nodes

    def no_children(self, element: Element, tag: Tag) -> None:
        """Reports anything inside `element`, which must be empty."""
        for node in self.children(element, tag, self.skip):
            if isinstance(node, Text):
                expected = f"close it as <{tag.name} .../> and put the text outside"
                problem = f"text inside <{tag.name}>"
                self.report(MisplacedText(problem, node.location, tag.name, expected))

    def skip(self, element: Element, tag: Tag) -> N | None:
        """Reports an element that may not stand where it does, and passes over it."""
        self.report(self.misplaced(element, tag))
        self.pass_over(element, tag)
        return None

    def pass_over(self, element: Element, tag: Tag) -> None:
        """Consumes the tags of `element` and of what is in it."""
        for child in element:
            self.pass_over(child, self.next_tag())
        if tag.kind == "start":
            self.next_tag()

    def misplaced(self, element: Element, tag: Tag, expected: str = "") -> UnknownElement:
        """The error for an element that may not stand inside its parent."""
        parent = element.getparent()
        within = f" inside <{parent.tag!s}>" if parent is not None else ""
        expected = expected or f"remove it; in text, {CDATA_ADVICE}"
        return UnknownElement(f"<{tag.name}>{within}", tag.location, tag.name, expected)

    def chat(
        self, element: Element, tag: Tag, role: Role, make: Callable[[Element, Tag], N | None]
    ) -> Chat | None:
        """A turn; turns do not nest."""
        if self._turn:
            expected = f"end the <{self._turn}> turn first"
            self.report(self.misplaced(element, tag, expected))
            self.pass_over(element, tag)
            return None
        attributes = self.attributes(element, tag, optional=("opens", "closes"))
        opens = self._flag(attributes, "opens", tag, "yes", "no")
        closes = self._flag(attributes, "closes", tag, "yes", "no")
        self._turn = role
        nodes = cast("list[Node]", self.children(element, tag, make))
        self._turn = None
        return Chat(role, tuple(nodes), opens=opens, closes=closes, location=tag.location)

    def attributes(
        self,
        element: Element,
        tag: Tag,
        required: tuple[str, ...] = (),
        *,
        optional: tuple[str, ...] = (),
    ) -> dict[str, str]:
        """The attributes of `element`; reports the missing and the unknown."""
        found = spelled(element)
        for name in required:
            if name not in found:
                problem = f"<{tag.name}> without the attribute {name!r}"
                expected = f'write <{tag.name} {name}="...">'
                self.report(InvalidAttribute(problem, tag.location, tag.name, expected))
        known = (*required, *optional)
        for name in found:
            if name not in known:
                problem = f"<{tag.name}> has no attribute {name!r}"
                expected = f"its attributes are {', '.join(known)}" if known else "it has none"
                self.report(InvalidAttribute(problem, tag.location, tag.name, expected))
        return found

    def unnamed(self, tag: Tag) -> str:
        """A name in place of one that is missing, so that it is reported once."""
        return f"_unnamed-{tag.location.line}-{tag.location.column}"

    def _flag(self, found: dict[str, str], name: str, tag: Tag, yes: str, no: str) -> bool:
        value = found.get(name, yes)
        if value not in (yes, no):
            problem = f'{name}="{value}" on <{tag.name}>'
            expected = f'write "{yes}" or "{no}"'
            self.report(InvalidAttribute(problem, tag.location, tag.name, expected))
        return value != no

    def _keeps_space(self, element: Element, tag: Tag) -> bool:
        value = element.get(_SPACE)
        if value not in (None, "preserve", "default"):
            problem = f'xml:space="{value}" on <{tag.name}>'
            expected = 'write "preserve" or "default"'
            self.report(InvalidAttribute(problem, tag.location, tag.name, expected))
        return self._preserve if value is None else value == "preserve"


def spelled(element: Element) -> dict[str, str]:
    """The attributes of `element` but xml:space and those of XML Schema instances."""
    found = {str(name): str(value) for name, value in element.attrib.items()}
    return {k: v for k, v in found.items() if k != _SPACE and not k.startswith(_FOREIGN)}
