"""Bodies of Anthropic's Messages API, and their translation to a chat.

As Anthropic's own service does, this one refuses unknown fields. A field of Anthropic's that is not
served is refused by name if ignoring it would change the answer. The options of an answer and of a
search have the same names as everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ragcache.params import GenerationParams, SearchParams, Surface
from ragcache_api.http.bodies import (
    IN_PROCESS,
    Asking,
    CollectionName,
    Text,
    TranslatedRequest,
    invalid,
    unsupported,
)
from ragcache_api.http.client_fields import ClientModel, UnservedField

if TYPE_CHECKING:
    from ragcache.documents import SourceDocument

_SECONDS = {"5m": 300.0, "1h": 3600.0}
_PARAGRAPH = "\n\n"

UNSERVED_IN_MESSAGES: Mapping[str, UnservedField] = {
    "container": UnservedField("the service runs no code"),
    "context_management": UnservedField("send the messages that the model is to read"),
    "fallbacks": UnservedField("one model is served"),
    "mcp_servers": UnservedField("give tools, and call the servers from the client"),
}
"""Fields of Anthropic's that are refused."""

IGNORED_IN_MESSAGES: Mapping[str, str] = {
    "betas": "a header of Anthropic's clients",
    "diagnostics": "it changes no answer",
    "inference_geo": "the service is in one place",
    "metadata": "a client's own record",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "user_profile_id": "a client's own record",
    "workspace_id": "the key has a namespace",
}
"""Fields of Anthropic's that are ignored, with the reason that they change no answer."""


class CacheControl(ClientModel):
    """A mark on a text: its states are computed once and kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    """Time for which the states are kept."""

    @property
    def seconds(self) -> float:
        """Seconds for which the states are kept."""
        return _SECONDS[self.ttl]


class Markable(ClientModel):
    """A part of a request that may be marked."""

    cache_control: CacheControl | None = None
    """Keep the states of this part's text in the namespace of the key."""


class TextBlock(Markable):
    """A text."""

    type: Literal["text"]
    text: Text


class TextSource(ClientModel):
    """The text of a document."""

    type: Literal["text"]
    data: Text


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[list[TextBlock], BeforeValidator(_blocks)]
"""A text, or blocks of text."""


class ContentSource(ClientModel):
    """The text of a document in blocks, which citations refer to."""

    type: Literal["content"]
    content: TextBlocks


class FileSource(ClientModel):
    """A PDF file in base64."""

    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: Annotated[str, Field(max_length=100_000_000)]


class Citations(ClientModel):
    """Whether answers cite a document."""

    enabled: bool = False


class DocumentBlock(Markable):
    """A document. With citations, the question is answered from it, and the answer cites it."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | FileSource, Field(discriminator="type")]
    title: str | None = None
    context: Text | None = None
    """A text about the document, which is not cited."""
    citations: Citations | None = None

    @property
    def is_cited(self) -> bool:
        """Whether answers cite the document."""
        return self.citations is not None and self.citations.enabled

    @property
    def parts(self) -> list[str]:
        """Blocks of its text. A PDF file has none before it is read."""
        if isinstance(self.source, ContentSource):
            return [each.text for each in self.source.content]
        return [self.source.data] if isinstance(self.source, TextSource) else []


class ToolUseBlock(Markable):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input: dict[str, Any] = Field(default_factory=dict)


class ThinkingBlock(ClientModel):
    """Earlier thoughts of the model, which are left out of the prompt."""

    type: Literal["thinking", "redacted_thinking"]


def _result(content: Any) -> Any:
    return _blocks("" if content is None else content)


class ToolResultBlock(Markable):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=200)]
    content: Annotated[
        list[Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]],
        BeforeValidator(_result),
    ] = Field(default_factory=list)
    is_error: bool = False

    @property
    def text(self) -> str:
        """The result as text. An error says that it is one."""
        said = _PARAGRAPH.join(part for each in self.content for part in _texts_of(each))
        return f"Error: {said}" if self.is_error else said


Block = Annotated[
    TextBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]


class InputMessage(ClientModel):
    """A message: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks)]


