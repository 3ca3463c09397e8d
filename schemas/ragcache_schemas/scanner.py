"""Scanner of PML text, run before lxml: tags, limits, unsafe markup, and turns.

lxml knows the line of an element but not its column, and keeps neither for end tags and text. One
pass over the text lists the tags, enforces the limits before anything is built, and refuses DTDs,
entities and processing instructions. lxml checks all other rules of XML.

The generators of the reference implementation leave chat tags unbalanced, since it replaces them as
plain text: `<schema><user>...</schema>` goes with `<prompt>...</user><assistant>...</prompt>`.
`balance_turns` completes such turns and marks them `closes="no"` or `opens="no"`. Well-formed PML
writes the same attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from ragcache_schemas.errors import (
    DuplicateName,
    ForbiddenMarkup,
    LimitExceeded,
    PMLSyntaxError,
    PMLWarning,
)
from ragcache_schemas.text import NOT_XML, ROLES
from ragcache_schemas.tree import Location

CDATA_ADVICE = "write &lt; and &amp; for '<' and '&' in text, or wrap it in <![CDATA[ ... ]]>"

_TAG_NAME = r"[^\W\d][^\s<>/=\"'&]*+"
_ATTRIBUTE = r"\s++[^\s<>/=\"'&]++\s*+=\s*+(?:\"[^\"<]*+\"|'[^'<]*+')"
_ATTRIBUTE_NAME = re.compile(r"\s([^\s<>/=\"'&]+)\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+')")
_TOKEN = re.compile(
    rf"""<!--(?P<comment>.*?)-->
    |<!\[CDATA\[(?P<cdata>.*?)\]\]>
    |</(?P<end>{_TAG_NAME})\s*+>
    |<(?P<start>{_TAG_NAME})(?P<attributes>(?:{_ATTRIBUTE})*+)\s*+(?P<empty>/?)>
    """,
    re.DOTALL | re.VERBOSE,
)
_BARE_AND = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});)")
_ENTITY = re.compile(r"&[^\W\d][\w.-]*;")
_NESTING = {"start": 1, "end": -1, "empty": 0}
_ENCODINGS = frozenset("utf-8 utf8 us-ascii ascii iso-8859-1 latin-1 windows-1252 gb18030".split())
_BLANK = re.compile(r"[ \t\n]*+")
_DECLARATION = re.compile(r"<\?xml\s[^?]*\?>")
_ENCODING = re.compile(rb"""<\?xml\s[^?>]*encoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Limits of a PML text."""

    size: int = 10_000_000
    """Bytes of UTF-8."""
    depth: int = 100
    """Levels of nesting, from 1 to 200."""
    elements: int = 1_000_000
    """Number of elements."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 200:
            raise ValueError(f"a depth limit of {self.depth} is outside 1 to 200")


@dataclass(slots=True)
class Tag:
    """A tag of the text, or of a turn that `balance_turns` completes."""

    kind: Literal["start", "end", "empty"]
    name: str
    start: int
    end: int
    location: Location
    text: Location | None = None
    """Place of the text between this tag and the next one, unless it is blank."""


def decode_text(text: str | bytes, source: str, limits: ScanLimits) -> str:
    """Return the text with LF line ends, without BOM, its XML declaration replaced by spaces."""
    start = Location(1, 1, source)
    _check_size(len(text), start, limits)  # a str has at least as many bytes as characters
    if isinstance(text, bytes):
        text = _from_bytes(text, start)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if bad := NOT_XML.search(text):
        problem = f"XML cannot carry the character U+{ord(bad[0]):04X}"
        raise PMLSyntaxError(problem, _at(text, bad.start(), source), None, "leave it out")
    if declared := _DECLARATION.match(text):
        text = re.sub(r"[^\n]", " ", declared[0]) + text[declared.end() :]
    _check_size(len(text.encode()), start, limits)
    return text


def _check_size(size: int, start: Location, limits: ScanLimits) -> None:
    if size > limits.size:
        problem = f"{size:,} bytes or more, where {limits.size:,} are allowed"
        expected = "split the schema, or raise ScanLimits.size"
        raise LimitExceeded(problem, start, None, expected)


def _from_bytes(data: bytes, start: Location) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    else:
        declared = _ENCODING.match(data.removeprefix(b"\xef\xbb\xbf"))
        encoding = declared[1].decode() if declared else "utf-8"
    expected = "save the file as UTF-8"
    if encoding != "utf-16" and encoding.lower() not in _ENCODINGS:
        raise PMLSyntaxError(f"the encoding {encoding!r} is unknown", start, None, expected)
    try:
        return data.decode(encoding)
    except UnicodeError as error:
        raise PMLSyntaxError(f"not {encoding} text ({error})", start, None, expected) from None


def _at(text: str, offset: int, source: str) -> Location:
    line_start = text.rfind("\n", 0, offset) + 1
    return Location(text.count("\n", 0, offset) + 1, offset - line_start + 1, source)


