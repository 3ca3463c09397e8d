"""Parser of PML (Prompt Cache, §3.2): schemas and prompts, from text to tree.

Every problem gets an exact place, and nothing unsafe is built. `scanner` finds the tags, applies
the limits and balances chat tags. lxml parses with entities, DTD and network off. The readers build
the tree, and `validate` checks its names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, cast

from lxml import etree

from ragcache_schemas.errors import (
    InvalidAttribute,
    MisplacedText,
    PMLError,
    PMLSyntaxError,
    PMLWarning,
    UnknownElement,
)
from ragcache_schemas.scanner import (
    CDATA_ADVICE,
    ScanLimits,
    Tag,
    balance_turns,
    decode_text,
    scan_tags,
)
from ragcache_schemas.text import PARAMETER, RESERVED, ROLES, tidy
from ragcache_schemas.tree import (
    Chat,
    Import,
    Location,
    Module,
    Node,
    Parameter,
    Prompt,
    PromptNode,
    Role,
    Scaffold,
    Schema,
    SchemaNode,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.validate import prompt_problems, schema_problems


def parse_schema(
    text: str | bytes, *, source: str = "<string>", limits: ScanLimits | None = None
) -> Schema:
    """Parse a schema.

    Args:
        text: PML. Bytes are decoded by their byte order mark or XML declaration.
        source: Name of the file, for places in errors.
        limits: Limits of the text. Defaults to `ScanLimits()`.

    Raises:
        PMLError: The first problem, with its line and column. Unbalanced turns only warn
            (`PMLWarning`).

    Example:
        >>> parse_schema('<schema name="s">Be brief.</schema>').children
        (Text(text='Be brief.'),)
    """
    return read_schema(text, source, limits or ScanLimits(), _raise, _warn)


def parse_prompt(
    text: str | bytes, *, source: str = "<string>", limits: ScanLimits | None = None
) -> Prompt:
    """Parse a prompt, with arguments, errors and warnings as in `parse_schema`.

    Example:
        >>> parse_prompt('<prompt schema="cities"><miami/></prompt>').children
        (Import(name='miami', arguments=(), children=()),)
    """
    return read_prompt(text, source, limits or ScanLimits(), _raise, _warn)


def read_schema(
    text: str | bytes, source: str, limits: ScanLimits, report: Report, warn: Warn
) -> Schema:
    """Parse a schema as `parse_schema` does. Each problem goes to `report`, which may return."""
    schema = SchemaReader(*load(text, source, limits, warn), report, warn).schema()
    for problem in schema_problems(schema):
        report(problem)
    return schema


def read_prompt(
    text: str | bytes, source: str, limits: ScanLimits, report: Report, warn: Warn
) -> Prompt:
    """Parse a prompt as `parse_prompt` does. Each problem goes to `report`, which may return."""
    prompt = PromptReader(*load(text, source, limits, warn), report, warn).prompt()
    for problem in prompt_problems(prompt):
        report(problem)
    return prompt


def _raise(problem: PMLError) -> None:
    raise problem


def _warn(warning: PMLWarning) -> None:
    warnings.warn(warning, stacklevel=5)


Element: TypeAlias = etree._Element
Report: TypeAlias = Callable[[PMLError], None]
"""Takes a problem. Parsing raises it, linting collects it."""
Warn: TypeAlias = Callable[[PMLWarning], None]


def load(
    text: str | bytes, source: str, limits: ScanLimits, warn: Warn
) -> tuple[Element, list[Tag]]:
    """Parse `text` as XML with entities, DTD and network off.

    Returns the root element, and every tag in document order. Raises `PMLSyntaxError`,
    `ForbiddenMarkup` or `LimitExceeded`.
    """
    text = decode_text(text, source, limits)
    tags = scan_tags(text, source, limits)
    text, tags, warnings = balance_turns(text, tags)
    for warning in warnings:
        warn(warning)
    return _parse(text, source, tags), tags


def _parse(text: str, source: str, tags: list[Tag]) -> Element:
    # huge_tree lifts libxml2's own limits: `scan_tags` has already applied stricter ones.
    parser = etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        dtd_validation=False,
        huge_tree=True,
        remove_comments=True,
        recover=False,
    )
    try:
        return etree.fromstring(text.encode(), parser)
    except etree.XMLSyntaxError as error:
        line, column = error.position
        where = Location(max(line or 1, 1), max(column or 1, 1), source)
        before = [tag for tag in tags if (tag.location.line, tag.location.column) <= error.position]
        element = before[-1].name if before else None
        problem = f"not well-formed XML: {(error.msg or 'unknown error').strip()}"
        raise PMLSyntaxError(problem, where, element, CDATA_ADVICE) from None


_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_FOREIGN = "{http://www.w3.org/2001/XMLSchema-instance}"

N = TypeVar("N")


class _Flow(Generic[N]):
    """Collects the content of one element, and applies the white space rule."""

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


class ElementReader(Generic[N]):
    """Walks elements and tags together. Problems go to `report`."""

    def __init__(self, root: Element, tags: list[Tag], report: Report, warn: Warn) -> None:
        self.root = root
        self.report = report
        self.warn = warn
        self._tags = iter(tags)
        self._last: Tag | None = None
        self._preserve = False
        self._turn: str | None = None

    def next_tag(self) -> Tag:
        """Return the next tag in the text."""
        self._last = next(self._tags)
        return self._last

    def children(
        self, element: Element, tag: Tag, make: Callable[[Element, Tag], N | None]
    ) -> list[N]:
        """Return the nodes in `element`, whose start tag is `tag`.

        `make` turns elements into nodes.
        """
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
        """Report anything inside `element`, which must be empty."""
        for node in self.children(element, tag, self.skip):
            if isinstance(node, Text):
                expected = f"close it as <{tag.name} .../> and put the text outside"
                problem = f"text inside <{tag.name}>"
                self.report(MisplacedText(problem, node.location, tag.name, expected))

    def skip(self, element: Element, tag: Tag, expected: str = "") -> None:
        """Report a misplaced element and pass over it."""
        self.misplaced(element, tag, expected)
        self.pass_over(element, tag)

    def pass_over(self, element: Element, tag: Tag) -> None:
        """Consume the tags of `element` and of its content."""
        for child in element:
            self.pass_over(child, self.next_tag())
        if tag.kind == "start":
            self.next_tag()

    def misplaced(self, element: Element, tag: Tag, expected: str = "") -> None:
        """Report an element that its parent may not hold."""
        parent = element.getparent()
        within = f" inside <{parent.tag!s}>" if parent is not None else ""
        expected = expected or f"remove it; in text, {CDATA_ADVICE}"
        self.report(UnknownElement(f"<{tag.name}>{within}", tag.location, tag.name, expected))

    def invalid(self, tag: Tag, problem: str, expected: str) -> None:
        """Report a problem of an attribute."""
        self.report(InvalidAttribute(problem, tag.location, tag.name, expected))

    def chat(
        self, element: Element, tag: Tag, role: Role, make: Callable[[Element, Tag], N | None]
    ) -> Chat | None:
        """Read a turn. Turns do not nest."""
        if self._turn:
            self.skip(element, tag, f"end the <{self._turn}> turn first")
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
        """Return the attributes of `element`. Reports missing and unknown ones."""
        found = attributes_of(element)
        for name in required:
            if name not in found:
                problem = f"<{tag.name}> without the attribute {name!r}"
                self.invalid(tag, problem, f'write <{tag.name} {name}="...">')
        known = (*required, *optional)
        for name in found:
            if name not in known:
                expected = f"its attributes are {', '.join(known)}" if known else "it has none"
                self.invalid(tag, f"<{tag.name}> has no attribute {name!r}", expected)
        return found

    def unnamed(self, tag: Tag) -> str:
        """Return a placeholder for a missing name, so that it is reported once."""
        return f"_unnamed-{tag.location.line}-{tag.location.column}"

    def _flag(self, found: dict[str, str], name: str, tag: Tag, yes: str, no: str) -> bool:
        value = found.get(name, yes)
        if value not in (yes, no):
            self.invalid(tag, f'{name}="{value}" on <{tag.name}>', f'write "{yes}" or "{no}"')
        return value != no

    def _keeps_space(self, element: Element, tag: Tag) -> bool:
        value = element.get(_SPACE)
        if value not in (None, "preserve", "default"):
            problem = f'xml:space="{value}" on <{tag.name}>'
            self.invalid(tag, problem, 'write "preserve" or "default"')
        return self._preserve if value is None else value == "preserve"


def attributes_of(element: Element) -> dict[str, str]:
    """Return the attributes of `element`, without `xml:space` and XML Schema's own attributes."""
    found = {str(name): str(value) for name, value in element.attrib.items()}
    return {k: v for k, v in found.items() if k != _SPACE and not k.startswith(_FOREIGN)}


