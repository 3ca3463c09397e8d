"""Tool calls in a model's text, whole (`parse_tool_calls`) or streamed (`ToolCallParser`).

A generator for each style separates text from calls. It suspends whenever it needs more text. The
JSON object of a call is scanned for its end, its name and its arguments as it arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ragcache.structured.tools import ToolStyle, known_style

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that cannot be read."""

    name: str | None
    """Name of the tool, if it could be read."""
    text: str
    """The call as the model wrote it, without the markers around it."""
    error: str
    """Why it cannot be read."""


# A string, whose closing quote is the group (empty if it has not arrived), or a structural mark.
_PART = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[{}\[\]:,]', re.DOTALL)


class CallScanner:
    """Scans `{"name": ..., "arguments": {...}}` up to its closing brace.

    It follows strings and brackets only: `parse_call` checks at the end that the text is JSON.
    """

    def __init__(self, head: str = "") -> None:
        """Begin an object. `head` is its text up to the arguments, for a style that leaves it out.

        With a head, the closing brace of the arguments ends the object.
        """
        self.text = ""
        self.done = False
        self.keys: list[str] = []
        self.name: str | None = None
        self._depth = self._outer = 0
        self._scanned = 0
        self._at_value = False
        self._begin: int | None = None
        self._end: int | None = None
        self.read(head)
        self._outer = self._depth

    @property
    def has_arguments(self) -> bool:
        return any(key in self.keys for key in ARGUMENTS)

    @property
    def arguments(self) -> str:
        """Text of the arguments read so far. Empty unless they are an object."""
        return "" if self._begin is None else self.text[self._begin : self._end]

    def read(self, text: str) -> int:
        """Read text until the object ends. Returns the number of characters read."""
        begin = len(self.text)
        self.text += text
        for part in _PART.finditer(self.text, self._scanned):
            if part[0][0] == '"' and not part[1]:
                break
            self._scanned = part.end()
            self._take(part[0], part.start())
            if self.done:
                self.text = self.text[: self._scanned] + "}" * self._outer
                return self._scanned - begin
        return len(text)

    def _take(self, part: str, place: int) -> None:
        if part in "{[":
            wanted = self._at_value and self.keys and self.keys[-1] in ARGUMENTS
            if self._depth == 1 and wanted and part == "{" and self._begin is None:
                self._begin = place
            self._depth += 1
        elif part in "}]":
            self._depth -= 1
            if self._depth == 1 and self._begin is not None and self._end is None:
                self._end = place + 1
            self.done = self._depth == self._outer
        elif self._depth == 1 and part in ":,":
            self._at_value = part == ":"
        elif self._depth == 1 and not self._at_value:
            self.keys.append(_string(part))
        elif self._depth == 1 and self.keys and self.keys[-1] == "name" and self.name is None:
            self.name = _string(part)


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        return literal


def parse_call(scan: CallScanner, raw: str) -> ToolCall | InvalidToolCall:
    """Return the call of a scanned object. `raw` is the text as the model wrote it."""
    try:
        fields = _loads(scan.text)
        if [key for key in scan.keys if key in ARGUMENTS][1:] or scan.keys.count("name") > 1:
            raise ValueError("a call has one name and one object of arguments")
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("the call has no name")
        arguments: Any = next((fields[key] for key in ARGUMENTS if key in fields), {})
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = _loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no JSON object")
    except (ValueError, RecursionError) as error:
        return InvalidToolCall(scan.name or None, raw, str(error))
    return ToolCall(name, arguments)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call."""

    index: int
    """Number of the call in the answer, from 0."""
    name: str | None
    """Name of the tool, in the first delta of a call only."""
    arguments: str
    """More of the JSON text of the arguments."""


AnyDelta = TextDelta | ToolCallDelta
AnyToolCall = ToolCall | InvalidToolCall


T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser, which yields whenever it needs more text."""

SPACE = " \t\r\n"


@dataclass(slots=True)
class _Call:
    """A call that is being read."""

    scan: CallScanner | None = None
    """Scanner of its JSON object, once there is one."""
    raw: str = ""
    """Text of the call, as the model wrote it."""
    named: bool = False
    """Whether a delta has reported its name."""
    emitted: int = 0
    """Number of characters of the arguments in deltas so far."""