class _Cursor:
    """Converts offsets to locations. Offsets must not decrease, which keeps the scan linear."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.line, self.line_start, self.offset = 1, 0, 0

    def at(self, offset: int) -> Location:
        if offset > self.offset:
            newlines = self.text.count("\n", self.offset, offset)
            if newlines:
                self.line += newlines
                self.line_start = self.text.rfind("\n", self.offset, offset) + 1
            self.offset = offset
        return Location(self.line, offset - self.line_start + 1, self.source)


def scan_tags(text: str, source: str, limits: ScanLimits) -> list[Tag]:
    """List the tags of a text. Raises `PMLSyntaxError`, `ForbiddenMarkup` or `LimitExceeded`."""
    cursor = _Cursor(text, source)
    tags: list[Tag] = []
    depth = elements = pos = 0
    while True:
        begin = text.find("<", pos)
        _check_text(text, pos, begin if begin >= 0 else len(text), cursor, tags)
        if begin < 0:
            return tags
        token = _TOKEN.match(text, begin)
        if token is None:
            raise _not_a_tag(text, begin, cursor.at(begin), tags)
        pos = token.end()
        if token.lastgroup == "comment":
            continue
        if token.lastgroup == "cdata":
            _note_text(text, token.start("cdata"), token.end("cdata"), cursor, tags)
            continue
        tag = _tag(token, cursor)
        depth += _NESTING[tag.kind]
        elements += tag.kind != "end"
        _check_limits(tag, depth, elements, limits)
        tags.append(tag)


def _tag(token: re.Match[str], cursor: _Cursor) -> Tag:
    location = cursor.at(token.start())
    if name := token["end"]:
        return Tag("end", name, token.start(), token.end(), location)
    name = token["start"]
    names = _ATTRIBUTE_NAME.findall(token["attributes"])
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        problem = f"the attribute {twice!r} is given twice"
        raise DuplicateName(problem, location, name, "give it once")
    if "&" in token["attributes"]:
        _check_references(token.string, *token.span("attributes"), cursor, name)
    kind: Literal["empty", "start"] = "empty" if token["empty"] else "start"
    return Tag(kind, name, token.start(), token.end(), location)


def _check_limits(tag: Tag, depth: int, count: int, limits: ScanLimits) -> None:
    if depth > limits.depth:
        problem = f"<{tag.name}> is nested {depth} deep, where {limits.depth} are allowed"
        expected = "flatten it, or raise ScanLimits.depth"
        raise LimitExceeded(problem, tag.location, tag.name, expected)
    if count > limits.elements:
        problem = f"more than {limits.elements:,} elements"
        expected = "split the schema, or raise ScanLimits.elements"
        raise LimitExceeded(problem, tag.location, tag.name, expected)


def _check_text(text: str, begin: int, end: int, cursor: _Cursor, tags: list[Tag]) -> None:
    if begin == end:
        return
    _note_text(text, begin, end, cursor, tags)
    if text.find("&", begin, end) >= 0:
        _check_references(text, begin, end, cursor, tags)
    wrong = text.find("]]>", begin, end)
    if wrong >= 0:
        location, element = cursor.at(wrong), _open_element(tags)
        raise PMLSyntaxError("']]>' outside CDATA", location, element, "write ]]&gt; in text")


def _note_text(text: str, begin: int, end: int, cursor: _Cursor, tags: list[Tag]) -> None:
    if tags and tags[-1].text is None:
        blank = _BLANK.match(text, begin, end)
        assert blank is not None
        if blank.end() < end:
            tags[-1].text = cursor.at(blank.end())


def _check_references(
    text: str, begin: int, end: int, cursor: _Cursor, within: list[Tag] | str
) -> None:
    bad = _BARE_AND.search(text, begin, end)
    if bad is None:
        return
    location = cursor.at(bad.start())
    element = within if isinstance(within, str) else _open_element(within)
    if entity := _ENTITY.match(text, bad.start(), end):
        problem = f"the entity {entity[0]} is not defined: PML has no DTD"
        raise ForbiddenMarkup(problem, location, element, f"write the character; {CDATA_ADVICE}")
    raise PMLSyntaxError("a bare '&'", location, element, CDATA_ADVICE)


def _open_element(tags: list[Tag]) -> str | None:
    depth = 0
    for tag in reversed(tags):
        depth += _NESTING[tag.kind]
        if depth > 0:
            return tag.name
    return None


def _not_a_tag(text: str, begin: int, location: Location, tags: list[Tag]) -> PMLSyntaxError:
    element = _open_element(tags)
    for opening, ending in (("<!--", "-->"), ("<![CDATA[", "]]>")):
        if text.startswith(opening, begin):
            problem = f"{opening} is never closed"
            return PMLSyntaxError(problem, location, element, f"close it with {ending}")
    if text.startswith("<!", begin):
        problem = "document types and entity declarations are refused"
        return ForbiddenMarkup(problem, location, element, f"remove it; {CDATA_ADVICE}")
    if text.startswith("<?", begin):
        problem = "processing instructions are refused"
        return ForbiddenMarkup(problem, location, element, f"remove it; {CDATA_ADVICE}")
    problem = "a bare '<', or a tag that is not well-formed"
    return PMLSyntaxError(problem, location, element, CDATA_ADVICE)


def balance_turns(text: str, tags: list[Tag]) -> tuple[str, list[Tag], list[PMLWarning]]:
    """Complete unbalanced turns.

    Args:
        text: PML.
        tags: Its tags.

    Returns:
        The text and the tags with every turn opened and closed, and a warning for each completed
        turn. Places refer to the original text.

    Raises:
        PMLSyntaxError: Any other tag does not match.
    """
    balancer = _TurnBalancer(text)
    for tag in tags:
        if not balancer.stack and tag is not tags[0] and tag.kind != "end":
            problem = f"<{tag.name}> after the end of <{tags[0].name}>"
            expected = "a text holds one schema or one prompt"
            raise PMLSyntaxError(problem, tag.location, tag.name, expected)
        if tag.kind == "end":
            balancer.end(tag)
        else:
            balancer.start(tag)
    if balancer.stack:
        tag = balancer.stack[-1].tag
        expected = f"add </{tag.name}>; in text, {CDATA_ADVICE}"
        problem = f"<{tag.name}> is never closed"
        raise PMLSyntaxError(problem, tag.location, tag.name, expected)
    if balancer.added:
        tags = sorted([*balancer.added, *tags], key=lambda tag: tag.start)
    return balancer.balanced(), tags, balancer.warnings


@dataclass(slots=True)
class _Open:
    """An open element."""

    tag: Tag
    anchor: Tag
    """Tag after which a turn begins that is closed in this element but was never opened."""


class _TurnBalancer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.stack: list[_Open] = []
        self.inserts: list[tuple[int, str]] = []  # by offset
        self.added: list[Tag] = []
        self.warnings: list[PMLWarning] = []

    def start(self, tag: Tag) -> None:
        turn = tag.name in ROLES
        if turn and self._in_turn():
            self._close_turn(tag)
        if tag.kind == "start":
            self.stack.append(_Open(tag, tag))
        elif turn:
            self._move_anchor(tag)

    def end(self, tag: Tag) -> None:
        turn = tag.name in ROLES
        if self._in_turn() and not turn:
            self._close_turn(tag)
        if self.stack and self.stack[-1].tag.name == tag.name:
            self.stack.pop()
            if turn:
                self._move_anchor(tag)
        elif turn and self.stack and not any(one.tag.name in ROLES for one in self.stack):
            self._open_turn(tag)
        else:
            raise _mismatch(tag, self.stack)

    def balanced(self) -> str:
        """Return the text with all insertions."""
        parts: list[str] = []
        done = 0
        for offset, insert in sorted(self.inserts, key=itemgetter(0)):
            parts += self.text[done:offset], insert
            done = offset
        return "".join(parts) + self.text[done:]

    def _in_turn(self) -> bool:
        return bool(self.stack) and self.stack[-1].tag.name in ROLES

    def _move_anchor(self, tag: Tag) -> None:
        if self.stack:
            self.stack[-1].anchor = tag

    def _open_turn(self, end: Tag) -> None:
        """Open the turn that `end` closes, after the anchor, and move the anchor's text into it."""
        anchor = self.stack[-1].anchor
        self.inserts.append((anchor.end, f'<{end.name} opens="no">'))
        begin = Tag("start", end.name, anchor.end, anchor.end, end.location, anchor.text)
        self.added.append(begin)
        anchor.text = None
        self._move_anchor(end)
        problem = f'</{end.name}> was never opened; write <{end.name} opens="no">...</{end.name}>'
        self.warnings.append(PMLWarning(problem, end.location))

    def _close_turn(self, following: Tag) -> None:
        """Close the open turn before the tag that follows it."""
        tag, at = self.stack.pop().tag, following.start
        self.inserts += (tag.end - 1, ' closes="no"'), (at, f"</{tag.name}>")
        end = Tag("end", tag.name, at, at, following.location)
        self.added.append(end)
        self._move_anchor(end)
        problem = f'<{tag.name}> is never closed; write <{tag.name} closes="no">...</{tag.name}>'
        self.warnings.append(PMLWarning(problem, tag.location))


def _mismatch(tag: Tag, stack: list[_Open]) -> PMLSyntaxError:
    if not stack:
        problem = f"</{tag.name}> closes nothing"
        return PMLSyntaxError(problem, tag.location, tag.name, "remove it")
    opened = stack[-1].tag
    where = f"line {opened.location.line}, column {opened.location.column}"
    problem = f"</{tag.name}> where </{opened.name}> is due, which was opened at {where}"
    expected = f"close <{opened.name}> first; in text, {CDATA_ADVICE}"
    return PMLSyntaxError(problem, tag.location, opened.name, expected)
