from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragcache.errors import InvalidRequest
from ragcache_connectors.langchain.messages import conversation


def test_each_kind_of_message_gets_its_role() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "x1", "type": "tool_call"}
    told = conversation(
        [
            SystemMessage("be brief"),
            HumanMessage("1 + 1?", name="ann"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("2", tool_call_id="x1", name="add"),
            ChatMessage("so?", role="user"),
        ]
    )
    assert told == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1?", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "x1", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "x1"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (HumanMessage([{"type": "text", "text": "a"}, "b"]), "ab"),
        (HumanMessage([{"type": "text", "text": "a", "cache_control": {"type": "x"}}]), "a"),
        (AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]), "a"),
        (AIMessage([{"type": "tool_use", "name": "f", "input": {}, "id": "1"}]), ""),
        (HumanMessage([]), ""),
    ],
)
def test_blocks_of_text_are_joined(message: BaseMessage, text: str) -> None:
    assert conversation([message])[0]["content"] == text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image", "base64": "AA", "mime_type": "image/png"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "thinking", "thinking": "a human does not think aloud"},
        {"type": "text", "text": 3},
        {},
    ],
)
def test_what_is_no_text_is_refused_with_its_place(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="message 2 holds a block"):
        conversation([HumanMessage("look"), HumanMessage([block])])


def test_a_message_without_a_role_in_chats_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="message 1 is a FunctionMessage"):
        conversation([FunctionMessage("2", name="add")])
