"""The output format of a chat: `response_format`, tools, and reading the model's tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from ragcache import Generation, structured
from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar, TextDelta, ToolCallStream, ToolStyle
from ragcache_api.http.openai.protocol import ChatRequest, Tool, invalid, unsupported

_PLAIN = {"name", "description", "parameters"}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a chat's text may be. tools: None if none may be called. style: how the model writes
    calls."""

    tools: list[dict[str, Any]] | None
    style: ToolStyle | None
    grammar: Grammar | None

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Any) -> OutputFormat:
        """Raises `InvalidRequest` or `HTTPProblem` (400)."""
        given = body.model_dump(include={"response_format", "tools", "tool_choice"}, by_alias=True)
        grammar = Grammar.response_format(given["response_format"])
        try:
            choice = structured.resolve_tool_choice(given["tool_choice"], given["tools"] or ())
        except InvalidRequest as error:
            raise invalid("tool_choice", str(error)) from None
        if choice == "none":
            return cls(None, None, grammar)
        if body.collection is not None:
            raise unsupported("tools", "tools and collection do not go together")
        style = structured.tool_style(tokenizer)
        if style is None:
            raise unsupported("tools", "this model's chat template has no tool calls")
        tools = [_plain_tool(tool) for tool in body.tools or ()]
        if choice != "auto":
            grammar = structured.tool_call_grammar(tools, choice, style=style)
        return cls(tools, style, grammar)

    def apply(self, generation: Generation) -> Generation:
        """Options that generate text of this format."""
        if self.grammar is not None:
            generation = replace(generation, grammar=self.grammar)
        if self.style is not None and self.style.special:
            generation = replace(generation, skip_special_tokens=False)
        return generation

    def reader(self) -> DeltaReader:
        """A reader for the text of one choice."""
        return DeltaReader(None if self.style is None else ToolCallStream(self.style))


class DeltaReader:
    """Turns text into the fields of OpenAI's deltas, without white space before the first text."""

    def __init__(self, calls: ToolCallStream | None) -> None:
        self._calls = calls
        self._begun = False
        self.called = 0

    def feed(self, text: str) -> dict[str, Any]:
        """Takes more text; returns the fields that are certain."""
        if self._calls is not None:
            return self._fields(self._calls.feed(text))
        return self._text(text)

    def finish(self) -> dict[str, Any]:
        """The fields of text that was held back."""
        return {} if self._calls is None else self._fields(self._calls.finish())

    def finish_reason(self, reason: str) -> str:
        """`tool_calls` if the model called any, else the reason itself."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _text(self, text: str) -> dict[str, Any]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return {"content": text} if text else {}

    def _fields(self, deltas: Iterable[Any]) -> dict[str, Any]:
        text, calls = "", []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                text += delta.text
                continue
            call: dict[str, Any] = {"index": delta.index}
            call["function"] = {"arguments": delta.arguments}
            if delta.name is not None:
                call |= {"id": f"call_{uuid4().hex[:24]}", "type": "function"}
                call["function"]["name"] = delta.name
            self.called = max(self.called, delta.index + 1)
            calls.append(call)
        return self._text(text) | ({"tool_calls": calls} if calls else {})


def join_deltas(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message of all deltas."""
    text, calls = "", dict[int, dict[str, Any]]()
    for delta in deltas:
        text += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            call |= {key: part[key] for key in ("id", "type") if key in part}
            call["function"]["name"] += part["function"].get("name", "")
            call["function"]["arguments"] += part["function"]["arguments"]
    if not calls:
        return {"content": text, "refusal": None}
    return {"content": text or None, "refusal": None, "tool_calls": [*calls.values()]}


def _plain_tool(tool: Tool) -> dict[str, Any]:
    """For Hugging Face's chat templates."""
    function = {key: value for key, value in tool.function.items() if key in _PLAIN}
    if not isinstance(function.get("name"), str):
        raise invalid("tools", "a tool has no name")
    return {"type": "function", "function": function}
