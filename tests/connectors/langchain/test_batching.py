from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from threading import Barrier, Event
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.rate_limiters import InMemoryRateLimiter

from ragcache import RagCache
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.pipeline import PendingAnswer
from ragcache.pipeline.submit import Submitter
from ragcache_connectors.langchain import ChatRagCache
from tests.connectors.langchain.conftest import DOCUMENT, wait_until_idle

TEXTS = ["Hello", f"{DOCUMENT} Where is the boat?", "Who was it?", "Hello"]
TOO_LONG = "word " * 5000


@pytest.fixture
def model(boats: RagCache) -> ChatRagCache:
    return ChatRagCache(rag=boats, max_tokens=5)


@pytest.fixture
def events(boats: RagCache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order: what is submitted, and what is waited for."""
    seen: list[str] = []
    submit = Submitter._lease_and_submit
    result, aresult = PendingAnswer.result, PendingAnswer.aresult

    def submitting(self: Any, *args: Any) -> Any:
        seen.append("submit")
        return submit(self, *args)

    def waiting(self: Any) -> Any:
        seen.append("wait")
        return result(self)

    def awaiting(self: Any) -> Any:
        seen.append("wait")
        return aresult(self)

    monkeypatch.setattr(Submitter, "_lease_and_submit", submitting)
    monkeypatch.setattr(PendingAnswer, "result", waiting)
    monkeypatch.setattr(PendingAnswer, "aresult", awaiting)
    return seen


def answer_one_by_one(model: ChatRagCache, texts: list[str]) -> list[object]:
    return [model.invoke(text).content for text in texts]


@pytest.mark.slow
def test_a_batch_is_submitted_before_anything_is_waited_for(
    model: ChatRagCache, events: list[str]
) -> None:
    answers = model.batch(TEXTS)
    assert events == ["submit"] * 4 + ["wait"] * 4
    assert [answer.content for answer in answers] == answer_one_by_one(model, TEXTS)


@pytest.mark.slow
async def test_an_async_batch_is_submitted_first(model: ChatRagCache, events: list[str]) -> None:
    answers = await model.abatch(TEXTS)
    assert events == ["submit"] * 4 + ["wait"] * 4
    assert [a.content for a in answers] == await asyncio.to_thread(answer_one_by_one, model, TEXTS)


@pytest.mark.slow
async def test_generate_submits_all_lists_first(model: ChatRagCache, events: list[str]) -> None:
    lists = [[HumanMessage(text)] for text in TEXTS]
    generated = model.generate(lists, stop=["never"], tags=["a"])
    assert events == ["submit"] * 4 + ["wait"] * 4
    events.clear()
    awaited = await model.agenerate(lists)
    assert events == ["submit"] * 4 + ["wait"] * 4
    texts = [[each[0].text for each in some.generations] for some in (generated, awaited)]
    assert texts[0] == texts[1] == await asyncio.to_thread(answer_one_by_one, model, TEXTS)


class HoldRun(BaseCallbackHandler):
    """Holds a run at its beginning until `go` is set."""

    raise_error = True

    def __init__(self, go: Callable[[], object]) -> None:
        self.go = go

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.go()


class HoldTask(AsyncCallbackHandler):
    def __init__(self, go: asyncio.Event) -> None:
        self.go = go

    async def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        await self.go.wait()


def test_answers_come_as_they_end(model: ChatRagCache, events: list[str]) -> None:
    go = Event()
    configs: Any = [{"callbacks": [HoldRun(lambda: go.wait(60))]}, {}, {}]
    coming = model.batch_as_completed(TEXTS[:3], configs)
    first = [next(coming), next(coming)]
    assert events[:3] == ["submit"] * 3
    assert sorted(number for number, _ in first) == [1, 2]
    go.set()
    answers = dict([*first, *coming])
    assert events == ["submit"] * 3 + ["wait"] * 3
    assert [answers[n].content for n in range(3)] == answer_one_by_one(model, TEXTS[:3])


async def test_asynchronous_answers_come_as_they_end(
    model: ChatRagCache, events: list[str]
) -> None:
    go = asyncio.Event()
    configs: Any = [{"callbacks": [HoldTask(go)]}, {}]
    coming = model.abatch_as_completed(TEXTS[:2], configs)
    number, second = await anext(coming)
    assert (number, events) == (1, ["submit", "submit", "wait"])
    go.set()
    [(number, first)] = [each async for each in coming]
    assert number == 0
    expected = await asyncio.to_thread(answer_one_by_one, model, TEXTS[:2])
    assert [first.content, second.content] == expected


async def test_leaving_a_batch_cancels_its_requests(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=4000, min_tokens=4000)
    texts, config = ["Hello", TOO_LONG, "Hey"], None
    for number, output in model.batch_as_completed(texts, config, return_exceptions=True):
        assert (number, type(output).__name__) == (1, "PromptTooLong")
        break
    wait_until_idle(boats)
    with pytest.raises(PromptTooLong):
        await model.abatch(texts)
    wait_until_idle(boats)


def test_runs_of_a_batch_overlap(model: ChatRagCache) -> None:
    together = Barrier(4, timeout=60)
    answers = model.batch(TEXTS, {"callbacks": [HoldRun(together.wait)]})
    assert len(answers) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_streaming_runs_take_submitted_streams(
    boats: RagCache, events: list[str], asynchronous: bool
) -> None:
    model = ChatRagCache(rag=boats, n=2, max_tokens=3, min_tokens=3, streaming=True)
    answers = await model.abatch(TEXTS[:2]) if asynchronous else model.batch(TEXTS[:2])
    assert events.count("submit") == 2
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [3, 3]


def test_runs_with_other_options_take_nothing(model: ChatRagCache, events: list[str]) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    submitted = model.submit_chats([conversation], {})
    with closing(submitted), submitted.offered():
        assert model.invoke("Hello", max_tokens=2).usage_metadata["output_tokens"] <= 2
        assert events.count("submit") == 2
        model.invoke("Hello")
        assert events.count("submit") == 2


def test_negative_max_concurrency_is_refused(model: ChatRagCache) -> None:
    with pytest.raises(InvalidRequest, match="max_concurrency is -1"):
        model.batch(TEXTS, {"max_concurrency": -1})


def test_max_concurrency_bounds_submissions(model: ChatRagCache, events: list[str]) -> None:
    model.batch(TEXTS[:3], {"max_concurrency": 2})
    assert events == ["submit", "submit", "wait", "wait", "submit", "wait"]


class RecordRuns(BaseCallbackHandler):
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
    handlers = [RecordRuns(), RecordRuns()]
    configs: Any = [
        {"callbacks": [handler], "tags": [f"t{i}"]} for i, handler in enumerate(handlers)
    ]
    model.batch(["a", "b"], configs)
    assert [len(handler.begun) for handler in handlers] == [1, 1]
    assert [handler.begun == handler.ended for handler in handlers] == [True, True]
    assert [handler.tags for handler in handlers] == [[["t0"]], [["t1"]]]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_one_invalid_input_does_not_fail_the_others(
    model: ChatRagCache, events: list[str], asynchronous: bool
) -> None:
    handler, texts = RecordRuns(), ["Hello", TOO_LONG, "Hey"]
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


def test_streams_that_no_run_takes_are_canceled(model: ChatRagCache, boats: RagCache) -> None:
    with pytest.raises(PromptTooLong):
        model.batch([TOO_LONG, "Hello", "Hey"], max_tokens=4000, min_tokens=4000)
    wait_until_idle(boats)


def test_cached_answers_are_not_submitted(boats: RagCache, events: list[str]) -> None:
    model = ChatRagCache(rag=boats, max_tokens=3, cache=InMemoryCache())
    first = model.batch(["Hello", "Hey"], {"max_concurrency": 1})
    assert events.count("submit") == 2
    again = model.batch(["Hello", "Hey"], {"max_concurrency": 1})
    assert events.count("submit") == 2
    assert [a.content for a in again] == [a.content for a in first]


def test_a_rate_limiter_sees_each_run(boats: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, asked = InMemoryRateLimiter(requests_per_second=1000), []
    monkeypatch.setattr(limiter, "acquire", lambda blocking: bool(asked.append(blocking)) or True)
    ChatRagCache(rag=boats, max_tokens=2, rate_limiter=limiter).batch(["Hello", "Hey"])
    assert asked == [True, True]


def test_an_empty_batch_gives_no_answers(model: ChatRagCache) -> None:
    assert model.batch([]) == []
