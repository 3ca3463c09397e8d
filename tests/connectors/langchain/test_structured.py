from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel
from typing_extensions import TypedDict

from ragcache import RagCache
from ragcache.errors import InvalidRequest
from ragcache_connectors.langchain import ChatRagCache
from tests.connectors.langchain.scripted import STRING, scripted


class Boat(BaseModel):
    """A boat."""

    name: str
    berth: int


class BoatDict(TypedDict):
    """A boat."""

    name: str
    berth: int


UNHELD = {
    "title": "Odd",
    "description": "What decoding cannot hold to.",
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    with RagCache.open(tmp_path_factory.mktemp("scripted"), model=scripted()) as rag:
        yield rag


@pytest.fixture
def model(rag: RagCache) -> ChatRagCache:
    return ChatRagCache(rag=rag, max_tokens=200)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Boat, BoatDict, Boat.model_json_schema()])
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
    told = model.with_structured_output(Boat, include_raw=True).invoke("x")
    assert told["parsed"] == Boat(name=STRING, berth=3)
    assert told["raw"].content == f'{{"name": "{STRING}", "berth": 3}}'
    assert told["parsing_error"] is None


@pytest.mark.parametrize("schema", [Boat, BoatDict])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_that_was_cut_off_is_none(rag: RagCache, schema: Any, method: str) -> None:
    model = ChatRagCache(rag=rag, max_tokens=12 if method == "json_schema" else 60)
    with pytest.raises(OutputParserException, match="cut off"):
        model.with_structured_output(schema, method=method).invoke("x")
    told = model.with_structured_output(schema, method=method, include_raw=True).invoke("x")
    assert told["parsed"] is None
    assert isinstance(told["parsing_error"], OutputParserException)
    assert told["raw"].response_metadata["finish_reason"] == "length"


def test_json_mode_takes_what_decoding_cannot_hold_to(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="'uniqueItems'"):
        model.with_structured_output(UNHELD)
    assert isinstance(model.with_structured_output(UNHELD, method="json_mode").invoke("x"), dict)
    assert isinstance(model.with_structured_output(method="json_mode").invoke("x"), dict)


def test_what_is_no_method_or_no_schema_is_refused(model: ChatRagCache) -> None:
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
