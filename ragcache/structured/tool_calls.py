"""Reads tool calls from a model's text: whole (`parse_tool_calls`), or streamed (`ToolCallStream`).

A reader for each style separates text from calls and emits both as soon as they are certain. The
JSON object of a call is scanned for its end, its name and its arguments while it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ragcache.structured.tools import ToolStyle, known_style

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that cannot be read. name: None if it could not be read either. text: the call as the
    model wrote it, without the markers around it. error: the reason."""

    name: str | None
    text: str
    error: str


# A string, whose end is the group unless it is still to come, or a mark of JSON's structure.
_PART = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[{}\[\]:,]', re.DOTALL)


class CallScanner:
    """Scans `{"name": ..., "arguments": {...}}` up to its closing brace. It follows strings and
    brackets only; `parse_call` checks at the end that the text is JSON.

    head: what a style leaves out, up to the arguments, whose closing brace then ends the object.
    """

    def __init__(self, head: str = "") -> None:
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
        """The text of the arguments read so far; "" if they are no object."""
        return "" if self._begin is None else self.text[self._begin : self._end]

    def read(self, text: str) -> int:
        """Reads text until the object ends. Returns the number of characters read."""
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
    """The call of a scanned object. raw: the text as the model wrote it."""
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
    """A part of the call number `index`, from 0. name: the tool's name in the first delta of a
    call, then None. arguments: more of the JSON text of the arguments."""

    index: int
    name: str | None
    arguments: str


AnyDelta = TextDelta | ToolCallDelta
AnyToolCall = ToolCall | InvalidToolCall


class ToolCallReader:
    """Collects deltas and calls from text; the base of the styles' readers.

    `step` reads as much of `rest` as is certain and returns whether to call it again; `end` reads
    the rest when the text has ended.
    """

    def __init__(self) -> None:
        self.calls: list[AnyToolCall] = []
        self.deltas: list[AnyDelta] = []
        self.rest = ""  # not yet read
        self.raw = ""  # the current call, as it was written
        self.scan: CallScanner | None = None
        self._blank = ""  # white space not emitted yet: text or a call may follow
        self._text_emitted = False  # whether there was text since the beginning or the last call
        self._name_emitted = False
        self._emitted = 0  # characters of the arguments

    def step(self) -> bool:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def emit_text(self, text: str) -> None:
        """Emits text; white space at the beginning and after a call only if text follows."""
        text = self._blank + text
        self._blank = ""
        if not self._text_emitted and not text.strip():
            self._blank = text
            return
        if not self._text_emitted and self.calls:
            text = text.lstrip()
        self._text_emitted = True
        self.deltas.append(TextDelta(text))

    def emit_text_before(self, marker: str) -> bool:
        """Emits the text before a marker, or all that cannot begin one. Returns whether it came."""
        before, found, after = self.rest.partition(marker)
        kept = after if found else before[len(before) - overlap(before, marker) :]
        text_before = before if found else before[: len(before) - len(kept)]
        if text_before:
            self.emit_text(text_before)
        self.rest = kept
        return bool(found)

    def end_text(self) -> None:
        """Ends the text; white space without other text is emitted only if there was no call."""
        if self._blank and not self.calls:
            self.deltas.append(TextDelta(self._blank))
        self._blank = ""

    def begin_call(self, scan: CallScanner | None = None) -> None:
        self._blank, self._text_emitted = "", False
        self._name_emitted, self._emitted = False, 0
        self.raw, self.scan = "", scan

    def read_object(self) -> bool:
        """Reads more of the call's object. Returns whether it ended."""
        assert self.scan is not None
        taken = self.scan.read(self.rest)
        self.raw += self.rest[:taken]
        self.rest = self.rest[taken:]
        return self.scan.done

    def emit_call(self) -> None:
        """Emits the new part of the call, once its name is known."""
        assert self.scan is not None
        if not self.scan.name:
            return
        new = self.scan.arguments[self._emitted :]
        if new or not self._name_emitted:
            name = None if self._name_emitted else self.scan.name
            self.deltas.append(ToolCallDelta(len(self.calls), name, new))
        self._name_emitted, self._emitted = True, self._emitted + len(new)

    def end_call(self, junk: str = "") -> None:
        """Ends the call. junk: the text between its object and its end."""
        if self.scan is None or not self.scan.done or junk.strip():
            name = None if self.scan is None else self.scan.name or None
            wrong = "the call does not end" if self.scan is not None else "a call is a JSON object"
            if self.scan is not None and self.scan.done:
                wrong = "something follows the call's JSON"
            self.calls.append(InvalidToolCall(name, self.raw + junk, wrong))
            return
        call = parse_call(self.scan, self.raw)
        if isinstance(call, ToolCall) and not self._emitted:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            name = None if self._name_emitted else call.name
            self.deltas.append(ToolCallDelta(len(self.calls), name, arguments))
        self.calls.append(call)


