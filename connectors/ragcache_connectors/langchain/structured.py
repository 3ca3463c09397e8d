"""Structured output and tools: answers and calls that are decoded under a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragcache.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from ragcache.structured import Grammar, ToolStyle

METHODS = ("json_schema", "function_calling", "json_mode")

Tool = Mapping[str, Any]
Bind = Callable[..., Runnable[LanguageModelInput, Any]]


def structured_output(
    bind: Bind, bind_tools: Bind, schema: Any, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Return the model followed by a parser (see `ChatRagCache.with_structured_output`)."""
    if method not in METHODS:
        raise InvalidRequest(f"unknown method {method!r:.80}; methods: {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise InvalidRequest("structured output needs a schema")
    traced = {"kwargs": {"method": method}, "schema": schema}
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: BaseOutputParser[Any]
    if method == "function_calling":
        name = convert_to_json_schema(schema)["title"]
        llm = bind_tools([schema], tool_choice=name, ls_structured_output_format=traced)
        if is_class:
            parser = _ToolObjectParser(tools=[schema], first_tool_only=True)
        else:
            parser = _ToolDictParser(key_name=name, first_tool_only=True)
    else:
        extra = {} if schema is None else {"ls_structured_output_format": traced}
        llm = bind(response_format=_response_format(schema, method), **extra)
        parser = _ObjectParser(pydantic_object=schema) if is_class else _DictParser()
    return _with_raw(llm, parser) if include_raw else llm | parser


def _response_format(schema: Any, method: str) -> dict[str, Any]:
    """Return the `response_format` of a schema. JSON mode uses the schema if a grammar can."""
    from ragcache.structured import Grammar

    any_object = {"type": "json_object"}
    if schema is None:
        return any_object
    converted = convert_to_json_schema(schema)
    try:
        Grammar.json_schema(converted)
    except InvalidRequest:
        if method == "json_mode":
            return any_object
        raise
    return {"type": "json_schema", "json_schema": {"name": converted["title"], "schema": converted}}


def _with_raw(
    llm: Runnable[LanguageModelInput, Any], parser: BaseOutputParser[Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return the model with answers of the keys `raw`, `parsed` and `parsing_error`."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


class _CompleteAnswers:
    """A mixin that refuses incomplete answers: LangChain's parsers would complete their JSON."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        first = result[0]
        metadata = first.message.response_metadata if isinstance(first, ChatGeneration) else {}
        if metadata.get("finish_reason") in ("length", "repetition"):
            raise OutputParserException(
                "the answer was cut off before its JSON ended; give a larger max_tokens",
                llm_output=first.text,
            )
        return super().parse_result(result, partial=partial)  # type: ignore[misc]  # a mixin


class _DictParser(_CompleteAnswers, JsonOutputParser): ...


class _ObjectParser(_CompleteAnswers, PydanticOutputParser[Any]): ...


class _ToolDictParser(_CompleteAnswers, JsonOutputKeyToolsParser): ...


class _ToolObjectParser(_CompleteAnswers, PydanticToolsParser): ...


def convert_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert functions, classes, tools and schemas to JSON descriptions of functions.

    Raises:
        InvalidRequest: A tool cannot be described.
    """
    try:
        return [convert_to_openai_tool(tool) for tool in tools]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a tool cannot be described: {error}") from error


def call_grammar(
    tools: Sequence[Tool],
    choice: str,
    style: ToolStyle | None,
    parallel: bool,
    strict: bool = False,
    form: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar of an answer's calls to tools, or None to decode without one.

    With `choice` "auto", the model calls as it was trained to if no grammar can express the
    arguments of a tool. `strict` and `form` raise the error instead.

    Args:
        tools: Descriptions of the tools.
        choice: `auto`, `required`, or the name of a tool.
        style: How the model writes tool calls.
        parallel: Whether an answer may have several calls.
        strict: Whether all calls must fit the schemas.
        form: The grammar of an answer without calls.

    Raises:
        InvalidRequest: The arguments of a tool cannot be expressed.
        UnsupportedModel: The model's chat template takes no tools, and a call is required.
    """
    from ragcache.structured import tool_call_grammar

    if style is None:
        if choice == "auto":
            return None
        raise UnsupportedModel(
            "this model's chat template takes no tools whose calls can be read; leave out "
            "`tool_choice`, or use a model that was trained with them (Qwen, Llama 3, Mistral)"
        )
    if choice != "auto" or strict or form is not None:
        return tool_call_grammar(tools, choice, style=style, parallel=parallel, form=form)
    try:
        return tool_call_grammar(tools, style=style, parallel=parallel)
    except InvalidRequest:
        return None
