"""Conversion of LangChain's messages to conversations, and of answers to messages and chunks."""

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
    SystemMessage,
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
    from ragcache_connectors.langchain.call_options import CallOptions, ModelInfo

# Blocks of an assistant's content that the prompt leaves out: thoughts, and calls, which are also
# in `tool_calls`.
_OMITTED_BLOCKS = frozenset(
    "thinking redacted_thinking reasoning tool_use tool_call tool_call_chunk invalid_tool_call "
    "function_call input_json_delta".split()
)
_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
}
_TEXT_BLOCKS = ("text", "text-plain")


def conversation(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages to a conversation of `RagCache.chat`.

    Raises:
        InvalidRequest: A message has no role in a chat, or has images or other media.
    """
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: BaseMessage, number: int) -> dict[str, Any]:
    values: dict[str, Any] = {"role": _role(message, number), "content": _text(message, number)}
    if message.name:
        values["name"] = message.name
    if isinstance(message, ToolMessage):
        values["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        values["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    return values


def _role(message: BaseMessage, number: int) -> str:
    if isinstance(message, ChatMessage):
        return message.role  # an unknown one is refused with the others
    for kind, role in _ROLES.items():
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
    assistant = isinstance(message, AIMessage)
    return "".join(_block_text(block, number, assistant) for block in content)


def _block_text(block: str | dict[str, Any], number: int, assistant: bool) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    text = block.get("text")
    if kind in _TEXT_BLOCKS and isinstance(text, str):
        return text
    if assistant and kind in _OMITTED_BLOCKS:
        return ""
    raise InvalidRequest(
        f"message {number} holds a block of type {kind!r:.80}; only text is served, no images or "
        "other media"
    )


def chat_result(answer: Answer, options: CallOptions, info: ModelInfo) -> ChatResult:
    """Convert all choices of an answer.

    The first message has the usage of the whole request, so that a sum over messages counts each
    token once.
    """
    generations = []
    for number, choice in enumerate(answer.choices):
        message = _ai_message(choice, options)
        if number == 0:
            message.usage_metadata = usage_metadata(answer)
        called, reason = bool(message.tool_calls), choice.finish_reason
        message.response_metadata = _response_metadata(answer, reason, called, info)
        if options.logprobs:
            message.response_metadata["logprobs"] = info.logprobs(choice.chosen)
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations, llm_output={"model_name": info.name})


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Return the tokens of a request: its prompt once, and all choices.

    `cache_read` counts the prompt's tokens with states from the store or from an earlier request,
    `cache_creation` those encoded and kept for this request. `input_tokens` includes both.
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


def _ai_message(choice: Choice, options: CallOptions) -> AIMessage:
    if options.style is None and not options.offered:
        return AIMessage(content=choice.text.strip())
    from ragcache.structured import ToolCall as ParsedCall
    from ragcache.structured import parse_tool_calls

    text, calls = parse_tool_calls(choice.text, options.style, options.offered)
    valid, invalid = [], []
    for each in calls:
        if isinstance(each, ParsedCall):
            valid.append(tool_call(name=each.name, args=dict(each.arguments), id=_call_id()))
        else:
            given = {"name": each.name, "args": each.text, "error": each.error}
            invalid.append(invalid_tool_call(**given, id=_call_id()))
    return AIMessage(content=text.strip(), tool_calls=valid, invalid_tool_calls=invalid)


def _response_metadata(
    answer: Answer, reason: str, called: bool, info: ModelInfo
) -> dict[str, Any]:
    """Return metadata as plain values, with sources, spans, reuse and times under `ragcache`."""
    if called and reason == "stop":  # an answer that a limit cut off did not end with its calls
        reason = "tool_calls"
    details = {
        "mode": answer.mode,
        "sources": [asdict(source) for source in answer.sources],
        "spans": [asdict(span) for span in answer.spans],
        "reuse": asdict(answer.reuse),
        "timings": asdict(answer.timings),
        "confidence": answer.confidence,
    }
    return {"finish_reason": reason, "model_name": info.name, "ragcache": details}


def _call_id() -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return uuid4().hex[:9]


class ChunkBuilder:
    """Converts the deltas of the first choice to chunks.

    A chunk has either text or a part of a call: content in LangChain's version 1 cannot have both.
    """

    def __init__(self, options: CallOptions, info: ModelInfo) -> None:
        self._options, self._info, self._trimmer = options, info, WhitespaceTrimmer()
        self._has_text, self._first_place = False, 0
        self._arguments: dict[int, str] = {}  # arguments of each call so far
        self._calls = None
        if options.style is not None or options.offered:
            from ragcache.structured import ToolCallParser

            self._calls = ToolCallParser(options.style, options.offered)

    def feed(self, delta: TokenDelta) -> Iterator[ChatGenerationChunk]:
        """Yield the chunks of a delta. Text may be held back, log-probabilities are not."""
        if delta.choice:
            return
        if self._calls is None:
            chunks = list(self._text(delta.text))
        else:
            chunks = list(self._text_and_calls(self._calls.feed(delta.text)))
        if self._options.logprobs and delta.chosen is not None:
            chunks = chunks or [_text_chunk("")]
            chunks[0].generation_info = {"logprobs": self._info.logprobs([delta.chosen])}
        yield from chunks

    def finish(self, answer: Answer) -> Iterator[ChatGenerationChunk]:
        """Yield the text that was held back, and a last chunk with usage and metadata."""
        from ragcache.structured import ToolCall as ParsedCall

        called = False
        if self._calls is not None:
            yield from self._text_and_calls(self._calls.finish())
            yield from self._invalidate_calls()
            called = any(isinstance(each, ParsedCall) for each in self._calls.calls)
        metadata = _response_metadata(answer, answer.finish_reason, called, self._info)
        last = AIMessageChunk(
            content="",
            usage_metadata=usage_metadata(answer),
            response_metadata=metadata,
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last)

    def _text(self, text: str) -> Iterator[ChatGenerationChunk]:
        if trimmed := self._trimmer.feed(text):
            self._has_text = True
            yield _text_chunk(trimmed)

    def _text_and_calls(
        self, deltas: Iterable[TextDelta | ToolCallDelta]
    ) -> Iterator[ChatGenerationChunk]:
        from ragcache.structured import TextDelta

        for delta in deltas:
            if isinstance(delta, TextDelta):
                yield from self._text(delta.text)
            else:
                yield self._call_chunk(delta.index, delta.name, delta.arguments)

    def _call_chunk(self, index: int, name: str | None, arguments: str) -> ChatGenerationChunk:
        if not self._arguments:
            self._first_place = int(self._has_text)
        begins = index not in self._arguments
        self._arguments[index] = self._arguments.get(index, "") + arguments
        # Content in version 1 numbers text and calls together, and LangChain joins what has one
        # number. It counts texts by twos, from 0, or from 1 where a call comes first.
        place = 2 * index + self._first_place
        part = tool_call_chunk(
            name=name, args=arguments, id=_call_id() if begins else None, index=place
        )
        return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[part]))

    def _invalidate_calls(self) -> Iterator[ChatGenerationChunk]:
        """Yield a suffix for each invalid call, so that LangChain does not complete it."""
        from ragcache.structured import InvalidToolCall as InvalidCall

        assert self._calls is not None
        for index, call in enumerate(self._calls.calls):
            if isinstance(call, InvalidCall):
                if (given := self._arguments.get(index)) is not None:
                    yield self._call_chunk(index, None, invalidating_suffix(given))
                else:
                    arguments = call.text + invalidating_suffix(call.text)
                    yield self._call_chunk(index, call.name, arguments)


def invalidating_suffix(arguments: str) -> str:
    """Return a suffix with which LangChain cannot complete arguments to a JSON object.

    It ends an open string, and closes a bracket that is not open. Empty if LangChain cannot
    complete the arguments anyway.
    """
    return next(
        end + bracket
        for end in ("", '"', '\\"')
        for bracket in ("", "]", "}")
        if not _can_complete(arguments + end + bracket)
    )


def _can_complete(arguments: str) -> bool:
    from langchain_core.utils.json import parse_partial_json

    try:
        return not arguments or isinstance(parse_partial_json(arguments), dict)
    except ValueError:
        return False


def _text_chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


class WhitespaceTrimmer:
    """Removes white space around a text that arrives in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """Return the text that can be shown now. White space is held back until text follows."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        certain = text.rstrip()
        self._held = text[len(certain) :]
        self._begun = self._begun or bool(certain)
        return certain
