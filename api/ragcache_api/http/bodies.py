"""Bodies of requests for an answer, on the service's own routes and on OpenAI's chats and texts.

The gateway of a cluster reads requests with the same models, so this module does not need the
engine. OpenAI's bodies ignore unknown fields, as its clients expect, but refuse fields that are not
served and would change the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints

from ragcache.modes import ISOLATED, ReuseMode
from ragcache.params import GenerationParams, SearchParams, Surface
from ragcache_api.http.client_fields import (
    UNSERVED,
    UNSERVED_IN_CHATS,
    UNSERVED_IN_COMPLETIONS,
    ClientModel,
    ClientOptions,
    UnservedField,
)
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.model_ids import collection_in

_NAME = r"^(\.{0,2}[^./\x00-\x1f\x7f]|\.{3})[^/\x00-\x1f\x7f]*$"  # clients resolve `.` and `..`
PathName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_NAME)]
"""A name that fits into one segment of a URL path."""
CollectionName = PathName
Question = Annotated[str, Field(min_length=1, max_length=1_000_000)]
Text = Annotated[str, Field(max_length=4_000_000)]
TokenIds = Annotated[list[int], Field(max_length=1_000_000)]
_LIKELIEST = 1e-9  # a `top_p` that leaves only the likeliest token; OpenAI writes 0

IN_PROCESS = {
    "timeout": "the service sets the deadline",
    "priority": "a tenant could go before all others",
    "skip_special_tokens": "the service sets it for tool calls",
    "share": "a benchmark's option",
    "first_logprobs": "an option of evaluations in the process",
    "prompt_logprobs": "completions report them with echo and logprobs",
    "grammar": "give json_schema, json_object, regex or ebnf",
}
"""Options that no remote caller has."""
ONE_TEXT = IN_PROCESS | {
    "n": "an answer has one text; use /v1/chat/completions",
    "logprobs": "an answer has no log-probabilities; use /v1/chat/completions",
}
"""Options that the service's own routes lack."""


class PromptRequest(Surface, GenerationParams):
    """The body of `POST /v1/prompts`."""

    withheld = ONE_TEXT
    prompt: Question
    """The prompt in PML."""
    mode: Annotated[ReuseMode, Field(json_schema_extra={"default": str(ISOLATED)})] = ISOLATED
    """`isolated` reads the schema's states; `exact` computes the whole prompt."""
    stream: bool = False
    """Send the answer as server-sent events."""


class Asking(GenerationParams, SearchParams):
    """Options of requests that can read documents."""

    mode: ReuseMode | None = None
    """How stored states are reused. Defaults to the service's mode (`default_mode`)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""

    def reading(self) -> dict[str, Any]:
        """Return the options for reuse and for the chat template that the request gives."""
        given = {"mode": self.mode, "chat_template_kwargs": self.chat_template_kwargs}
        return {name: value for name, value in given.items() if value is not None}

    def retrieval(self) -> dict[str, Any]:
        """Return the options of `RagCache.ask` that the request gives."""
        return self.reading() | SearchParams.part_of(self).given()


class AnswerRequest(Surface, Asking):
    """The body of `POST /v1/answers`."""

    withheld = ONE_TEXT
    question: Question
    """The question, as it is searched for and asked."""
    collection: CollectionName
    """The collection to answer from."""
    stream: bool = False
    """Send the answer as server-sent events."""


class StreamOptions(ClientModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the numbers of tokens in the last chunk."""


class ContentPart(ClientModel):
    """A part of a message's content."""

    type: str
    """`text` or `refusal`."""
    text: Text | None = None
    refusal: Text | None = None

    def plain(self) -> str:
        """Return the text or the earlier refusal. Raises `HTTPProblem` (400) for other types."""
        text = {"text": self.text, "refusal": self.refusal}.get(self.type)
        if text is None:
            raise unsupported(f"messages.content.{self.type}")
        return text


