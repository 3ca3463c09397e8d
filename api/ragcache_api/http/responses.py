"""Bodies of OpenAI's Responses API, and their translation to a chat.

Unknown fields are ignored, as OpenAI's clients expect. A field that is not served and would change
the answer is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ragcache.params import GenerationParams, SearchParams, Surface
from ragcache_api.http.bodies import (
    IN_PROCESS,
    Asking,
    CollectionName,
    ContentPart,
    Text,
    TranslatedRequest,
    unsupported,
)
from ragcache_api.http.client_fields import UNSERVED_IN_CHATS, ClientModel, UnservedField

RESULTS = "file_search_call.results"
"""Value of `include` that asks for the texts that a search found."""

UNSERVED_IN_RESPONSES: Mapping[str, UnservedField] = {
    **UNSERVED_IN_CHATS,
    "background": UnservedField("wait for the answer, or stream it"),
    "context_management": UnservedField("send the messages that the model is to read"),
    "conversation": UnservedField("give previous_response_id"),
    "prompt": UnservedField("write the instructions into the request"),
    "top_logprobs": UnservedField("/v1/chat/completions reports log-probabilities"),
}
"""Fields that are refused in responses."""


class PlainMessage(ClientModel):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The text. Raises `HTTPProblem` (400) for parts that are no text."""
        return _text_of(self.content)


class FunctionCallItem(ClientModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Text = "{}"


class FunctionOutputItem(ClientModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=200)]
    output: Text | list[dict[str, Any]]


class PassedItem(ClientModel):
    """An item of an earlier output that is left out of the prompt."""

    type: Literal["file_search_call", "reasoning"]


def _kind_of(item: Any) -> Any:
    given = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    kind = given if isinstance(given, str) else "message"
    return "passed" if kind in ("file_search_call", "reasoning") else kind


