"""Tools and formats of chats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ragcache import Generation
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.openai.protocol import ChatRequest
from ragcache_api.http.openai.tools import OutputFormat, join_deltas

HERMES = SimpleNamespace(chat_template="{{ tools }}<tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "find", "strict": True,
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}  # fmt: skip
CALL = 'Wait. <tool_call>\n{"name": "find", "arguments": {"word": "boat"}}\n</tool_call>'


def shape(tokenizer: Any = HERMES, **body: Any) -> OutputFormat:
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return OutputFormat.of(ChatRequest.model_validate(given | body), tokenizer)


def test_calls_are_read_from_the_models_text() -> None:
    reader = shape(tools=[TOOL]).reader()
    message = join_deltas([reader.feed(CALL), reader.finish()])
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"word": "boat"}'}
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert message["content"].strip() == "Wait."
    assert reader.finish_reason("stop") == "tool_calls"


def test_deltas_say_the_same_however_the_text_is_cut() -> None:
    whole = shape(tools=[TOOL]).reader()
    expected = join_deltas([whole.feed(CALL), whole.finish()])
    reader = shape(tools=[TOOL]).reader()
    cut = join_deltas([*(reader.feed(char) for char in CALL), reader.finish()])
    for message in (expected, cut):
        del message["tool_calls"][0]["id"]
    assert cut == expected


def test_text_without_tools_is_text() -> None:
    reader = shape().reader()
    assert join_deltas([reader.feed("  <tool_call>"), reader.finish()])["content"] == "<tool_call>"
    assert reader.finish_reason("length") == "length"


def test_formats_and_choices_become_grammars() -> None:
    assert shape().grammar is None
    assert shape(response_format={"type": "text"}).grammar is None
    plain = Generation()
    assert shape(response_format={"type": "json_object"}).apply(plain).grammar is not None
    assert shape(tools=[TOOL]).grammar is None
    assert shape(tools=[TOOL], tool_choice="none").tools is None
    named = {"type": "function", "function": {"name": "find"}}
    for choice in ("required", named):
        assert shape(tools=[TOOL], tool_choice=choice).grammar is not None
    other = {"type": "function", "function": {"name": "lose"}}
    with pytest.raises(HTTPProblem, match="lose"):
        shape(tools=[TOOL], tool_choice=other)


def test_a_model_without_tools_refuses_them() -> None:
    with pytest.raises(HTTPProblem, match="no tool calls"):
        shape(SimpleNamespace(chat_template="{{ messages }}"), tools=[TOOL])


def test_templates_get_what_they_know() -> None:
    [tool] = shape(tools=[TOOL]).tools or []
    assert set(tool["function"]) == {"name", "parameters"}
