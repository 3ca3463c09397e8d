"""Requests and responses of OpenAI's interface. Unknown fields of requests are ignored, as
OpenAI's clients expect; those that would change the answer and are not served are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragcache import Answer, GenerationParams
from ragcache.engine import Choice
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    CollectionName,
    GenerationFields,
    ResponseModel,
    RetrievalFields,
)

Text = Annotated[str, Field(max_length=4_000_000)]
_LIKELIEST = 1e-9  # as `top_p`: no more than the likeliest token, which OpenAI spells 0


class OpenAIModel(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    def refuse(self, *names: str) -> None:
        """Raises `HTTPProblem` (400) if one of these fields has a value."""
        for name in names:
            if (self.model_extra or {}).get(name):
                raise unsupported(name)


class StreamOptions(OpenAIModel):
    include_usage: bool | None = None


class ContentPart(OpenAIModel):
    type: str
    text: Text | None = None
    refusal: Text | None = None

    def plain(self) -> str:
        """Its text, or that of an earlier refusal. Raises `HTTPProblem` (400)."""
        text = {"text": self.text, "refusal": self.refusal}.get(self.type)
        if text is None:
            raise unsupported(f"messages.content.{self.type}")
        return text


class FunctionCall(OpenAIModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Text = "{}"


class ToolCallMessage(OpenAIModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """For Hugging Face's chat templates. Raises `HTTPProblem` (400)."""
        role = "system" if self.role == "developer" else self.role
        calls = [_plain_tool_call(call) for call in self.tool_calls or ()]
        optional = {
            "name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None,
        }  # fmt: skip
        given = {name: value for name, value in optional.items() if value is not None}
        return {"role": role, "content": self._text(), **given}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.plain() for part in self.content)


class Tool(OpenAIModel):
    type: Literal["function"]
    function: dict[str, Any]


class NamedFunction(OpenAIModel):
    name: str


class NamedTool(OpenAIModel):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(OpenAIModel):
    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(OpenAIModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(OpenAIModel, GenerationFields, RetrievalFields):
    """Fields that chats and completions share. Without a temperature the answer is greedy."""

    model: Annotated[str, Field(max_length=1000)]
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on after the token that ends an answer.")
    collection: CollectionName | None = Field(None, description="Documents to answer from.")

    def options(self, deadline: float) -> dict[str, Any]:
        """Arguments of `GenerationParams`."""
        return super().options(deadline) | {
            "top_p": None if self.top_p is None else max(self.top_p, _LIKELIEST),
            "n": self.n, "stop": self.stop or None,
            "frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty,
            "min_tokens": self.min_tokens, "ignore_eos": self.ignore_eos,
        }  # fmt: skip

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def chat_options(self) -> dict[str, Any]:
        """How cached states are read and the template is spelled, if the request says so."""
        given = {"mode": self.mode, "chat_template_kwargs": self.chat_template_kwargs}
        return {name: value for name, value in given.items() if value is not None}


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    function_call: Any = None

    def generation(self, deadline: float) -> GenerationParams:
        """Without a limit in the request, the answer ends where the model or the window does.

        Raises `InvalidRequest` or `HTTPProblem` (400).
        """
        self.refuse("logit_bias", "functions", "audio", "web_search_options")
        if self.function_call not in (None, "none", "auto"):  # without functions these mean nothing
            raise unsupported("function_call")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs")
        most = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        given = self.options(deadline) | {"max_tokens": most, "logprobs": logprobs}
        return GenerationParams(**given, unbounded=most is None)

    @property
    def question(self) -> str:
        """The user's last message. Raises `HTTPProblem` (400) if there is none."""
        for message in reversed(self.messages):
            if message.role == "user":
                return str(message.plain()["content"])
        raise invalid("messages", "no message is the user's")


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def generation(self, deadline: float) -> GenerationParams:
        """Raises `InvalidRequest` or `HTTPProblem` (400)."""
        self.refuse("logit_bias")
        if self.suffix:
            raise unsupported("suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo with logprobs")
        return GenerationParams(**self.options(deadline), logprobs=self.logprobs)

    @property
    def prompts(self) -> list[str]:
        """Raises `HTTPProblem` (400) for token ids, which may be another tokenizer's."""
        listed = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        texts = [each for each in listed if isinstance(each, str)]
        if not texts or len(texts) != len(listed):
            raise invalid("prompt", "give a text, or a list of texts")
        return texts


def invalid(field: str, detail: str) -> HTTPProblem:
    """The error of a field's value."""
    return HTTPProblem(400, "invalid-request", detail, None, field)


def unsupported(field: str, detail: str = "") -> HTTPProblem:
    """The error of a field that is not served."""
    detail = detail or f"{field} is not served, and leaving it out would change the answer"
    return HTTPProblem(400, "unsupported", detail, None, field)


def _plain_tool_call(call: ToolCallMessage) -> dict[str, Any]:
    """Templates take arguments as values; OpenAI sends them as text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise invalid("messages", "arguments of a tool call are no JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class PromptDetails(ResponseModel):
    """cached_tokens: those of the prompt that were not computed for this request."""

    cached_tokens: int


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class OpenAICompletion(ResponseModel):
    """A chat completion or a text completion. sources: only with `collection`."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    sources: list[dict[str, Any]] | None = None
    ragcache: dict[str, Any]


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ragcache"


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of all prompts and all choices."""
    prompt = sum(answer.reuse.prompt_tokens for answer in answers)
    kept = sum(answer.reuse.cached_tokens + answer.reuse.shared_tokens for answer in answers)
    generated = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated,
        "total_tokens": prompt + generated, "prompt_tokens_details": {"cached_tokens": kept},
    }  # fmt: skip


def finish_reason_of(choice: Choice) -> str:
    """OpenAI has no reason for an answer without documents, which has no sources, nor for one that
    was refused: both are `stop`; `ragcache.finish_reason` tells them apart."""
    return "length" if choice.finish_reason == "length" else "stop"
