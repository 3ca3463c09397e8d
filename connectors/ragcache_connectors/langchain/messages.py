"""LangChain's messages in the form of chat templates."""

# MERGED ragcache_connectors.langchain.replies: Answers as LangChain's messages: whole, or in
#   chunks while they come.
# MERGED ragcache_connectors.langchain.usage: What a request read and wrote, counted as
#   LangChain counts it.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ragcache.errors import InvalidRequest

if TYPE_CHECKING:
    from ragcache import Answer
    from ragcache.engine import Choice, TokenDelta
    from ragcache.structured import TextDelta, ToolCallDelta
    from ragcache_connectors.langchain.call_options import Call
    from ragcache_connectors.langchain.model_info import Served


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


def result(answer: Answer, call: Call, served: Served) -> ChatResult:
    """All choices. The first message carries the usage of the whole request, so that a sum over
    messages counts nothing twice."""
    generations = []
    for number, choice in enumerate(answer.choices):
        message = _message_replies(choice, call)
        if number == 0:
            message.usage_metadata = usage(answer)
        reason = _reason(choice.finish_reason, bool(message.tool_calls))
        message.response_metadata = _metadata(answer, reason, served)
        if call.logprobs:
            message.response_metadata["logprobs"] = served.logprobs(choice.chosen)
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations, llm_output={"model_name": served.name})


def _message_replies(choice: Choice, call: Call) -> AIMessage:
    if call.style is None:
        return AIMessage(content=choice.text.strip())
    from ragcache.structured import ToolCall as Called
    from ragcache.structured import parse_tool_calls

    text, calls = parse_tool_calls(choice.text, call.style)
    right: list[ToolCall] = []
    wrong: list[InvalidToolCall] = []
    for each in calls:
        if isinstance(each, Called):
            right.append(tool_call(name=each.name, args=dict(each.arguments), id=_call_id()))
        else:
            wrong.append(
                invalid_tool_call(name=each.name, args=each.text, id=_call_id(), error=each.error)
            )
    return AIMessage(content=text.strip(), tool_calls=right, invalid_tool_calls=wrong)


def _reason(finish_reason: str, called: bool) -> str:
    """An answer that a limit cut off did not end with its calls."""
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


def _metadata(answer: Answer, reason: str, served: Served) -> dict[str, Any]:
    return {"finish_reason": reason, "model_name": served.name, "ragcache": told(answer)}


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return uuid4().hex[:9]


class Chunks:
    """The first choice as chunks: each holds text or a part of a call, never both, since content
    in LangChain's version 1 has no place for both in one."""

    def __init__(self, call: Call, served: Served) -> None:
        self._call, self._served = call, served
        self._trim = Trim()
        self._spoken = False
        self._first = 0
        self._parts: dict[int, str] = {}  # of each call, the arguments that were told
        self._calls = None
        if call.style is not None:
            from ragcache.structured import ToolCallStream

            self._calls = ToolCallStream(call.style)

    def read(self, piece: TokenDelta) -> Iterator[ChatGenerationChunk]:
        """What a piece makes certain. Log-probabilities come with their token, though its text may
        be held back."""
        if piece.choice:
            return
        chunks = list(self._text(piece.text) if self._calls is None else self._deltas(piece.text))
        if self._call.logprobs and piece.chosen is not None:
            chunks = chunks or [_chunk("")]
            chunks[0].generation_info = {"logprobs": self._served.logprobs([piece.chosen])}
        yield from chunks

    def end(self, answer: Answer) -> Iterator[ChatGenerationChunk]:
        """What was held back, and last the chunk that alone tells usage and metadata."""
        from ragcache.structured import ToolCall as Called

        called = False
        if self._calls is not None:
            yield from self._said(self._calls.finish())
            yield from self._refusals()
            called = any(isinstance(each, Called) for each in self._calls.calls)
        reason = _reason(answer.finish_reason, called)
        last = AIMessageChunk(
            content="",
            usage_metadata=usage(answer),
            response_metadata=_metadata(answer, reason, self._served),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last)

    def _text(self, text: str) -> Iterator[ChatGenerationChunk]:
        if shown := self._trim.feed(text):
            self._spoken = True
            yield _chunk(shown)

    def _deltas(self, text: str) -> Iterator[ChatGenerationChunk]:
        assert self._calls is not None
        return self._said(self._calls.feed(text))

    def _said(self, deltas: Iterable[TextDelta | ToolCallDelta]) -> Iterator[ChatGenerationChunk]:
        from ragcache.structured import TextDelta

        for delta in deltas:
            if isinstance(delta, TextDelta):
                yield from self._text(delta.text)
            else:
                yield self._part(delta.index, delta.name, delta.arguments)

    def _part(self, index: int, name: str | None, arguments: str) -> ChatGenerationChunk:
        if not self._parts:
            self._first = int(self._spoken)
        begins = index not in self._parts
        self._parts[index] = self._parts.get(index, "") + arguments
        # Content in version 1 numbers text and calls together, and LangChain joins what has one
        # number. It counts texts by twos, from 0, or from 1 where a call comes first.
        place = 2 * index + self._first
        part = tool_call_chunk(
            name=name, args=arguments, id=_call_id() if begins else None, index=place
        )
        return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[part]))

    def _refusals(self) -> Iterator[ChatGenerationChunk]:
        """More of each call that is invalid: what keeps LangChain from mending its arguments, which
        would make a call of it that somebody runs."""
        from ragcache.structured import InvalidToolCall as Invalid

        assert self._calls is not None
        for index, call in enumerate(self._calls.calls):
            if isinstance(call, Invalid):
                told = self._parts.get(index)
                if told is None:
                    yield self._part(index, call.name, call.text + _spoiling(call.text))
                else:
                    yield self._part(index, None, _spoiling(told))


def _spoiling(arguments: str) -> str:
    """What to write behind arguments so that LangChain cannot mend them to an object: nothing, or
    the end of a string that is open, and a bracket that closes nothing."""
    return next(
        end + bracket
        for end in ("", '"', '\\"')
        for bracket in ("", "]", "}")
        if not _mendable(arguments + end + bracket)
    )


def _mendable(arguments: str) -> bool:
    from langchain_core.utils.json import parse_partial_json

    try:
        return not arguments or isinstance(parse_partial_json(arguments), dict)
    except ValueError:
        return False


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


class Trim:
    """Leaves out white space around a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """The text that is now certain to belong: white space waits for what follows it."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def usage(answer: Answer) -> UsageMetadata:
    """Tokens of the whole request: its prompt once, and the tokens of all its choices.

    cache_read: their states were in the store, or an earlier request had left them. cache_creation:
    their states were encoded for this request and kept. Both are parts of input_tokens.
    """
    reuse = answer.reuse
    written = sum(len(choice.token_ids) for choice in answer.choices)
    return UsageMetadata(
        input_tokens=reuse.prompt_tokens,
        output_tokens=written,
        total_tokens=reuse.prompt_tokens + written,
        input_token_details=InputTokenDetails(
            cache_read=reuse.cached_tokens + reuse.shared_tokens,
            cache_creation=reuse.created_tokens,
        ),
    )


def told(answer: Answer) -> dict[str, Any]:
    """What was recognized, and what it saved: plain values, for `response_metadata["ragcache"]`."""
    return {
        "mode": answer.mode,
        "sources": [asdict(source) for source in answer.sources],
        "reuse": asdict(answer.reuse),
        "timings": asdict(answer.timings),
    }