def overlap(text: str, marker: str) -> int:
    """The number of characters at the end of the text that may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


SPACE = " \t\r\n"


class HermesReader(ToolCallReader):
    """`<tool_call>{...}</tool_call>`, any number of times, with text around them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._state = "text"  # then "open", "call", "close"

    def step(self) -> bool:
        if self._state == "text":
            if not self.emit_text_before(self.OPEN):
                return False
            self._open()
        elif self._state == "open":
            body = self.rest.lstrip(SPACE)
            if not body:
                return False
            if body[0] == "{":
                self.rest, self.scan = body, CallScanner()
            self._state = "close" if self.scan is None else "call"
        elif self._state == "call":
            ended = self.read_object()
            self.emit_call()
            if not ended:
                return False
            self._state = "close"
        else:
            return self._close()
        return True

    def _open(self) -> None:
        self.begin_call()
        self._state = "open"

    def _close(self) -> bool:
        """Reads to the marker that ends the call, or to the next call if that marker is missing."""
        ends = [(self.rest.find(marker), marker) for marker in (self.CLOSE, self.OPEN)]
        place, marker = min((end for end in ends if end[0] >= 0), default=(-1, ""))
        if place < 0:
            return False
        self.end_call(self.rest[:place])
        self.rest = self.rest[place + len(marker) :]
        self._state = "text"
        if marker == self.OPEN:
            self._open()
        return True

    def end(self) -> None:
        if self._state == "call" and self.CLOSE in self.raw:
            # a string without end swallowed the text after the call
            self.raw, _, self.rest = self.raw.partition(self.CLOSE)
            self.end_call()
            self._state = "text"
            while self.step():
                pass
            self.end()
            return
        if self._state == "text":
            if self.rest:
                self.emit_text(self.rest)
        else:
            cut = self.rest[: len(self.rest) - overlap(self.rest, self.CLOSE)]
            self.end_call(cut if self.scan is not None else self.rest)
        self.rest = ""
        self.end_text()


