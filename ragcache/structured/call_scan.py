"""The JSON object of one tool call, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What began as a call and is none. name: where it can be told. text: as the model wrote it,
    without the markers around it. error: what is wrong with it."""

    name: str | None
    text: str
    error: str


class CallScan:
    """Reads `{"name": ..., "arguments": {...}}` up to its closing brace.

    It knows strings and brackets only: whether the text is JSON is told at its end.
    """

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self.depth = 0
        self.keys: list[str] = []
        self.name: str | None = None
        self._string: int | None = None  # where the string began that is being read
        self._escaped = False
        self._at_value = False
        self._begin: int | None = None
        self._end: int | None = None

    @property
    def has_arguments(self) -> bool:
        return any(key in self.keys for key in ARGUMENTS)

    @property
    def arguments(self) -> str:
        """The text of the arguments as far as it was read; "" if they are no object."""
        return "" if self._begin is None else self.text[self._begin : self._end]

    def read(self, text: str) -> int:
        """Takes text until the object ends. Returns how many characters were taken."""
        begin = len(self.text)
        self.text += text
        for place in range(begin, len(self.text)):
            self._take(self.text[place], place)
            if self.done:
                self.text = self.text[: place + 1]
                return place + 1 - begin
        return len(text)

    def _take(self, char: str, place: int) -> None:
        if self._string is not None:
            self._in_string(char, place)
        elif char == '"':
            self._string = place
        elif char in "{[":
            self._descend(char, place)
        elif char in "}]":
            self._ascend(place)
        elif self.depth == 1 and char in ":,":
            self._at_value = char == ":"

    def _in_string(self, char: str, place: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            assert self._string is not None
            begin, self._string = self._string, None
            if self.depth == 1:
                self._end_string(_string(self.text[begin : place + 1]))

    def _end_string(self, value: str) -> None:
        """A string of the object itself ended: a key, or a key's value."""
        if not self._at_value:
            self.keys.append(value)
        elif self.keys and self.keys[-1] == "name" and self.name is None:
            self.name = value

    def _descend(self, char: str, place: int) -> None:
        wanted = self._at_value and self.keys and self.keys[-1] in ARGUMENTS
        if self.depth == 1 and wanted and char == "{" and self._begin is None:
            self._begin = place
        self.depth += 1

    def _ascend(self, place: int) -> None:
        self.depth -= 1
        if self.depth == 1 and self._begin is not None and self._end is None:
            self._end = place + 1
        self.done = self.depth == 0


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        return literal


def call_of(scan: CallScan, raw: str) -> ToolCall | InvalidToolCall:
    """What was read. raw: as the model wrote it."""
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