class ToolCallParser:
    """Separates text and calls while the model writes.

    A part of a marker is held back until it is complete or refuted. The deltas of a call begin once
    its name is known. When the call has ended, `calls` tells whether it is valid. The result does
    not depend on how the text is cut.

    A text that is wholly one JSON object, or a list of them, is a call without its markers if it
    names an offered tool. Such a text is held back as long as it can become a call.

    Args:
        style: Notation of the calls. Without one, only calls without markers are read.
        tools: Names of the offered tools. Without any, a call needs its markers.

    Raises:
        InvalidRequest: The style is unknown.
    """

    def __init__(self, style: ToolStyle | str | None, tools: Collection[str] = ()) -> None:
        self.calls: list[AnyToolCall] = []
        """Calls that have ended, in order."""
        self.rest = ""
        """Text that has not been read yet."""
        self.ended = False
        """Whether no more text comes."""
        self._deltas: list[AnyDelta] = []
        self._blank = ""  # white space not emitted yet: text or a call may follow
        self._text_emitted = False  # whether there was text since the beginning or the last call
        self._steps = self._read(None if style is None else known_style(style), tools)
        next(self._steps)

    def _read(self, style: ToolStyle | None, tools: Collection[str]) -> Steps[None]:
        if tools and (yield from _parse_bare(self, style, tools)):
            return
        if style is None:
            yield from self.read_text()
        else:
            yield from _PARSERS[style](self)

    def feed(self, text: str) -> list[AnyDelta]:
        """Read more text. Returns the deltas that are now certain."""
        self.rest += text
        next(self._steps)
        return self._take_deltas()

    def finish(self) -> list[AnyDelta]:
        """End the text. Returns the deltas that were held back."""
        self.ended = True
        next(self._steps, None)
        if self._blank and not self.calls:  # white space is text only if there is nothing else
            self._deltas.append(TextDelta(self._blank))
        return self._take_deltas()

    def _take_deltas(self) -> list[AnyDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def emit_text(self, text: str) -> None:
        """Emit text. White space at the start and after a call is emitted only if text follows."""
        text, self._blank = self._blank + text, ""
        if not self._text_emitted and not text.strip():
            self._blank = text
            return
        if not self._text_emitted and self.calls:
            text = text.lstrip()
        if text:
            self._text_emitted = True
            self._deltas.append(TextDelta(text))

    def read_text(self, marker: str = "") -> Steps[bool]:
        """Emit the text before a marker and skip it. Returns False at the end of the text."""
        while True:
            text, found, after = self.rest.partition(marker) if marker else (self.rest, "", "")
            kept = 0 if found or self.ended else overlap(text, marker)
            self.emit_text(text[: len(text) - kept])
            self.rest = after if found else text[len(text) - kept :]
            if found or self.ended:
                return bool(found)
            yield

    def skip(self, characters: str) -> Steps[str]:
        """Skip these characters. Returns the next one, or "" at the end of the text."""
        while not (left := self.rest.lstrip(characters)) and not self.ended:
            yield
        self.rest = left
        return left[:1]

    def add_call(self, call: ToolCall) -> None:
        """Emit a whole call."""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        self._deltas.append(ToolCallDelta(len(self.calls), call.name, arguments))
        self.calls.append(call)

    def begin_call(self) -> _Call:
        """Begin a call. White space before it is left out."""
        self._blank, self._text_emitted = "", False
        return _Call()

    def read_object(self, call: _Call, *, needs_arguments: bool = False) -> Steps[bool]:
        """Read the object of a call and emit it. Returns whether it ended before the text did.

        Emits once the name is known and, with `needs_arguments`, the key of the arguments.
        """
        scan = call.scan = call.scan or CallScanner()
        while True:
            taken = scan.read(self.rest)
            call.raw, self.rest = call.raw + self.rest[:taken], self.rest[taken:]
            if scan.name and (scan.has_arguments or not needs_arguments):
                new = scan.arguments[call.emitted :]
                if new or not call.named:
                    name = None if call.named else scan.name
                    self._deltas.append(ToolCallDelta(len(self.calls), name, new))
                call.named, call.emitted = True, call.emitted + len(new)
            if scan.done or self.ended:
                return scan.done
            yield

    def read_junk(self, call: _Call, *markers: str) -> Steps[str]:
        """End the call at the nearest marker, and skip it.

        Returns that marker, or "" at the end of the text.
        """
        while not (found := [m for m in markers if m in self.rest]) and not self.ended:
            yield
        marker = min(found, key=self.rest.find, default="")
        junk, _, self.rest = self.rest.partition(marker) if marker else (self.rest, "", "")
        if not marker and call.scan is not None:
            junk = junk[: len(junk) - overlap(junk, markers[0])]
        self.end_call(call, junk)
        return marker

    def end_call(self, call: _Call, junk: str = "") -> None:
        """End the call. `junk` is the text between its object and its end."""
        if call.scan is None:
            wrong = "a call is a JSON object"
        elif not call.scan.done:
            wrong = "the call does not end"
        elif junk.strip():
            wrong = "something follows the call's JSON"
        else:
            ended = parse_call(call.scan, call.raw)
            if isinstance(ended, ToolCall) and not call.emitted:
                arguments = json.dumps(dict(ended.arguments), ensure_ascii=False)
                name = None if call.named else ended.name
                self._deltas.append(ToolCallDelta(len(self.calls), name, arguments))
            self.calls.append(ended)
            return
        name = None if call.scan is None else call.scan.name or None
        self.calls.append(InvalidToolCall(name, call.raw + junk, wrong))


def overlap(text: str, marker: str) -> int:
    """Return the number of characters at the end of the text that may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


_FENCE = "```"
_BARE_KEYS = {"name", "id", "type", *ARGUMENTS}


def _parse_bare(
    parser: ToolCallParser, style: ToolStyle | None, tools: Collection[str]
) -> Steps[bool]:
    """Parse a text that is one JSON call, or a list of calls, without markers, possibly fenced.

    Returns False for any other text, which is left to be read. Llama's own notation is such an
    object, whose arguments its parser emits as they arrive.
    """
    ahead = _Lookahead(parser)
    first = yield from ahead.skip_space()
    if first == "{" and style is ToolStyle.LLAMA:
        return ahead.undo()
    fenced = first == "`"
    if fenced:
        if not (yield from ahead.skip_fence()):
            return ahead.undo()
        first = yield from ahead.skip_space()
    calls, listed = list[ToolCall](), first == "["
    while first in ("{", "[" if not calls else ","):
        if first != "{":
            ahead.take(1)
            yield from ahead.skip_space()
        call = yield from ahead.read_call(tools)
        if call is None:
            return ahead.undo()
        calls.append(call)
        first = yield from ahead.skip_space()
        if not listed:
            break
    for end in ("]" if listed else "", _FENCE if fenced else ""):
        if not (yield from ahead.skip_marker(end)):
            return ahead.undo()
    if not calls or (yield from ahead.skip_space()):
        return ahead.undo()
    for call in calls:
        parser.add_call(call)
    return True


class _Lookahead:
    """Text that is taken from a parser, and given back if it is no call."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser, self._taken = parser, ""

    def undo(self) -> bool:
        """Give the text back. Returns False."""
        self._parser.rest = self._taken + self._parser.rest
        return False

    def take(self, length: int) -> str:
        """Take some characters, and return them."""
        rest = self._parser.rest
        self._taken, self._parser.rest = self._taken + rest[:length], rest[length:]
        return rest[:length]

    def skip_space(self) -> Steps[str]:
        """Take white space. Returns the next character, or "" at the end of the text."""
        while True:
            rest = self._parser.rest
            left = rest.lstrip(SPACE)
            self.take(len(rest) - len(left))
            if left or self._parser.ended:
                return left[:1]
            yield

    def skip_fence(self) -> Steps[bool]:
        """Take a line that opens a block of JSON. Returns False for another line."""
        while True:
            line, ended, _ = self._parser.rest.partition("\n")
            language = line[len(_FENCE) :].strip()
            if not (line.startswith(_FENCE) or _FENCE.startswith(line)) or (
                not "json".startswith(language)
            ):
                return False
            if ended:
                self.take(len(line))
                return line.startswith(_FENCE) and language in ("", "json")
            if self._parser.ended:
                return False
            yield

    def skip_marker(self, marker: str) -> Steps[bool]:
        """Take a marker after white space. Returns False for another text."""
        if marker:
            yield from self.skip_space()
        while marker.startswith(self._parser.rest) and not self._parser.ended:
            if len(self._parser.rest) >= len(marker):
                break
            yield
        return self.take(len(marker)) == marker

    def read_call(self, tools: Collection[str]) -> Steps[ToolCall | None]:
        """Take the object of a call. Returns None if the object is no call."""
        scan, raw = CallScanner(), ""
        while self._parser.rest.startswith("{") or raw:
            raw += self.take(scan.read(self._parser.rest))
            named = scan.name is None or scan.name in tools
            if not named or not _BARE_KEYS.issuperset(scan.keys):
                return None
            if scan.done:
                call = parse_call(scan, raw)
                return call if isinstance(call, ToolCall) and scan.has_arguments else None
            if self._parser.ended:
                return None
            yield
        return None


def _parse_hermes(parser: ToolCallParser) -> Steps[None]:
    """Parse `<tool_call>{...}</tool_call>`, any number of times, with text around the calls."""
    begin, end = "<tool_call>", "</tool_call>"
    marker = ""
    while marker == begin or (yield from parser.read_text(begin)):
        call, marker = parser.begin_call(), ""
        if (yield from parser.skip(SPACE)) == "{":
            complete = yield from parser.read_object(call)
            if not complete and end in call.raw:
                # a string without end swallowed the text after the call
                call.raw, _, parser.rest = call.raw.partition(end)
                parser.end_call(call)
                continue
        marker = yield from parser.read_junk(call, end, begin)  # the end may be missing


def _parse_llama(parser: ToolCallParser) -> Steps[None]:
    """Parse `{"name": ..., "parameters": {...}}` at the start, and more objects after `;`.

    An object without these two keys is text.
    """
    tag = "<|python_tag|>"
    while True:
        skipped = SPACE + ";" if parser.calls else SPACE
        while not (inner := _untagged(parser.rest.lstrip(skipped), tag)) and not parser.ended:
            yield
        if not inner.startswith("{"):
            if parser.calls:
                parser.rest = parser.rest.lstrip(skipped)
            break
        before = "" if parser.calls else parser.rest[: len(parser.rest) - len(inner)]
        call, parser.rest = _Call(), inner
        yield from parser.read_object(call, needs_arguments=True)
        if not call.named:
            parser.rest = before + call.raw + parser.rest
            break
        parser.end_call(call)
    yield from parser.read_text()


def _untagged(text: str, tag: str) -> str:
    """Return the text after the tag, if it has one, or "" until more text decides."""
    return "" if tag.startswith(text) else text.removeprefix(tag).lstrip(SPACE)


def _parse_mistral(parser: ToolCallParser) -> Steps[None]:
    """Parse text, then `[TOOL_CALLS]` with a list of calls, or before each `name[ARGS]{...}`."""
    begin = "[TOOL_CALLS]"
    while (yield from parser.read_text(begin)):
        call = parser.begin_call()
        if (yield from parser.skip(SPACE)) == "[":
            parser.rest = parser.rest[1:]
            yield from _parse_list(parser, begin)
            continue
        while not (parser.ended or "{" in parser.rest or begin in parser.rest):
            yield
        before, brace, _ = parser.rest.partition(begin)[0].partition("{")
        if brace:
            name = json.dumps(before.partition("[")[0].strip())
            call.scan, call.raw = CallScanner(f'{{"name": {name}, "arguments": '), before
            parser.rest = parser.rest[len(before) :]
            yield from parser.read_object(call)
            parser.end_call(call)
        else:
            parser.rest = (yield from parser.read_junk(call, begin)) + parser.rest


def _parse_list(parser: ToolCallParser, begin: str) -> Steps[None]:
    """Parse the calls of a list, to its end."""
    while first := (yield from parser.skip(SPACE + ",")):
        if first == "]":
            parser.rest = parser.rest[1:]
            return
        call = parser.begin_call()
        if first != "{":
            parser.rest = (yield from parser.read_junk(call, begin)) + parser.rest
            return
        yield from parser.read_object(call)
        parser.end_call(call)


_PARSERS: dict[ToolStyle, Callable[[ToolCallParser], Steps[None]]] = {
    ToolStyle.HERMES: _parse_hermes,
    ToolStyle.LLAMA: _parse_llama,
    ToolStyle.MISTRAL: _parse_mistral,
}


def parse_tool_calls(
    text: str, style: ToolStyle | str | None, tools: Collection[str] = ()
) -> tuple[str, list[AnyToolCall]]:
    """Separate a text from its tool calls.

    Args:
        text: The whole answer.
        style: Notation of the calls, if the model has one.
        tools: Names of the offered tools, which a call without markers may name.

    Returns:
        The text without calls and the white space around them, and the calls in order.

    Raises:
        InvalidRequest: The style is unknown.

    Example:
        >>> parse_tool_calls('Wait. <tool_call>{"name": "now"}</tool_call>', "hermes")
        ('Wait. ', [ToolCall(name='now', arguments={})])
    """
    parser = ToolCallParser(style, tools)
    deltas = parser.feed(text) + parser.finish()
    text_before = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return text_before, parser.calls