class LlamaReader(ToolCallReader):
    """`{"name": ..., "parameters": {...}}` from the beginning, more after `;`. An object without
    these two keys is text."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._state = "start"  # then "call", "text"
        self._before = ""  # the text before the call, which may be text too

    def step(self) -> bool:
        if self._state == "start":
            return self._start()
        if self._state == "call":
            return self._call()
        if self.rest:
            self.emit_text(self.rest)
        self.rest = ""
        return False

    def _start(self) -> bool:
        body = self.rest.lstrip(SPACE + ";" if self.calls else SPACE)
        inner = body.removeprefix(self.TAG).lstrip(SPACE)
        if not inner or self.TAG.startswith(body):
            return False
        if inner[0] != "{":
            self._state, self.rest = "text", body if self.calls else self.rest
            return True
        self._before = self.rest[: len(self.rest) - len(inner)] if not self.calls else ""
        self._state, self.rest = "call", inner
        self.scan, self.raw = CallScanner(), ""
        self._called = False
        return True

    def _call(self) -> bool:
        assert self.scan is not None
        ended = self.read_object()
        if not self._called and self.scan.name and self.scan.has_arguments:
            scan, raw = self.scan, self.raw
            self.begin_call(scan)
            self.raw, self._called = raw, True
        if self._called:
            self.emit_call()
        if not ended:
            return False
        if self._called:
            self.end_call()
            self._state = "start"
        else:
            self._state, self.rest = "text", self._before + self.raw + self.rest
        return True

    def end(self) -> None:
        if self._state == "call" and self._called:
            self.end_call()
        elif self._state == "call":
            self.emit_text(self._before + self.raw)
        elif left := self.rest.strip(SPACE + ";") if self.calls else self.rest:
            self.emit_text(left)
        self.rest = ""
        self.end_text()


class MistralReader(ToolCallReader):
    """Text, then `[TOOL_CALLS]` with a list of calls, or with `name[ARGS]{...}` once for each."""

    OPEN = "[TOOL_CALLS]"

    def __init__(self) -> None:
        super().__init__()
        self._state = "text"  # then "open"; "list" and "call", or "name" and "arguments"; "junk"

    def step(self) -> bool:
        if self._state == "text":
            if not self.emit_text_before(self.OPEN):
                return False
            self.begin_call()
            self._state = "open"
            return True
        steps = {"open": self._open, "list": self._list, "name": self._name, "junk": self._junk}
        return steps.get(self._state, self._call)()

    def _open(self) -> bool:
        body = self.rest.lstrip(SPACE)
        if not body:
            return False
        self._state = "list" if body[0] == "[" else "name"
        self.rest = body[1:] if body[0] == "[" else body
        return True

    def _list(self) -> bool:
        self.rest = self.rest.lstrip(SPACE + ",")
        if not self.rest:
            return False
        if self.rest[0] == "{":
            self.begin_call(CallScanner())
            self._state = "call"
        elif self.rest[0] == "]":
            self._state, self.rest = "text", self.rest[1:]
        else:
            self.begin_call()
            self._state = "junk"
        return True

    def _name(self) -> bool:
        brace, marker = self.rest.find("{"), self.rest.find(self.OPEN)
        if marker >= 0 and not 0 <= brace < marker:
            self._state = "junk"
            return True
        if brace < 0:
            return False
        name = self.rest[:brace].partition("[")[0].strip()
        self.begin_call(CallScanner(f'{{"name": {json.dumps(name)}, "arguments": '))
        self.raw, self.rest = self.rest[:brace], self.rest[brace:]
        self._state = "arguments"
        return True

    def _call(self) -> bool:
        ended = self.read_object()
        self.emit_call()
        if ended:
            self.end_call()
            self._state = "list" if self._state == "call" else "text"
        return ended

    def _junk(self) -> bool:
        place = self.rest.find(self.OPEN)
        if place < 0:
            return False
        self.end_call(self.rest[:place])
        self.rest = self.rest[place:]
        self._state = "text"
        return True

    def end(self) -> None:
        if self._state == "text":
            if self.rest:
                self.emit_text(self.rest)
        elif self._state != "list":
            self.end_call(self.rest)
        self.rest = ""
        self.end_text()


_READERS: dict[ToolStyle, type[ToolCallReader]] = {
    ToolStyle.HERMES: HermesReader,
    ToolStyle.LLAMA: LlamaReader,
    ToolStyle.MISTRAL: MistralReader,
}


class ToolCallStream:
    """Separates text and calls while the model writes.

    A part of a marker is held back until it is complete or refuted. Deltas of a call begin once its
    name is known; whether the call is valid shows in `calls` when it has ended. The result does not
    depend on how the text is cut. Raises `InvalidRequest` for an unknown style.
    """

    def __init__(self, style: ToolStyle | str) -> None:
        self._reader = _READERS[known_style(style)]()

    @property
    def calls(self) -> list[AnyToolCall]:
        """The calls that have ended, in order."""
        return self._reader.calls

    def feed(self, text: str) -> list[AnyDelta]:
        """Reads more text. Returns the deltas that are now certain."""
        self._reader.rest += text
        while self._reader.step():
            pass
        return self._take()

    def finish(self) -> list[AnyDelta]:
        """Ends the text. Returns the deltas that were held back."""
        self._reader.end()
        return self._take()

    def _take(self) -> list[AnyDelta]:
        deltas, self._reader.deltas = self._reader.deltas, []
        return deltas


def parse_tool_calls(text: str, style: ToolStyle | str) -> tuple[str, list[AnyToolCall]]:
    """Separates a text from its tool calls: the text without calls and the white space around them,
    and the calls in order. Raises `InvalidRequest` for an unknown style.

    Example:
        >>> parse_tool_calls('Wait. <tool_call>{"name": "now"}</tool_call>', "hermes")
        ('Wait. ', [ToolCall(name='now', arguments={})])
    """
    stream = ToolCallStream(style)
    deltas = stream.feed(text) + stream.finish()
    text_before = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return text_before, stream.calls
