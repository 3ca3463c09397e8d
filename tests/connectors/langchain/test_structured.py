from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from typing_extensions import TypedDict

from ragcache import RagCache
from ragcache.errors import InvalidRequest, UnsupportedModel
from ragcache.models import LoadedModel
from ragcache.structured import ToolStyle, resolve_tool_choice
from ragcache_connectors.langchain import ChatRagCache
from ragcache_connectors.langchain.call_options import CallOptions, ModelInfo
from ragcache_connectors.langchain.structured import call_grammar, convert_tools
from tests.connectors.langchain.scripted_model import AFTER_TOOL, SAID, STRING


class Boat(BaseModel):
    """A boat."""

    name: str
    berth: int


class BoatDict(TypedDict):
    """A boat."""

    name: str
    berth: int


METHODS = ("json_schema", "function_calling", "json_mode")
SCHEMAS: list[Any] = [Boat, BoatDict, Boat.model_json_schema()]
INEXPRESSIBLE = {
    "title": "Odd",
    "description": "No grammar expresses it.",
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}


@pytest.fixture
def model(scripted: RagCache) -> ChatRagCache:
    return ChatRagCache(rag=scripted, max_tokens=200)


@pytest.mark.parametrize(
    ("method", "schema"),
    [
        pytest.param(method, schema, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, (method, schema) in enumerate(product(METHODS, SCHEMAS))
    ],
)
async def test_answers_keep_to_a_schema(model: ChatRagCache, method: str, schema: Any) -> None:
    bound = model.with_structured_output(schema, method=method)
    wanted: Any = {"name": STRING, "berth": 3}
    if schema is Boat:
        wanted = Boat(**wanted)
    assert bound.invoke("Which boat?") == wanted
    assert await bound.ainvoke("Which boat?") == wanted
    assert list(bound.stream("Which boat?"))[-1] == wanted
    assert bound.batch(["a", "b"]) == [wanted, wanted]


def test_the_raw_message_may_be_included(model: ChatRagCache) -> None:
    output = model.with_structured_output(Boat, include_raw=True).invoke("x")
    assert output["parsed"] == Boat(name=STRING, berth=3)
    assert output["raw"].content == f'{{"name": "{STRING}", "berth": 3}}'
    assert output["parsing_error"] is None


@pytest.mark.parametrize("schema", [Boat, BoatDict])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_that_was_cut_off_is_refused(
    scripted: RagCache, schema: Any, method: str
) -> None:
    model = ChatRagCache(rag=scripted, max_tokens=12 if method == "json_schema" else 60)
    with pytest.raises(OutputParserException, match="cut off"):
        model.with_structured_output(schema, method=method).invoke("x")
    output = model.with_structured_output(schema, method=method, include_raw=True).invoke("x")
    assert output["parsed"] is None
    assert isinstance(output["parsing_error"], OutputParserException)
    assert output["raw"].response_metadata["finish_reason"] == "length"


def test_json_mode_takes_schemas_that_no_grammar_expresses(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        model.with_structured_output(INEXPRESSIBLE)
    assert isinstance(
        model.with_structured_output(INEXPRESSIBLE, method="json_mode").invoke("x"), dict
    )
    assert isinstance(model.with_structured_output(method="json_mode").invoke("x"), dict)


def test_unknown_methods_and_missing_schemas_are_refused(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="methods: json_schema"):
        model.with_structured_output(Boat, method="guess")
    with pytest.raises(InvalidRequest, match="needs a schema"):
        model.with_structured_output()


def test_response_format_is_taken_as_openai_writes_it(model: ChatRagCache) -> None:
    named = {"name": "Boat", "schema": Boat.model_json_schema()}
    form = {"type": "json_schema", "json_schema": named}
    assert Boat.model_validate_json(str(model.invoke("x", response_format=form).content))
    with pytest.raises(InvalidRequest, match="holds no json_schema"):
        model.invoke("x", response_format={"type": "json_schema"})


@tool
def weather(place: str) -> str:
    """The weather at a place."""
    return f"sunny in {place}"


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@pytest.mark.parametrize(
    ("choice", "name", "arguments"),
    [
        ("any", "weather", {"place": STRING}),
        ("required", "weather", {"place": STRING}),
        (True, "weather", {"place": STRING}),
        ("auto", "weather", {"place": STRING}),
        (None, "weather", {"place": STRING}),
        ("add", "add", {"a": 3, "b": 3}),
        ({"type": "function", "function": {"name": "add"}}, "add", {"a": 3, "b": 3}),
    ],
)
def test_tool_choice_determines_the_call(
    model: ChatRagCache, choice: Any, name: str, arguments: dict[str, Any]
) -> None:
    tools = [weather] if name == "weather" else [weather, add]
    bound = model.bind_tools(tools, tool_choice=choice)
    answer = bound.invoke("Do it")
    assert answer.content == ""
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == (name, arguments)
    assert len(call["id"]) == 9


def test_choice_none_offers_no_tools(model: ChatRagCache) -> None:
    assert model.bind_tools([weather], tool_choice="none").invoke("x").content == SAID
    assert model.bind_tools([]).invoke("x").content == SAID


async def test_calls_come_in_parts_while_they_are_written(model: ChatRagCache) -> None:
    bound = model.bind_tools([add], tool_choice="any")
    chunks: list[Any] = list(bound.stream("Add"))
    parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert [part["name"] for part in parts] == ["add"] + [None] * (len(parts) - 1)
    assert parts[0]["id"] is not None
    assert "".join(part["args"] for part in parts) == '{"a": 3, "b": 3}'
    assert len(parts) > 10
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls[0]["args"] == {"a": 3, "b": 3}
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert [c.content async for c in bound.astream("Add")] == [""] * len(chunks)


def test_text_still_streams_with_tools_bound(model: ChatRagCache) -> None:
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "abc123xyz", "type": "tool_call"}
    history = [
        HumanMessage("1 + 2?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("3", tool_call_id="abc123xyz"),
    ]
    bound = model.bind_tools([add])
    chunks = list(bound.stream(history))
    assert "".join(str(chunk.content) for chunk in chunks) == AFTER_TOOL
    assert sum(bool(chunk.content) for chunk in chunks) == len(AFTER_TOOL)
    assert bound.invoke(history).content == AFTER_TOOL


def test_a_call_that_is_cut_off_is_invalid(scripted: RagCache) -> None:
    bound = ChatRagCache(rag=scripted, max_tokens=45).bind_tools([weather], tool_choice="any")
    answer = bound.invoke("x")
    assert answer.tool_calls == []
    [wrong] = answer.invalid_tool_calls
    assert wrong["name"] == "weather"
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_call_without_a_name_is_invalid_in_a_stream_too(scripted: RagCache) -> None:
    bound = ChatRagCache(rag=scripted, max_tokens=4).bind_tools([weather], tool_choice="any")
    answer: Any = bound.invoke("x")
    chunks: list[Any] = list(bound.stream("x"))
    for message in (answer, sum(chunks[1:], chunks[0])):
        assert message.tool_calls == []
        assert [call["name"] for call in message.invalid_tool_calls] == [None]


@pytest.mark.slow
def test_a_cut_stream_calls_what_a_cut_answer_calls(scripted: RagCache) -> None:
    bound = ChatRagCache(rag=scripted).bind_tools([weather], tool_choice="any")
    length = bound.invoke("x", max_tokens=200).usage_metadata["output_tokens"]
    for most in range(1, length + 1):
        chunks: list[Any] = list(bound.stream("x", max_tokens=most))
        invoked, streamed = bound.invoke("x", max_tokens=most), sum(chunks[1:], chunks[0])
        assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in invoked.tool_calls]
        wrong = [[c["name"] for c in each.invalid_tool_calls] for each in (invoked, streamed)]
        assert wrong[0] == wrong[1]
        reasons = {each.response_metadata["finish_reason"] for each in (invoked, streamed)}
        assert len(reasons) == 1


def test_a_template_without_tools_answers_in_text(
    tmp_path_factory: pytest.TempPathFactory, quick_reader: LoadedModel
) -> None:
    with RagCache.open(tmp_path_factory.mktemp("reader"), model=quick_reader) as rag:
        model = ChatRagCache(rag=rag, max_tokens=4)
        bound = model.bind_tools([weather])
        assert bound.invoke("x").content == model.invoke("x").content
        chunks: list[Any] = list(bound.stream("x"))
        assert sum(chunks[1:], chunks[0]).content == model.invoke("x").content
        with pytest.raises(UnsupportedModel, match="chat template takes no tools"):
            model.bind_tools([weather], tool_choice="any").invoke("x")


def test_invalid_tools_and_choices_are_refused(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="must be auto, required or one of weather, add"):
        model.bind_tools([weather, add], tool_choice="subtract")
    with pytest.raises(InvalidRequest, match="names no function"):
        resolve_tool_choice({"type": "function"}, convert_tools([add]))
    with pytest.raises(InvalidRequest, match="cannot be described"):
        model.bind_tools([{"nameless": 1}])


class BoatTool(BaseModel):
    """A boat."""

    name: str


def test_an_agent_calls_tools_and_answers_by_a_schema(model: ChatRagCache) -> None:
    agent = create_agent(model, tools=[weather], response_format=ProviderStrategy(BoatTool))
    said = agent.invoke({"messages": [("user", "Which boat?")]}, {"recursion_limit": 6})
    assert said["structured_response"] == BoatTool(name=STRING)
    assert [each.type for each in said["messages"]] == ["human", "ai", "tool", "ai"]


def test_optional_calls_without_a_grammar_go_unconstrained() -> None:
    inexpressible = [{"name": "f", "parameters": {"type": "object", "not": {"type": "string"}}}]
    assert call_grammar(inexpressible, "auto", ToolStyle.HERMES, True) is None
    with pytest.raises(InvalidRequest, match="not"):
        call_grammar(inexpressible, "required", ToolStyle.HERMES, True)
    with pytest.raises(InvalidRequest, match="not"):
        call_grammar(inexpressible, "auto", ToolStyle.HERMES, True, strict=True)
    assert call_grammar(convert_tools([add]), "auto", ToolStyle.HERMES, True) is not None


def test_strict_reaches_the_call(model: ChatRagCache) -> None:
    inexpressible = {
        "title": "f", "description": "f", "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
    }  # fmt: skip
    assert isinstance(model.bind_tools([inexpressible]).invoke("x"), AIMessage)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        model.bind_tools([inexpressible], strict=True).invoke("x")


def test_parallel_calls_may_be_off(scripted: RagCache) -> None:
    options = {"mode": "rooted", "recognize": True, "tools": convert_tools([add])}
    more, info = {"tool_choice": "any"}, ModelInfo(scripted)
    one, several = (
        CallOptions.resolve(options, None, {**more, "parallel_tool_calls": parallel}, info)
        for parallel in (False, True)
    )
    assert one.generation.grammar != several.generation.grammar
