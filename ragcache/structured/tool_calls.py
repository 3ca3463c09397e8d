"""Tool calls read from a model's text, whole or while it comes."""

from __future__ import annotations

import json

from ragcache.structured.call_reader import Call, CallReader, Delta, TextDelta, overlap
from ragcache.structured.call_scan import CallScan
from ragcache.structured.tools import ToolStyle, known_style

SPACE = " \t\r\n"


class HermesReader(CallReader):
    """`<tool_call>{...}</tool_call>`, any number of times, with text around them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._place = "text"  # then "open", "call", "close"

    def step(self) -> bool:
        if self._place == "text":
            if not self.say_before(self.OPEN):
                return False
            self._open()
        elif self._place == "open":
            body = self.rest.lstrip(SPACE)
            if not body:
                return False
            if body[0] == "{":
                self.rest, self.scan = body, CallScan()
            self._place = "close" if self.scan is None else "call"
        elif self._place == "call":
            ended = self.read_object()
            self.tell()
            if not ended:
                return False
            self._place = "close"
        else:
            return self._close()
        return True

    def _open(self) -> None:
        self.begin_call()
        self._place = "open"

    def _close(self) -> bool:
        """To the marker that ends the call, or to the next call where it was left out."""
        ends = [(self.rest.find(marker), marker) for marker in (self.CLOSE, self.OPEN)]
        place, marker = min((end for end in ends if end[0] >= 0), default=(-1, ""))
        if place < 0:
            return False
        self.end_call(self.rest[:place])
        self.rest = self.rest[place + len(marker) :]
        self._place = "text"
        if marker == self.OPEN:
            self._open()
        return True

    def end(self) -> None:
        if self._place == "call" and self.CLOSE in self.raw:
            # a string that never ended took what came after the call for its own
            self.raw, _, self.rest = self.raw.partition(self.CLOSE)
            self.end_call()
            self._place = "text"
            while self.step():
                pass
            self.end()
            return
        if self._place == "text":
            if self.rest:
                self.say(self.rest)
        else:
            cut = self.rest[: len(self.rest) - overlap(self.rest, self.CLOSE)]
            self.end_call(cut if self.scan is not None else self.rest)
        self.rest = ""
        self.close_text()


class LlamaReader(CallReader):
    """`{"name": ..., "parameters": {...}}` from the beginning, more after `;`. An object without
    these two keys is text."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._place = "start"  # then "call", "text"
        self._before = ""  # what stands before the call, in case that it is text

    def step(self) -> bool:
        if self._place == "start":
            return self._start()
        if self._place == "call":
            return self._call()
        if self.rest:
            self.say(self.rest)
        self.rest = ""
        return False

    def _start(self) -> bool:
        body = self.rest.lstrip(SPACE + ";" if self.calls else SPACE)
        inner = body.removeprefix(self.TAG).lstrip(SPACE)
        if not inner or self.TAG.startswith(body):
            return False
        if inner[0] != "{":
            self._place, self.rest = "text", body if self.calls else self.rest
            return True
        self._before = self.rest[: len(self.rest) - len(inner)] if not self.calls else ""
        self._place, self.rest = "call", inner
        self.scan, self.raw = CallScan(), ""
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
            self.tell()
        if not ended:
            return False
        if self._called:
            self.end_call()
            self._place = "start"
        else:
            self._place, self.rest = "text", self._before + self.raw + self.rest
        return True

    def end(self) -> None:
        if self._place == "call" and self._called:
            self.end_call()
        elif self._place == "call":
            self.say(self._before + self.raw)
        elif left := self.rest.strip(SPACE + ";") if self.calls else self.rest:
            self.say(left)
        self.rest = ""
        self.close_text()


