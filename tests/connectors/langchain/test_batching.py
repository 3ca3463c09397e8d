from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Barrier, Event
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter

from ragcache import RagCache
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.models import LoadedModel
from ragcache.pipeline import PendingAnswer, Submitter
from ragcache_connectors.langchain import ChatRagCache
from ragcache_connectors.langchain.batching import Handed, submit, within
from tests.connectors.langchain.chats import DOCUMENT, idle, notes_open

TEXTS = ["Hello", f"{DOCUMENT} Where is the boat?", "Who was it?", "Hello"]
TOO_LONG = "word " * 5000


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory, reader: LoadedModel) -> Iterator[RagCache]:
    with notes_open(tmp_path_factory.mktemp("reader"), reader) as rag:
        yield rag


@pytest.fixture
def model(rag: RagCache) -> ChatRagCache:
    return ChatRagCache(rag=rag, max_tokens=5)


@pytest.fixture
def events(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order: what is submitted, and what is waited for."""
    seen: list[str] = []
    submit, result, aresult = Submitter._submit, PendingAnswer.result, PendingAnswer.aresult

    def submitting(self: Any, *args: Any) -> Any:
        seen.append("submit")
        return submit(self, *args)

    def waiting(self: Any) -> Any:
        seen.append("wait")
        return result(self)

    def awaiting(self: Any) -> Any:
        seen.append("wait")
        return aresult(self)

    monkeypatch.setattr(Submitter, "_submit", submitting)
    monkeypatch.setattr(PendingAnswer, "result", waiting)
    monkeypatch.setattr(PendingAnswer, "aresult", awaiting)
    return seen


def singly(model: ChatRagCache, texts: list[str]) -> list[object]:
    return [model.invoke(text).content for text in texts]


def test_a_batch_is_submitted_before_anything_is_waited_for(
    model: ChatRagCache, events: list[str]
) -> None:
    answers = model.batch(TEXTS)
    assert events == ["submit"] * 4 + ["wait"] * 4
    assert [answer.content for answer in answers] == singly(model, TEXTS)


async def test_an_asynchronous_batch_too(model: ChatRagCache, events: list[str]) -> None:
    answers = await model.abatch(TEXTS)
    assert events == ["submit"] * 4 + ["wait"] * 4
    assert [a.content for a in answers] == await asyncio.to_thread(singly, model, TEXTS)


async def test_lists_for_generate_too(model: ChatRagCache, events: list[str]) -> None:
    lists = [[HumanMessage(text)] for text in TEXTS]
    generated = model.generate(lists, stop=["never"], tags=["a"])
    assert events == ["submit"] * 4 + ["wait"] * 4
    events.clear()
    awaited = await model.agenerate(lists)
    assert events == ["submit"] * 4 + ["wait"] * 4
    told = [[each[0].text for each in some.generations] for some in (generated, awaited)]
    assert told[0] == told[1] == await asyncio.to_thread(singly, model, TEXTS)


def test_a_chain_hands_its_batch_on(model: ChatRagCache, events: list[str]) -> None:
    chain = ChatPromptTemplate.from_template("Q: {q}") | model.bind(stop=["never"])
    chain.batch([{"q": text} for text in TEXTS])
    assert events == ["submit"] * 4 + ["wait"] * 4


class Held(BaseCallbackHandler):
    """Holds a run at its beginning until `go` is set."""

    raise_error = True

    def __init__(self, go: Callable[[], object]) -> None:
        self.go = go

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.go()


class HeldTask(AsyncCallbackHandler):
    def __init__(self, go: asyncio.Event) -> None:
        self.go = go

    async def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        await self.go.wait()


def test_answers_come_as_they_end(model: ChatRagCache, events: list[str]) -> None:
    go = Event()
    configs: Any = [{"callbacks": [Held(lambda: go.wait(60))]}, {}, {}]
    coming = model.batch_as_completed(TEXTS[:3], configs)
    first = [next(coming), next(coming)]
    assert events[:3] == ["submit"] * 3
    assert sorted(number for number, _ in first) == [1, 2]
    go.set()
    said = dict([*first, *coming])
    assert events == ["submit"] * 3 + ["wait"] * 3
    assert [said[n].content for n in range(3)] == singly(model, TEXTS[:3])


async def test_answers_come_as_they_end_to_asyncio_too(
    model: ChatRagCache, events: list[str]
) -> None:
    go = asyncio.Event()
    configs: Any = [{"callbacks": [HeldTask(go)]}, {}]
    coming = model.abatch_as_completed(TEXTS[:2], configs)
    number, second = await anext(coming)
    assert (number, events) == (1, ["submit", "submit", "wait"])
    go.set()
    [(number, first)] = [each async for each in coming]
    assert number == 0
    told = await asyncio.to_thread(singly, model, TEXTS[:2])
    assert [first.content, second.content] == told


async def test_leaving_a_batch_gives_up_what_is_under_way(rag: RagCache) -> None:
    model = ChatRagCache(rag=rag, max_tokens=4000, min_tokens=4000)
    texts, config = ["Hello", TOO_LONG, "Hey"], None
    for number, output in model.batch_as_completed(texts, config, return_exceptions=True):
        assert (number, type(output).__name__) == (1, "PromptTooLong")
        break
    idle(rag)
    with pytest.raises(PromptTooLong):
        await model.abatch(texts)
    idle(rag)


def test_the_runs_of_a_batch_are_under_way_together(model: ChatRagCache) -> None:
    together = Barrier(4, timeout=60)
    answers = model.batch(TEXTS, {"callbacks": [Held(together.wait)]})
    assert len(answers) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_runs_that_stream_take_what_was_submitted(
    rag: RagCache, events: list[str], asynchronous: bool
) -> None:
    model = ChatRagCache(rag=rag, n=2, max_tokens=3, min_tokens=3, streaming=True)
    answers = await model.abatch(TEXTS[:2]) if asynchronous else model.batch(TEXTS[:2])
    assert events.count("submit") == 2
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [3, 3]


def test_runs_that_ask_otherwise_take_nothing(model: ChatRagCache, events: list[str]) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    options = model._call(model._open(), None, {}).chat
    handed = Handed(submit(model, model._open(), [conversation], options))
    with closing(handed), within(handed):
        assert model.invoke("Hello", max_tokens=2).usage_metadata["output_tokens"] <= 2
        assert events.count("submit") == 2
        model.invoke("Hello")
        assert events.count("submit") == 2


def test_max_concurrency_that_is_no_number_of_inputs_is_refused(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="max_concurrency is -1"):
        model.batch(TEXTS, {"max_concurrency": -1})


def test_max_concurrency_bounds_what_is_submitted(model: ChatRagCache, events: list[str]) -> None:
    model.batch(TEXTS[:3], {"max_concurrency": 2})
    assert events == ["submit", "submit", "wait", "wait", "submit", "wait"]


class Runs(BaseCallbackHandler):
    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.failed: list[Any] = []
        self.tags: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.begun.append(kwargs["run_id"])
        self.tags.append(kwargs["tags"])

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended.append(kwargs["run_id"])

    def on_llm_error(self, error: Any, **kwargs: Any) -> None:
        self.failed.append(type(error).__name__)


def test_each_input_has_a_run_of_its_own(model: ChatRagCache) -> None:
    handlers = [Runs(), Runs()]
    configs: Any = [
        {"callbacks": [handler], "tags": [f"t{i}"]} for i, handler in enumerate(handlers)
    ]
    model.batch(["a", "b"], configs)
    assert [len(handler.begun) for handler in handlers] == [1, 1]
    assert [handler.begun == handler.ended for handler in handlers] == [True, True]
    assert [handler.tags for handler in handlers] == [[["t0"]], [["t1"]]]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_one_bad_input_fails_alone(
    model: ChatRagCache, events: list[str], asynchronous: bool
) -> None:
    handler, texts = Runs(), ["Hello", TOO_LONG, "Hey"]
    config: Any = {"callbacks": [handler]}
    if asynchronous:
        answers: list[Any] = await model.abatch(texts, config, return_exceptions=True)
    else:
        answers = model.batch(texts, config, return_exceptions=True)
    assert events[:2] == ["submit"] * 2
    assert [type(answer).__name__ for answer in answers] == [
        "AIMessage", "PromptTooLong", "AIMessage",
    ]  # fmt: skip
    assert handler.failed == ["PromptTooLong"]
    with pytest.raises(PromptTooLong):
        model.batch(texts)


def test_what_no_run_takes_is_given_up(model: ChatRagCache, rag: RagCache) -> None:
    with pytest.raises(PromptTooLong):
        model.batch([TOO_LONG, "Hello", "Hey"], max_tokens=4000, min_tokens=4000)
    idle(rag)


def test_the_cache_of_langchain_decides_what_is_asked(rag: RagCache, events: list[str]) -> None:
    model = ChatRagCache(rag=rag, max_tokens=3, cache=InMemoryCache())
    first = model.batch(["Hello", "Hey"], {"max_concurrency": 1})
    assert events.count("submit") == 2
    again = model.batch(["Hello", "Hey"], {"max_concurrency": 1})
    assert events.count("submit") == 2
    assert [a.content for a in again] == [a.content for a in first]


def test_a_rate_limiter_is_asked_for_each(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, asked = InMemoryRateLimiter(requests_per_second=1000), []
    monkeypatch.setattr(limiter, "acquire", lambda blocking: bool(asked.append(blocking)) or True)
    ChatRagCache(rag=rag, max_tokens=2, rate_limiter=limiter).batch(["Hello", "Hey"])
    assert asked == [True, True]


def test_an_empty_list_is_answered_by_one(model: ChatRagCache) -> None:
    assert model.batch([]) == []
