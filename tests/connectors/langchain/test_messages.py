from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from ragcache import GenerationParams, RagCache
from ragcache.errors import InvalidRequest
from ragcache.structured import ToolStyle
from ragcache_connectors.langchain.call_options import CallOptions, ModelInfo
from ragcache_connectors.langchain.messages import (
    ChunkBuilder,
    WhitespaceTrimmer,
    chat_result,
    conversation,
    invalidating_suffix,
)


def test_each_kind_of_message_gets_its_role() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "x1", "type": "tool_call"}
    values = conversation(
        [
            SystemMessage("be brief"),
            HumanMessage("1 + 1?", name="ann"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("2", tool_call_id="x1", name="add"),
            ChatMessage("so?", role="user"),
        ]
    )
    assert values == [
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
def test_media_are_refused_with_the_number_of_their_message(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="message 2 holds a block"):
        conversation([HumanMessage("look"), HumanMessage([block])])


def test_a_message_without_a_chat_role_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="message 1 is a FunctionMessage"):
        conversation([FunctionMessage("2", name="add")])


pieces = st.lists(st.text(alphabet=" \n\tab", max_size=4), max_size=12)


@given(pieces)
def test_text_is_held_only_for_trailing_white_space(some: list[str]) -> None:
    trim, seen = WhitespaceTrimmer(), ""
    for n, piece in enumerate(some, start=1):
        seen += trim.feed(piece)
        assert seen == "".join(some[:n]).strip()


values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a\\"]}{[', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=2), values), st.data())
def test_langchain_mends_no_invalidated_call(arguments: Any, data: st.DataObject) -> None:
    text = json.dumps(arguments)
    cut = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", " junk"]))
    parts = [cut, invalidating_suffix(cut)]
    chunks = [
        AIMessageChunk(content="", tool_call_chunks=[tool_call_chunk(args=part, index=0)])
        for part in parts
    ]
    whole = chunks[0] + chunks[1] + AIMessageChunk(content="", chunk_position="last")
    assert whole.tool_calls == []
    assert [call["args"] for call in whole.invalid_tool_calls] == ["".join(parts)]


class FixedTextModel(BaseChatModel):
    """Says a text, whole or in pieces, with content in version 1."""

    output_version: str = "v1"
    rag: Any
    text: str

    @property
    def _llm_type(self) -> str:
        return "written"

    @property
    def options(self) -> CallOptions:
        return CallOptions(
            GenerationParams(), "rooted", True, style=ToolStyle.HERMES, offered=("add",)
        )

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        answer = self.rag.chat([{"role": "user", "content": "x"}])
        [choice] = answer.choices
        written = replace(answer, choices=(replace(choice, text=self.text),))
        return chat_result(written, self.options, ModelInfo(self.rag))

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        chunks = ChunkBuilder(self.options, ModelInfo(self.rag))
        for begin in range(0, len(self.text), 7):
            piece: Any = SimpleNamespace(choice=0, text=self.text[begin : begin + 7])
            yield from chunks.feed(piece)
        yield from chunks.finish(self.rag.chat([{"role": "user", "content": "x"}]))


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"a {CALL} b {CALL} c", ["a", "call", "b", "call", "c"]),
        (f"{CALL} b {CALL}", ["call", "b", "call"]),
        (f"a {CALL}{CALL} b {CALL} c", ["a", "call", "call", "b", "call", "c"]),
        (f"{CALL}{CALL} b {CALL} c", ["call", "call", "b", "call", "c"]),
        (CALL[11:-12], ["call"]),
    ],
)
def test_streamed_text_and_calls_keep_their_places(
    rag: RagCache, written: str, said: list[str]
) -> None:
    chunks: list[Any] = list(FixedTextModel(rag=rag, text=written).stream("x"))
    whole = sum(chunks[1:], chunks[0])
    kinds = [block.get("text", "call").strip() for block in whole.content]
    assert kinds == said
    assert [call["args"] for call in whole.tool_calls] == [{"a": 1}] * said.count("call")


@pytest.mark.parametrize(
    "written",
    [
        CALL.replace("}}", "}} junk"),
        CALL.replace("1}", '1}, "arguments": {"a": 2}'),
        CALL.replace("1}}", "1"),
        *(
            pytest.param(written, marks=pytest.mark.slow)
            for written in (
                f"{CALL} {CALL[:-14]}",
                "<tool_call>no call</tool_call>",
                "<tool_call></tool_call>",
            )
        ),
    ],
)
def test_invalid_calls_are_invalid_in_a_stream_too(rag: RagCache, written: str) -> None:
    model = FixedTextModel(rag=rag, text=written)
    chunks: list[Any] = list(model.stream("x"))
    invoked, streamed = model.invoke("x"), sum(chunks[1:], chunks[0])
    assert len(streamed.invalid_tool_calls) == len(invoked.invalid_tool_calls) == 1
    assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in invoked.tool_calls]