_LENGTH = re.compile(r"0*[1-9][0-9]{0,6}")


class SchemaReader(ElementReader[SchemaNode]):
    """Builds the tree of a schema."""

    def schema(self) -> Schema:
        """Return the tree of the document, whose root must be <schema>."""
        tag = self.next_tag()
        self._scaffolds: list[Scaffold] = []
        if self.root.tag != "schema":
            self.misplaced(self.root, tag, 'a schema begins with <schema name="...">')
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
        inside = "put it directly inside <schema>" if element.tag == "scaffold" else ""
        self.skip(element, tag, inside)
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
            self.invalid(tag, problem, 'write len="N" with N from 1 to 9999999')
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
        self.skip(element, tag, "only <module> may stand directly in a union")
        return None

    def _scaffold(self, element: Element, tag: Tag) -> Scaffold:
        paths = self.attributes(element, tag, ("modules",)).get("modules", "")
        self.no_children(element, tag)
        return Scaffold(tuple(tuple(p.split("/")) for p in paths.split()), location=tag.location)


class PromptReader(ElementReader[PromptNode]):
    """Builds the tree of a prompt."""

    def prompt(self) -> Prompt:
        """Return the tree of the document, whose root must be <prompt>."""
        tag = self.next_tag()
        if self.root.tag != "prompt":
            self.misplaced(self.root, tag, 'a prompt begins with <prompt schema="...">')
        self.attributes(self.root, tag, ("schema",), optional=tuple(attributes_of(self.root)))
        arguments = attributes_of(self.root)
        schema = arguments.pop("schema", self.unnamed(tag))
        nodes = self.children(self.root, tag, self._node)
        return Prompt(schema, tuple(nodes), tuple(arguments.items()), location=tag.location)

    def _node(self, element: Element, tag: Tag) -> PromptNode | None:
        if element.tag in ROLES:
            return self.chat(element, tag, cast("Role", element.tag), self._node)
        if element.tag in RESERVED:
            self.skip(element, tag, "a prompt imports a module by its own name, as in <miami/>")
            return None
        nodes = self.children(element, tag, self._node)
        arguments = tuple(attributes_of(element).items())
        return Import(tag.name, arguments, tuple(nodes), location=tag.location)