InputItem = Annotated[
    Annotated[PlainMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[PassedItem, Tag("passed")],
    Discriminator(_kind_of),
]


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(ClientModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat completions write it."""
        function = {"name": self.name, "parameters": self.parameters or {"type": "object"}}
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": function | about}


class ToolNamespace(ClientModel):
    """Functions under a common name. Their calls name the namespace, too."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    tools: list[FunctionTool]


class RankingOptions(ClientModel):
    """Options of a search."""

    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lowest score of a text, 0 to 1."""


class FileSearchTool(ClientModel):
    """The search in a vector store. Its texts stand before the user's last message."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[CollectionName], Field(min_length=1, max_length=1)]
    """Id of the vector store, or name of a collection. One store is searched at a time."""
    max_num_results: Annotated[int | None, Field(ge=1, le=50)] = None
    """Most texts to read, 1 to 50."""
    filters: dict[str, Any] | None = None
    """Conditions on attributes of files: `eq`, `ne`, `gt`, `gte`, `lt`, `lte`, `in` and `nin`, with
    `and` and `or`."""
    ranking_options: RankingOptions | None = None


ResponsesTool = Annotated[
    FunctionTool | ToolNamespace | FileSearchTool, Field(discriminator="type")
]


class TextFormat(ClientModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema for the type `json_schema`."""

    def plain(self) -> dict[str, Any]:
        """Return the form as chat completions write it."""
        told: dict[str, Any] = {"type": self.type}
        if self.type == "json_schema":
            told["json_schema"] = {"name": self.name, "schema": self.schema_}
        return told


class TextConfig(ClientModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Surface, Asking):
    """The body of `POST /v1/responses`. The answer is greedy by default."""

    model_config = ConfigDict(extra="allow")
    withheld = IN_PROCESS | {
        "n": "a response has one answer; use /v1/chat/completions",
        "logprobs": "a response has no log-probabilities; use /v1/chat/completions",
        "max_tokens": "give max_output_tokens",
        "max_new_tokens": "give max_output_tokens",
        "filters": "give filters of the tool file_search",
    }
    unserved: ClassVar[Mapping[str, UnservedField]] = UNSERVED_IN_RESPONSES
    """Fields that are refused."""
    model: Annotated[str, Field(max_length=1000)] = ""
    """Id of the served model, alone or as `MODEL/COLLECTION`. May be left out."""
    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_items)]
    """A text, or messages, calls of functions and their outputs, oldest first."""
    instructions: Text | None = None
    """The system prompt. It is not carried over from an earlier response."""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Id of a stored response, whose conversation goes on."""
    store: bool = True
    """Keep the response for 30 days, for `previous_response_id`, and its states for the next
    turn."""
    max_output_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    """Most tokens of the answer, or fewer if the prompt leaves less room."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the probability to sample from, 0 to 1. 0 takes the likeliest token."""
    tools: list[ResponsesTool] | None = None
    """Functions that the model may call, and a search. Other tools are not served."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """Whether the model may or must call a function, or which one."""
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool = False
    """Send the response as server-sent events."""
    include: list[str] | None = None
    """`file_search_call.results` adds the texts that a search found."""
    metadata: dict[str, str] | None = None
    """A client's own record, returned with the response."""
    truncation: Literal["auto", "disabled"] | None = None
    """Without effect: a prompt that is too long is refused."""
    collection: CollectionName | None = None
    """The collection to answer from, in place of the tool `file_search`."""
    recognize_recurring: bool = True
    """Read texts that recur in the prompts of the key's namespace from states."""

    @property
    def file_search(self) -> FileSearchTool | None:
        """The search that the request asks for."""
        found = (each for each in self.tools or () if isinstance(each, FileSearchTool))
        return next(found, None)

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions that the model may call, also the ones of namespaces."""
        found: list[FunctionTool] = []
        for each in self.tools or ():
            if not isinstance(each, FileSearchTool):
                found += each.tools if isinstance(each, ToolNamespace) else [each]
        return found

    @property
    def namespaces(self) -> dict[str, str]:
        """The namespaces of functions, by their names."""
        grouped = (each for each in self.tools or () if isinstance(each, ToolNamespace))
        return {tool.name: each.name for each in grouped for tool in each.tools}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat. Raises `HTTPProblem` (400) for images and files."""
        return [*_messages_of(self.input)]


def responses_chat(
    body: ResponsesRequest, earlier: Sequence[Mapping[str, Any]] = ()
) -> TranslatedRequest:
    """Translate a request.

    Args:
        body: The request.
        earlier: Messages of the response that the request continues.

    Raises:
        HTTPProblem: (400) A field is not served.
        ValidationError: Options contradict each other.
    """
    for name, value in (body.model_extra or {}).items():
        refused = body.unserved.get(name)
        if refused is not None and refused.refuses(value):
            raise unsupported(name, f"{name} is not served: {refused.remedy}")
    names = GenerationParams.model_fields.keys() | SearchParams.model_fields.keys()
    names |= {"mode", "chat_template_kwargs", "collection", "recognize_recurring", "model"}
    options = {name: getattr(body, name) for name in names & body.model_fields_set}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    options |= {"stream": body.stream, "max_tokens": body.max_output_tokens}
    if (search := body.file_search) is not None:
        options |= _search_options(body, search)
    if functions := [each.plain() for each in body.functions]:
        options |= {"tools": functions, "tool_choice": _choice_of(body.tool_choice)}
        options["parallel_tool_calls"] = body.parallel_tool_calls
    if body.text is not None and body.text.format is not None:
        options["response_format"] = body.text.format.plain()
    messages = [*system, *earlier, *body.messages]
    return TranslatedRequest.model_validate({"messages": messages, **options})


def _search_options(body: ResponsesRequest, search: FileSearchTool) -> dict[str, Any]:
    if search.ranking_options is not None and search.ranking_options.score_threshold:
        raise unsupported(
            "ranking_options",
            "ranking_options.score_threshold is not served with an answer; give max_num_results, "
            "or relative_threshold",
        )
    if body.collection not in (None, *search.vector_store_ids):
        raise unsupported("collection", "one collection is searched; leave out collection")
    options: dict[str, Any] = {"collection": search.vector_store_ids[0]}
    if search.max_num_results is not None:
        options["k"] = search.max_num_results
    if search.filters is not None:
        options["filters"] = plain_filters(search.filters)
    return options


def plain_filters(given: Mapping[str, Any], depth: int = 16) -> dict[str, Any]:
    """Translate filters of OpenAI's.

    Example:
        >>> plain_filters({"type": "gte", "key": "year", "value": 2020})
        {'year': {'$gte': 2020}}

    Raises:
        HTTPProblem: (400) A filter is malformed, or nested too deep.
    """
    kind = given.get("type")
    parts = given.get("filters")
    if kind in ("and", "or") and isinstance(parts, list) and depth:
        if all(isinstance(each, Mapping) for each in parts) and parts:
            return {f"${kind}": [plain_filters(each, depth - 1) for each in parts]}
    elif kind in ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"):
        key = given.get("key")
        if isinstance(key, str) and not key.startswith("$") and "value" in given:
            return {key: {f"${kind}": given["value"]}}
    raise unsupported(
        "filters",
        f"the filter {given!r:.200} is none of OpenAI's: a comparison with type, key and value, or "
        "and/or with filters",
    )


def _choice_of(choice: Any) -> Any:
    """Return the choice of a tool as chat completions write it."""
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return {"type": "function", "function": {"name": str(choice.get("name", ""))}}
        if choice.get("type") == "file_search":  # the search is always made
            return "auto"
        raise unsupported("tool_choice", f"tool_choice {choice!r:.200} is not served")
    return choice


def _messages_of(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of items. Calls join the message of the model before them."""
    own: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, PassedItem):
            continue
        if isinstance(item, FunctionCallItem):
            own = own or {"role": "assistant", "content": "", "tool_calls": []}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            own.setdefault("tool_calls", []).append(call)
            continue
        if own is not None:
            yield own
        own = None
        if isinstance(item, FunctionOutputItem):
            text = _text_of(item.output)
            yield {"role": "tool", "content": text, "tool_call_id": item.call_id}
        elif item.role == "assistant":
            own = {"role": "assistant", "content": item.text}
        else:
            yield {"role": item.role, "content": item.text}
    if own is not None:
        yield own


_KINDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        kind = _KINDS.get(str(part.get("type")))
        if kind is None or not isinstance(part.get(kind), str):
            raise unsupported(f"input.content.{part.get('type')!s:.40}")
        parts.append(ContentPart(type=kind, **{kind: part[kind]}).plain())
    return "".join(parts)
