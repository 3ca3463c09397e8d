"""What the readers of every style share: text and calls, told as soon as they are certain."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ragcache.structured.call_scan import CallScan, InvalidToolCall, ToolCall, call_of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call. index: its place among the calls. name: with its first delta. arguments: more
    of their JSON text."""

    index: int
    name: str | None
    arguments: str


Delta = TextDelta | ToolCallDelta
Call = ToolCall | InvalidToolCall


class CallReader:
    """Takes text, and collects deltas and calls.

    A style's `step` reads what it can of `rest` and returns whether to go on at once; `end` takes
    what is left when no more text comes.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.deltas: list[Delta] = []
        self.rest = ""  # not yet read
        self.raw = ""  # the call under way, as it was written
        self.scan: CallScan | None = None
        self._blank = ""  # white space that text or a call may follow
        self._spoken = False  # whether text came since the beginning or the last call
        self._named = False
        self._sent = 0  # characters of the arguments

    def step(self) -> bool:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Tells text; white space at the beginning and after a call only where text follows."""
        text = self._blank + text
        self._blank = ""
        if not self._spoken and not text.strip():
            self._blank = text
            return
        if not self._spoken and self.calls:
            text = text.lstrip()
        self._spoken = True
        self.deltas.append(TextDelta(text))

    def say_before(self, marker: str) -> bool:
        """Tells the text before a marker and takes both. Without one, tells what cannot be the
        beginning of one. Returns whether it was there."""
        before, found, after = self.rest.partition(marker)
        kept = after if found else before[len(before) - overlap(before, marker) :]
        said = before if found else before[: len(before) - len(kept)]
        if said:
            self.say(said)
        self.rest = kept
        return bool(found)

    def close_text(self) -> None:
        """Text ends: white space alone is an answer only where no call is."""
        if self._blank and not self.calls:
            self.deltas.append(TextDelta(self._blank))
        self._blank = ""

    def begin_call(self, scan: CallScan | None = None) -> None:
        self._blank, self._spoken = "", False
        self._named, self._sent = False, 0
        self.raw, self.scan = "", scan

    def read_object(self) -> bool:
        """Reads on in the call's object. Returns whether it ended."""
        assert self.scan is not None
        taken = self.scan.read(self.rest)
        self.raw += self.rest[:taken]
        self.rest = self.rest[taken:]
        return self.scan.done

    def tell(self) -> None:
        """Tells what is new of the call, once its name is known."""
        assert self.scan is not None
        if not self.scan.name:
            return
        new = self.scan.arguments[self._sent :]
        if new or not self._named:
            name = None if self._named else self.scan.name
            self.deltas.append(ToolCallDelta(len(self.calls), name, new))
        self._named, self._sent = True, self._sent + len(new)

    def end_call(self, junk: str = "") -> None:
        """Takes the call. junk: what stands between it and its end."""
        if self.scan is None or not self.scan.done or junk.strip():
            name = None if self.scan is None else self.scan.name or None
            wrong = "the call does not end" if self.scan is not None else "a call is a JSON object"
            if self.scan is not None and self.scan.done:
                wrong = "something follows the call's JSON"
            self.calls.append(InvalidToolCall(name, self.raw + junk, wrong))
            return
        call = call_of(self.scan, self.raw)
        if isinstance(call, ToolCall) and not self._sent:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            name = None if self._named else call.name
            self.deltas.append(ToolCallDelta(len(self.calls), name, arguments))
        self.calls.append(call)


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
