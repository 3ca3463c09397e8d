"""LangChain's messages in the form of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragcache.errors import InvalidRequest

# Blocks of an assistant's content that say nothing to the model: thoughts that its template leaves
# out, and calls, which stand in `tool_calls`.
_UNSAID = frozenset(
    "thinking redacted_thinking reasoning tool_use tool_call tool_call_chunk invalid_tool_call "
    "function_call input_json_delta".split()
)
_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
)
_TEXTS = ("text", "text-plain")


def conversation(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages as `RagCache.chat` takes them.

    Raises `InvalidRequest` for a kind of message that a chat has no role for, and for images and
    other media.
    """
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: BaseMessage, number: int) -> dict[str, Any]:
    told: dict[str, Any] = {"role": _role(message, number), "content": _text(message, number)}
    if message.name:
        told["name"] = message.name
    if isinstance(message, ToolMessage):
        told["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        told["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    return told


def _role(message: BaseMessage, number: int) -> str:
    if isinstance(message, ChatMessage):
        return message.role  # an unknown one is refused with the others
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise InvalidRequest(
        f"message {number} is a {type(message).__name__}, for which a chat has no role; messages: "
        "human, ai, system, tool"
    )


def _text(message: BaseMessage, number: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    said = [_block(block, number, isinstance(message, AIMessage)) for block in content]
    return "".join(said)


def _block(block: str | dict[str, Any], number: int, assistant: bool) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    text = block.get("text")
    if kind in _TEXTS and isinstance(text, str):
        return text
    if assistant and kind in _UNSAID:
        return ""
    raise InvalidRequest(
        f"message {number} holds a block of type {kind!r:.80}; only text is served, no images or "
        "other media"
    )