class CustomTool(Markable):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input."""

    def plain(self) -> dict[str, Any]:
        """Return the tool as OpenAI writes it."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(ClientModel):
    """Whether the model may or must call a function, or which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def plain(self) -> Any:
        """Return the choice as OpenAI writes it. Raises `HTTPProblem` (400)."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise invalid("tool_choice", "tool_choice of the type tool needs a name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(ClientModel):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormatConfig(ClientModel):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON schema for the answer."""


class OutputConfig(ClientModel):
    """Options of the answer."""

    effort: str | None = None
    """Without effect: the service knows no efforts."""
    format: OutputFormatConfig | None = None


class CountTokensRequest(Surface, Asking):
    """The body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")
    withheld = IN_PROCESS | {
        "n": "an answer is one message",
        "logprobs": "messages have no log-probabilities; use /v1/chat/completions",
        "stop": "give stop_sequences",
        "max_new_tokens": "give max_tokens",
    }
    model: Annotated[str, Field(max_length=1000)]
    """Id of the served model, alone or as `MODEL/COLLECTION`."""
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    """The conversation, oldest message first."""
    system: TextBlocks | None = None
    """The system prompt: a text, or blocks of text."""
    tools: list[CustomTool] | None = None
    """Functions that the model may call. Tools that Anthropic runs are not served."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """`enabled` is not served. A template that knows of thoughts takes a variable in
    `chat_template_kwargs`."""
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    """A mark on the last text of the conversation."""
    collection: CollectionName | None = None
    """The collection to answer from. By default the model answers without a collection."""
    recognize_recurring: bool = True
    """Read texts that recur in the prompts of the key's namespace from states."""


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`. The answer is greedy by default."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """Most tokens of the answer, or fewer if the prompt leaves less room."""
    stop_sequences: list[str] | None = None
    """Strings that end the answer and are cut off from it: at most 16."""
    stream: bool = False
    """Send the message as server-sent events."""


@dataclass(frozen=True, slots=True)
class CitedDocument:
    """A document of a request, as citations refer to it."""

    id: str
    """Name that no other document of the request has."""
    index: int
    """Place among the documents of the request, from 0."""
    title: str | None
    parts: tuple[str, ...]
    """Blocks of a text whose citations count blocks. A text without blocks is one part."""
    has_pages: bool
    in_blocks: bool


@dataclass(frozen=True, slots=True)
class MessagesChat:
    """A request of Anthropic's as a chat."""

    chat: TranslatedRequest
    sources: list[SourceDocument] = field(default_factory=list)
    """Documents to answer from."""
    cited: dict[str, CitedDocument] = field(default_factory=dict)
    """The same documents by id."""
    keep: dict[str, float] = field(default_factory=dict)
    """Marked texts, and the seconds for which they are kept."""


def documents_of(body: CountTokensRequest) -> list[DocumentBlock]:
    """Return the documents of a request in their order, as citations count them."""
    blocks = [block for message in body.messages for block in message.content]
    return [each for each in blocks if isinstance(each, DocumentBlock)]


def chat_of(
    body: CountTokensRequest, files: Mapping[int, SourceDocument] | None = None
) -> MessagesChat:
    """Translate a request.

    Args:
        body: The request.
        files: PDF files among its documents that were read, by their index. Others have no text.

    Raises:
        HTTPProblem: (400) A field is not served, or messages are in the wrong order.
        ValidationError: Options contradict each other.
    """
    _check_fields(body)
    translation = _Translation(body, files or {})
    messages = [*translation.system(), *translation.messages()]
    names = GenerationParams.model_fields.keys() | SearchParams.model_fields.keys()
    names |= {"mode", "chat_template_kwargs", "collection", "recognize_recurring", "model"}
    options = {name: getattr(body, name) for name in names & body.model_fields_set}
    if isinstance(body, MessagesRequest):
        options |= {"stop": body.stop_sequences or (), "stream": body.stream}
    if body.tools:
        options["tools"] = [each.plain() for each in body.tools]
    if (choice := body.tool_choice) is not None:
        options["tool_choice"] = choice.plain()
        options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.output_config is not None and (form := body.output_config.format) is not None:
        options["json_schema"] = form.schema_
    chat = TranslatedRequest.model_validate({"messages": messages, **options})
    if translation.cited and chat.collection is not None:
        raise unsupported(
            "collection", "an answer cites either documents of the request or a collection"
        )
    return MessagesChat(chat, translation.sources, translation.cited, translation.keep)


def _check_fields(body: CountTokensRequest) -> None:
    """Raise `HTTPProblem` (400) for fields that are unknown or not served."""
    for name, value in (body.model_extra or {}).items():
        refused = UNSERVED_IN_MESSAGES.get(name)
        if refused is not None:
            if refused.refuses(value):
                raise unsupported(name, f"{name} is not served: {refused.remedy}")
        elif name not in IGNORED_IN_MESSAGES:
            raise invalid(name, f"{name}: Extra inputs are not permitted")
    if body.thinking is not None and body.thinking.type == "enabled":
        raise unsupported(
            "thinking",
            "thinking is not served: a template that knows of thoughts takes a variable such as "
            "enable_thinking in chat_template_kwargs",
        )
    if body.messages[-1].role == "assistant":
        raise unsupported(
            "messages", "the last message is the model's, and the service does not continue it"
        )


class _Translation:
    """Messages as OpenAI writes them, with the documents and marks that were met on the way."""

    def __init__(self, body: CountTokensRequest, files: Mapping[int, SourceDocument]) -> None:
        self.body, self._files = body, files
        self.sources: list[SourceDocument] = []
        self.cited: dict[str, CitedDocument] = {}
        self.keep: dict[str, float] = {}
        self._documents = 0
        self._titles: Counter[str] = Counter()

    def system(self) -> Iterator[dict[str, Any]]:
        """Yield the system prompt, if there is one."""
        if self.body.system:
            yield {"role": "system", "content": self._joined(self.body.system)}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages. Results of tools become messages of their own."""
        for message in self.body.messages:
            if message.role == "assistant":
                yield self._own_message(message)
                continue
            for block in message.content:
                if isinstance(block, ToolResultBlock):
                    self._mark(block, block.text)
                    result = {"content": block.text, "tool_call_id": block.tool_use_id}
                    yield {"role": "tool", **result}
            rest = [each for each in message.content if not isinstance(each, ToolResultBlock)]
            if rest or not message.content:
                yield {"role": message.role, "content": self._joined(rest)}
        if (mark := self.body.cache_control) is not None:
            texts = [each for each in self.body.messages[-1].content if isinstance(each, TextBlock)]
            self.keep.update({each.text: mark.seconds for each in texts[-1:]})

    def _own_message(self, message: InputMessage) -> dict[str, Any]:
        """Return a message of the model. Its blocks are parts of one text."""
        texts = [each for each in message.content if isinstance(each, TextBlock)]
        calls = [
            {"id": each.id, "type": "function", "function": _call(each)}
            for each in message.content
            if isinstance(each, ToolUseBlock)
        ]
        for each in texts:
            self._mark(each, each.text)
        content = "".join(each.text for each in texts)
        return {"role": "assistant", "content": content, "tool_calls": calls or None}

    def _joined(self, blocks: Sequence[Any]) -> str:
        """Return blocks as one text, with a blank line between them. Notes marks and documents."""
        texts: list[str] = []
        for block in blocks:
            if isinstance(block, DocumentBlock):
                texts += self._document(block)
            elif isinstance(block, TextBlock):
                self._mark(block, block.text)
                texts.append(block.text)
            else:
                raise invalid("messages", f"a user's message has no block of type {block.type}")
        return _PARAGRAPH.join(texts)

    def _document(self, block: DocumentBlock) -> list[str]:
        """Return the texts of a document in its message: none of a document that is cited."""
        from ragcache.documents import SourceDocument

        index, self._documents = self._documents, self._documents + 1
        file = self._files.get(index)
        parts = block.parts if file is None else [file.text]
        text = _PARAGRAPH.join(parts)
        self._mark(block, text)
        if not block.is_cited:
            return [each for each in (block.title, block.context, text) if each]
        title = block.title or f"document {index + 1}"
        self._titles[title] += 1
        name = title if self._titles[title] == 1 else f"{title} ({index + 1})"
        source = SourceDocument(name, text) if file is None else file
        self.sources.append(
            SourceDocument(name, source.text, metadata=source.metadata, parts=source.parts)
        )
        in_blocks = isinstance(block.source, ContentSource)
        self.cited[name] = CitedDocument(
            name, index, block.title, tuple(parts), file is not None, in_blocks
        )
        return [block.context] if block.context else []

    def _mark(self, part: Markable, text: str) -> None:
        if part.cache_control is not None and text.strip():
            self.keep[text] = part.cache_control.seconds


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}


def _texts_of(block: TextBlock | DocumentBlock) -> list[str]:
    """Return the texts of a block within the result of a tool."""
    if isinstance(block, TextBlock):
        return [block.text]
    if isinstance(block.source, FileSource):
        raise unsupported("messages", "a result of a tool has no PDF file; give its text")
    return [each for each in (block.title, block.context, *block.parts) if each]