class MistralReader(CallReader):
    """Text, then `[TOOL_CALLS]` with a list of calls, or with `name[ARGS]{...}` once for each."""

    OPEN = "[TOOL_CALLS]"

    def __init__(self) -> None:
        super().__init__()
        self._place = "text"  # then "open"; "list" and "call", or "name" and "arguments"; "junk"

    def step(self) -> bool:
        if self._place == "text":
            if not self.say_before(self.OPEN):
                return False
            self.begin_call()
            self._place = "open"
            return True
        if self._place == "open":
            return self._open()
        if self._place == "list":
            return self._list()
        if self._place == "name":
            return self._name()
        if self._place == "junk":
            return self._junk()
        return self._call()

    def _open(self) -> bool:
        body = self.rest.lstrip(SPACE)
        if not body:
            return False
        self._place = "list" if body[0] == "[" else "name"
        self.rest = body[1:] if body[0] == "[" else body
        return True

    def _list(self) -> bool:
        self.rest = self.rest.lstrip(SPACE + ",")
        if not self.rest:
            return False
        if self.rest[0] == "{":
            self.begin_call(CallScan())
            self._place = "call"
        elif self.rest[0] == "]":
            self._place, self.rest = "text", self.rest[1:]
        else:
            self.begin_call()
            self._place = "junk"
        return True

    def _name(self) -> bool:
        brace, marker = self.rest.find("{"), self.rest.find(self.OPEN)
        if marker >= 0 and not 0 <= brace < marker:
            self._place = "junk"
            return True
        if brace < 0:
            return False
        scan = CallScan()
        name = self.rest[:brace].partition("[")[0].strip()
        scan.read(f'{{"name": {json.dumps(name)}, "arguments": ')
        self.begin_call(scan)
        self.raw, self.rest = self.rest[:brace], self.rest[brace:]
        self._place = "arguments"
        return True

    def _call(self) -> bool:
        assert self.scan is not None
        in_list = self._place == "call"
        ended = self.read_object() if in_list else self._read_arguments()
        self.tell()
        if ended:
            self.end_call()
            self._place = "list" if in_list else "text"
        return ended

    def _read_arguments(self) -> bool:
        """The object of arguments alone; the brace around it is ours."""
        scan = self.scan
        assert scan is not None
        for place, char in enumerate(self.rest):
            scan.read(char)
            if scan.depth == 1:
                self.raw, self.rest = self.raw + self.rest[: place + 1], self.rest[place + 1 :]
                scan.read("}")
                return True
        self.raw, self.rest = self.raw + self.rest, ""
        return False

    def _junk(self) -> bool:
        place = self.rest.find(self.OPEN)
        if place < 0:
            return False
        self.end_call(self.rest[:place])
        self.rest = self.rest[place:]
        self._place = "text"
        return True

    def end(self) -> None:
        if self._place == "text":
            if self.rest:
                self.say(self.rest)
        elif self._place != "list":
            self.end_call(self.rest)
        self.rest = ""
        self.close_text()


_READERS: dict[ToolStyle, type[CallReader]] = {
    ToolStyle.HERMES: HermesReader,
    ToolStyle.LLAMA: LlamaReader,
    ToolStyle.MISTRAL: MistralReader,
}


class ToolCallStream:
    """Separates text and calls while the model writes.

    Half a marker is held back until it is known what it is. The deltas of a call come once its name
    is known, which does not make it a valid one: `calls` tells that when it has ended. However the
    text is cut into pieces, text and calls are the same. Raises `InvalidRequest` for the style.
    """

    def __init__(self, style: ToolStyle | str) -> None:
        self._reader = _READERS[known_style(style)]()

    @property
    def calls(self) -> list[Call]:
        """The calls that have ended, in order."""
        return self._reader.calls

    def feed(self, text: str) -> list[Delta]:
        """Takes more text. Returns what is now certain."""
        self._reader.rest += text
        while self._reader.step():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the text. Returns what was held back."""
        self._reader.end()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._reader.deltas = self._reader.deltas, []
        return deltas


def parse_tool_calls(text: str, style: ToolStyle | str) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls. White space around calls is left out; a call that
    cannot be read is reported as an `InvalidToolCall`. Raises `InvalidRequest` for the style."""
    stream = ToolCallStream(style)
    deltas = stream.feed(text) + stream.finish()
    said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return said, stream.calls