class FunctionCall(ClientModel):
    """A function that the model called."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Text = "{}"
    """Arguments as a JSON object."""


class ToolCallMessage(ClientModel):
    """A call in an earlier message of the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ClientModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` means the same as `system`."""
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    """Name of the sender, for templates that use it."""
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    """Id of the call that a message of the role `tool` answers."""

    def plain(self) -> dict[str, Any]:
        """Return the message for Hugging Face's chat templates. Raises `HTTPProblem` (400)."""
        role = "system" if self.role == "developer" else self.role
        calls = [_plain_tool_call(call) for call in self.tool_calls or ()]
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        return {"role": role, "content": self._text(), **given}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.plain() for part in self.content)


class Tool(ClientModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]
    """`name`, `description`, and `parameters` as a JSON schema."""


class NamedFunction(ClientModel):
    """The name of a function."""

    name: str


class NamedTool(ClientModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class GenerationRequest(Asking, ClientOptions):
    """Fields that chats and completions share. The answer is greedy by default."""

    model_config = ConfigDict(extra="allow")
    unserved: ClassVar[Mapping[str, UnservedField]] = UNSERVED
    """Fields of OpenAI and vLLM that are refused."""

    model: Annotated[str, Field(max_length=1000)] = ""
    """Id of the served model, alone or as `MODEL/COLLECTION`. May be left out."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the probability to sample from, 0 to 1. 0 takes the likeliest token."""
    stream: bool = False
    """Send the completion as server-sent events."""
    stream_options: StreamOptions | None = None
    collection: CollectionName | None = None
    """The collection to answer from. By default the model answers without documents."""
    recognize_recurring: bool = True
    """Read texts that recur in the prompts of the key's namespace from states."""

    def addressed(self, served: str, base: str | None) -> Self:
        """Return the request with the collection that its URL, model's id or own field names.

        Args:
            served: Id of the served model.
            base: The collection that the base URL names.

        Raises:
            HTTPProblem: (404) The request names another model. (400) It names several collections.
        """
        named = named_collection(base, collection_in(self.model, served), self.collection)
        return self.model_copy(update={"collection": named})

    def generation(self, deadline: float, **own: Any) -> GenerationParams:
        """Return the parameters of the answer.

        Args:
            deadline: Seconds from now until the answer must end.
            **own: Options that the route names differently. They replace the body's.

        Raises:
            HTTPProblem: (400) A field is not served.
            InvalidRequest: The options contradict each other.
        """
        for name, value in (self.model_extra or {}).items():
            refused = self.unserved.get(name)
            if refused is not None and refused.refuses(value):
                raise unsupported(name, f"{name} is not served: {refused.remedy}")
        names = GenerationParams.model_fields.keys() & self.model_fields_set
        try:
            renamed = self.client_options()
        except ValueError as error:
            raise invalid("response_format", str(error)) from None
        if repeated := sorted(renamed.keys() & names):
            raise invalid(repeated[0], f"{repeated[0]} is given twice, under two names")
        options = {name: getattr(self, name) for name in names} | renamed | own
        options["top_p"] = max(self.top_p, _LIKELIEST)
        return GenerationParams(**options, timeout=deadline)


class ChatRequest(Surface, GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    withheld = IN_PROCESS
    unserved = UNSERVED_IN_CHATS
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation, oldest message first."""
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    """OpenAI's newer name for `max_tokens`."""
    logprobs: bool | None = None
    """Report log-probabilities of the answer's tokens."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Number of alternatives to report for each token, 0 to 20."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether the model may (`auto`) or must (`required`) call a function, or which function."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. True by default."""
    function_call: Any = None

    def generation(
        self, deadline: float, default_tokens: int | None = None, **own: Any
    ) -> GenerationParams:
        """Return the parameters of the answer.

        Args:
            deadline: Seconds from now until the answer must end.
            default_tokens: Most tokens of the answer, if the request sets no limit. Defaults to
                `OpenConfig.max_tokens`.
            **own: Options that the route names differently.
        """
        if self.function_call not in (None, "none", "auto"):  # without functions these mean nothing
            raise unsupported("function_call")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs")
        most = self.max_completion_tokens or self.max_tokens or default_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        own |= {"max_tokens": most, "logprobs": logprobs, "prompt_cache_key": self.conversation}
        return super().generation(deadline, **own)

    @property
    def conversation(self) -> str:
        """Name of the conversation. Defaults to a digest of its messages up to the user's first."""
        if self.prompt_cache_key is not None:
            return self.prompt_cache_key
        digest = hashlib.sha256()
        for message in self.messages:
            digest.update(repr((message.role, message.plain()["content"])).encode())
            if message.role == "user":
                break
        return digest.hexdigest()[:32]

    @property
    def question(self) -> str:
        """The user's last message. Raises `HTTPProblem` (400) without one."""
        for message in reversed(self.messages):
            if message.role == "user":
                return str(message.plain()["content"])
        raise invalid("messages", "no message is the user's")


class CompletionRequest(Surface, GenerationRequest):
    """The body of `POST /v1/completions`."""

    withheld = IN_PROCESS
    unserved = UNSERVED_IN_COMPLETIONS
    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    """A text, the token ids of a text, or a list of either."""
    max_tokens: Annotated[int | None, Field(ge=0, le=2**31)] = None
    """Most tokens of an answer, or fewer if the prompt leaves less room. 0 only repeats the prompt,
    with `echo`."""
    echo: bool | None = None
    """Repeat the prompt before the answer. With `logprobs`, report the prompt's log-probabilities,
    too."""
    best_of: int | None = None

    def generation(self, deadline: float, **own: Any) -> GenerationParams:
        """Return the parameters of the answer, or refuse options of the old interface."""
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported("best_of")
        if self.max_tokens == 0:
            own |= {"max_tokens": 1}  # it is computed with the prompt, and left out
            if not self.echo:
                raise invalid("max_tokens", "max_tokens is 0, which needs echo; give 1 or more")
        if self.scores_prompt and self.collection is not None:
            raise unsupported("echo", "echo with logprobs scores a text; leave out collection")
        if self.stream and (self.scores_prompt or self.max_tokens == 0):
            raise unsupported("stream", "a prompt is scored whole; leave out stream")
        return super().generation(deadline, prompt_logprobs=self.scores_prompt, **own)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are reported."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts and token ids to continue. Raises `HTTPProblem` (400) without any."""
        alone = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        listed: Any = [self.prompt] if alone else self.prompt
        if not listed or any(each == [] for each in listed):
            raise invalid("prompt", "give a text, token ids, or a list of either")
        if self.collection is not None and not all(isinstance(each, str) for each in listed):
            raise invalid("prompt", "a collection is searched for a text, not for token ids")
        return [*listed]


class TranslatedRequest(ChatRequest):
    """A chat that came in another interface than OpenAI's chat completions."""


def named_collection(*names: str | None) -> str | None:
    """Return the collection that a request names, in one place or in several.

    Raises:
        HTTPProblem: (400) The places name several collections.
    """
    named = sorted({name for name in names if name is not None})
    if len(named) > 1:
        raise invalid("collection", f"the request names several collections: {', '.join(named)}")
    return next(iter(named), None)


def own_generation(body: AnswerRequest | PromptRequest, deadline: float) -> GenerationParams:
    """Return the parameters of an answer on the service's own routes."""
    return GenerationParams.part_of(body).replace(timeout=deadline)


def invalid(field: str, detail: str) -> HTTPProblem:
    """Return the error of a field with a wrong value."""
    return HTTPProblem(400, "invalid-request", detail, None, field)


def unsupported(field: str, detail: str = "") -> HTTPProblem:
    """Return the error of a field that is not served."""
    detail = detail or f"{field} is not served, and leaving it out would change the answer"
    return HTTPProblem(400, "unsupported", detail, None, field)


def _plain_tool_call(call: ToolCallMessage) -> dict[str, Any]:
    """Return a call for chat templates, which take arguments as an object, not as text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise invalid("messages", "arguments of a tool call are no JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
