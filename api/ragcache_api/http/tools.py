"""Tools of chats: what the model is told of them, and the calls that it writes as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ragcache import GenerationParams, structured
from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar, TextDelta, ToolCallParser, ToolStyle
from ragcache_api.http.bodies import ChatRequest, Tool, invalid, unsupported

_PLAIN = {"name", "description", "parameters"}  # fields of a tool that chat templates know


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The tools of a chat, and how its answer calls them."""

    tools: list[dict[str, Any]] | None
    """Functions that the model may call, for the chat template."""
    style: ToolStyle | None
    """Syntax in which the model writes calls, if it may call functions."""
    grammar: Grammar | None
    """Grammar of the calls, if the model must call, or may call once at most."""
    offered: tuple[str, ...] = ()
    """Names of the tools that a call without markers may name. Empty if the answer has a form."""

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Any) -> OutputFormat:
        """Derive the form from a request.

        A model without tool calls answers in text. It only refuses a call that is required.

        Raises:
            HTTPProblem: (400) A tool or the choice cannot be used.
            InvalidRequest: A call must fit a schema that no grammar can express.
        """
        given = body.model_dump(include={"tools", "tool_choice"}, by_alias=True)
        try:
            choice = structured.resolve_tool_choice(given["tool_choice"], given["tools"] or ())
        except InvalidRequest as error:
            raise invalid("tool_choice", str(error)) from None
        if choice == "none":
            return cls(None, None, None)
        tools = [plain_tool(tool) for tool in body.tools or ()]
        offered = () if body.form_options() else structured.tool_names(tools)
        style = structured.tool_style(tokenizer)
        if style is None:
            if choice != "auto":
                detail = "this model's chat template has no tool calls, so none can be required"
                raise unsupported("tool_choice", f"{detail}; leave tool_choice out")
            return cls(None, None, None, offered)
        grammar, parallel = None, body.parallel_tool_calls is not False
        if choice != "auto" or not parallel:
            grammar = structured.tool_call_grammar(tools, choice, style=style, parallel=parallel)
        return cls(tools, style, grammar, offered)

    def apply(self, generation: GenerationParams) -> GenerationParams:
        """Return parameters that generate text of this format.

        The grammar of calls replaces another form of the answer.
        """
        if self.grammar is not None:
            others = dict.fromkeys(generation.forms)
            generation = generation.replace(**others | {"grammar": self.grammar})
        if self.style is not None and self.style.special:
            generation = generation.replace(skip_special_tokens=False)
        return generation

    def reader(self) -> DeltaReader:
        """Return a reader for the text of one choice."""
        if self.style is None and not self.offered:
            return DeltaReader(None)
        return DeltaReader(ToolCallParser(self.style, self.offered))


class DeltaReader:
    """Turns text into the fields of OpenAI's deltas, and strips leading white space."""

    def __init__(self, calls: ToolCallParser | None) -> None:
        self._calls = calls
        self.content = ""
        """Text that the fields had so far."""
        self.called = 0

    def feed(self, text: str) -> dict[str, Any]:
        """Take more text, and return the fields that can be sent now."""
        return self._text(text) if self._calls is None else self._fields(self._calls.feed(text))

    def finish(self) -> dict[str, Any]:
        """Return the fields of text that was held back."""
        return {} if self._calls is None else self._fields(self._calls.finish())

    def finish_reason(self, reason: str) -> str:
        """Replace the reason `stop` by `tool_calls` if the model called a function."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _text(self, text: str) -> dict[str, Any]:
        text = text if self.content else text.lstrip()
        self.content += text
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
    """Join deltas into one message."""
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


def plain_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool for Hugging Face's chat templates. Raises `HTTPProblem` (400)."""
    function = {key: value for key, value in tool.function.items() if key in _PLAIN}
    if not isinstance(function.get("name"), str):
        raise invalid("tools", "a tool has no name")
    return {"type": "function", "function": function}
