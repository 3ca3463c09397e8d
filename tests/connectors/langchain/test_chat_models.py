from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, trim_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import ValidationError

from ragcache import RagCache
from ragcache.errors import DeadlineExceeded, InvalidRequest, PromptTooLong
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import ChatRagCache, close_shared, shared_rag
from ragcache_connectors.langchain.call_options import ModelInfo
from tests.connectors.langchain.conftest import DOCUMENT, open_with_notes, wait_until_idle
from tests.connectors.langchain.scripted_model import SAID, scripted_model

QUESTION = f"Answer from this:\n\n{DOCUMENT}\n\nWhere is the boat?"


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return sum(chunks[1:], chunks[0])


def plain(message: AIMessage) -> tuple[object, ...]:
    """The fields that every style of call gives alike."""
    metadata = {k: v for k, v in message.response_metadata.items() if k != "ragcache"}
    return message.content, message.usage_metadata, metadata


def test_an_ordinary_chain_reads_documents_from_their_states(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=4)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from the context."), ("human", "{context}\n\nQuestion: {question}")]
    )
    values = {"context": DOCUMENT, "question": "Where is the boat?"}
    answer = (prompt | model).invoke(values)
    assert answer.content == (prompt | model | StrOutputParser()).invoke(values)
    read = answer.response_metadata["ragcache"]
    assert read["mode"] == "recognized:rooted"
    assert [source["document"] for source in read["sources"]] == ["boats"]
    details = answer.usage_metadata["input_token_details"]
    length = len(model.get_token_ids(DOCUMENT))
    assert details["cache_read"] >= length - 2
    assert answer.usage_metadata["input_tokens"] > length


def test_a_collection_is_searched_for_the_last_message(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, collection="notes", k=1, max_tokens=4)
    chat = [("system", "Be brief."), ("human", "Where is the boat?")]
    answer = model.invoke(chat)
    [source] = answer.response_metadata["ragcache"]["sources"]
    assert source["document"] == "boats"
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    assert [each.content for each in model.batch([chat, chat])] == [answer.content] * 2
    assert total(list(model.stream(chat))).content == answer.content
    plain = ChatRagCache(rag=boats, max_tokens=4)
    assert plain.invoke(chat, collection="notes", k=1).content == answer.content
    assert plain.invoke(chat).response_metadata["ragcache"]["sources"] == []
    assert plain._identifying_params != model._identifying_params
    with pytest.raises(InvalidRequest, match="k search documents; give `collection`"):
        plain.invoke(chat, k=1)


def test_an_extractive_answer_quotes_what_was_recognized(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, extractive=True, temperature=2.0, seed=1, max_tokens=12)
    answer = model.invoke(QUESTION)
    [span, *_] = answer.response_metadata["ragcache"]["spans"]
    assert DOCUMENT[span["start"] : span["end"]] == answer.text
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert chunks[-1].response_metadata["ragcache"]["spans"][0] == span
    with pytest.raises(InvalidRequest, match="no ingested text"):
        model.invoke("Where is the boat?")


@pytest.mark.slow
def test_an_answer_that_the_documents_do_not_bear_out_is_refused(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, confidence=True, max_tokens=4)
    said = model.invoke(QUESTION)
    confidence = said.response_metadata["ragcache"]["confidence"]
    assert 0 <= confidence <= 1
    strict = model.bind(min_confidence=1.0, refusal="Unknown.")
    refused = strict.invoke(QUESTION)
    assert (refused.content, refused.response_metadata["finish_reason"]) == (
        "Unknown.",
        "no_answer",
    )
    assert total(list(strict.stream(QUESTION))).content == "Unknown."
    assert ChatRagCache(rag=boats, max_tokens=4).invoke(QUESTION).content == said.content


def test_recognition_may_be_off_for_a_model_or_a_call(boats: RagCache) -> None:
    off = ChatRagCache(rag=boats, max_tokens=2, recognize=False).invoke(QUESTION)
    assert off.response_metadata["ragcache"]["sources"] == []
    exact = ChatRagCache(rag=boats, max_tokens=2).invoke(QUESTION, mode="exact")
    assert exact.response_metadata["ragcache"]["mode"] == "exact"
    assert [s["tier"] for s in exact.response_metadata["ragcache"]["sources"]] == ["computed"]


def test_states_that_a_request_encodes_are_counted_as_created(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    with open_with_notes(tmp_path, quick_reader) as rag:
        rag.modules.evict(documents=["boats"], collection="notes")
        model = ChatRagCache(rag=rag, max_tokens=2)
        first, second = model.invoke(QUESTION), model.invoke(QUESTION)
    created = first.usage_metadata["input_token_details"]
    assert created["cache_creation"] > 20 > created["cache_read"]
    read = second.usage_metadata["input_token_details"]
    assert read["cache_creation"] == 0
    assert read["cache_read"] >= created["cache_creation"]


@pytest.mark.slow
async def test_all_styles_of_call_give_the_same_answer(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=6, min_tokens=6)
    model.invoke(QUESTION)  # what was private is shared from now on
    invoked = plain(model.invoke(QUESTION))
    assert invoked[0]
    assert plain(total(list(model.stream(QUESTION)))) == invoked
    assert plain(await model.ainvoke(QUESTION)) == invoked
    assert plain(total([chunk async for chunk in model.astream(QUESTION)])) == invoked
    assert [plain(each) for each in model.batch([QUESTION] * 2)] == [invoked] * 2
    assert [plain(each) for each in await model.abatch([QUESTION] * 2)] == [invoked] * 2
    assert invoked[2]["finish_reason"] == "length"
    assert invoked[2]["model_name"] == "ragcache-reader"


def test_tokens_come_one_by_one_and_usage_once(boats: RagCache) -> None:
    chunks = list(ChatRagCache(rag=boats, max_tokens=6).stream("Hello"))
    assert sum(bool(chunk.content) for chunk in chunks) >= 5
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]
    assert chunks[-1].chunk_position == "last"


@pytest.mark.parametrize("given", ["field", "alias", "call", "bound"])
def test_stop_may_be_given_anywhere_and_span_tokens(scripted: RagCache, given: str) -> None:
    stop = [SAID[1:]]  # of two tokens
    model = ChatRagCache(rag=scripted)
    if given == "field":
        answer = ChatRagCache(rag=scripted, stop=stop).invoke("x")
    elif given == "alias":
        answer = ChatRagCache(rag=scripted, stop_sequences=stop).invoke("x")
    elif given == "call":
        answer = total(list(model.stream("x", stop=stop)))
    else:
        answer = model.bind(stop=stop).batch(["x", "y"])[1]
    assert answer.content == SAID[0]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_a_stop_of_the_call_replaces_the_models(scripted: RagCache) -> None:
    model = ChatRagCache(rag=scripted, stop=[SAID[0]])
    assert model.invoke("x").content == ""
    assert model.invoke("x", stop=["?"]).content == SAID


def test_n_answers_are_counted_once(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=3, min_tokens=3, n=2, temperature=1.0, seed=4)
    [generations] = model.generate([[HumanMessage("Hello")]]).generations
    assert len(generations) == 2
    first, second = (generation.message for generation in generations)
    assert isinstance(first, AIMessage)
    assert isinstance(second, AIMessage)
    assert first.usage_metadata["output_tokens"] == 6
    assert second.usage_metadata is None
    assert total(list(model.stream("Hello"))).content == first.content


def test_log_probabilities_come_whole_and_in_chunks(scripted: RagCache) -> None:
    model = ChatRagCache(rag=scripted, logprobs=True, top_logprobs=2)
    tokens = model.invoke("x").response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == SAID
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in tokens)
    streamed = total(list(model.stream("x")))
    assert streamed.response_metadata["logprobs"]["content"] == tokens
    assert "logprobs" not in model.invoke("x", logprobs=False).response_metadata


def test_tokens_of_messages_are_those_of_the_prompt(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=1)
    counted = model.get_num_tokens_from_messages([HumanMessage("How many?")])
    assert counted == model.invoke("How many?").usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages([]) == 0
    kept = trim_messages(
        [HumanMessage("Hello"), AIMessage("Which boat is it?")], max_tokens=counted,
        token_counter=model, strategy="first", allow_partial=True,
    )  # fmt: skip
    assert kept[0].content == "Hello"


def test_too_long_a_prompt_raises_in_langchains_terms(scripted: RagCache) -> None:
    from langchain_core import exceptions

    overflow = getattr(exceptions, "ContextOverflowError", exceptions.LangChainException)
    model = ChatRagCache(rag=scripted)
    for ask in (model.invoke, lambda text: list(model.stream(text))):
        with pytest.raises(PromptTooLong) as caught:
            ask("x" * 9000)
        assert isinstance(caught.value, overflow)


@pytest.mark.parametrize(
    ("messages", "options", "wrong"),
    [
        ([], {}, "there are no messages"),
        ([("system", ""), {"role": "robot", "content": "x"}], {}, "robot"),
        ("x", {"temprature": 1}, "unknown option 'temprature', like 'temperature'; options"),
        ("x", {"temperature": -1}, "temperature is -1"),
        ("x", {"model": "another"}, "'another' is not open"),
        ("x", {"mode": "quick"}, "unknown mode"),
        ("x", {"tool_choice": "any"}, "there are no tools"),
        ("x", {"response_format": {"type": "xml"}}, "'xml'"),
        ("x", {"stop": ["x"] * 17}, "17 strings"),
    ],
)
def test_invalid_input_is_named(
    scripted: RagCache, messages: Any, options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        ChatRagCache(rag=scripted).invoke(messages, **options)


def test_a_request_may_time_out(scripted: RagCache) -> None:
    with pytest.raises(DeadlineExceeded):
        ChatRagCache(rag=scripted, timeout=1e-9).invoke("x")


@pytest.mark.parametrize("options", [{"temprature": 1}, {"rag": object(), "state": "x"}])
def test_unknown_fields_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRagCache(**options)


def test_variables_of_the_chat_template(boats: RagCache) -> None:
    for model in (
        ChatRagCache(rag=boats, chat_template_kwargs={"enable_thinking": False}),
        ChatRagCache(rag=boats).bind(chat_template_kwargs={"enable_thinking": False}),
    ):
        with pytest.raises(InvalidRequest, match="no variable 'enable_thinking'"):
            model.invoke("Hi")  # the reader's template has none


def test_options_of_an_answer_identify_the_model(scripted: RagCache, tmp_path: Path) -> None:
    base = ChatRagCache(rag=scripted)._identifying_params
    assert base["model"] == "scripted"
    assert base["fingerprint"] == ModelInfo(scripted).model.causal.fingerprint
    for option in (
        {"mode": "exact"}, {"recognize": False}, {"temperature": 0.5}, {"stop": ["x"]},
        {"chat_template_kwargs": {"x": 1}}, {"max_tokens": 3}, {"seed": 1}, {"top_k": 2},
    ):  # fmt: skip
        assert ChatRagCache(rag=scripted, **option)._identifying_params != base
    assert ChatRagCache(rag=scripted.within("other"))._identifying_params != base
    folders = [ChatRagCache(state=tmp_path / name)._identifying_params for name in "ab"]
    assert folders[0] != folders[1]
    kind = {"instruction": "Be kind."}
    kinder = ChatRagCache(state=tmp_path / "a", open_options=kind)._identifying_params
    assert kinder != folders[0]


def test_the_instruction_is_that_of_the_folder(quick_reader: LoadedModel, tmp_path: Path) -> None:
    options = {"instruction": "Be kind."}
    opened = ChatRagCache(state=tmp_path, model=quick_reader, open_options=options).open_rag()
    try:
        assert "Be kind." in opened.internals.ask.encoder.frame.preamble
        assert ModelInfo(opened).identity["instruction"] == "Be kind."
    finally:
        close_shared()


def test_cache_keys_hold_the_models_own_stop(scripted: RagCache) -> None:
    cache = InMemoryCache()
    whole, short = (ChatRagCache(rag=scripted, cache=cache, stop=s) for s in (None, [SAID[1:]]))
    assert whole._get_llm_string() != short._get_llm_string()
    assert [whole.invoke("x").content, short.invoke("x").content] == [SAID, SAID[0]]


def test_another_model_than_the_open_one_is_refused(scripted: RagCache) -> None:
    assert ChatRagCache(rag=scripted, model="scripted").invoke("x").content == SAID
    with pytest.raises(ValidationError, match="open with the model 'scripted', not with 'another'"):
        ChatRagCache(rag=scripted, model="another")


def test_a_model_of_a_folder_may_be_pickled_and_copied(tmp_path: Path) -> None:
    model = ChatRagCache(state=tmp_path, max_tokens=2)
    try:
        for _ in range(2):
            copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
            answers = [each.invoke("Hello").content for each in (model, *copies)]
            assert answers == [answers[0]] * 3
    finally:
        close_shared()


def test_a_folder_opened_elsewhere_gets_the_chats_model(tmp_path: Path) -> None:
    model = ChatRagCache(state=tmp_path, model=scripted_model(), open_options={"max_tokens": 2})
    try:
        assert shared_rag(None, tmp_path).internals.shared.model.name == "scripted"
        assert model.invoke("x").content == SAID[:2]
        with pytest.raises(ValidationError, match="is opened with model="):
            ChatRagCache(state=tmp_path, model="another")
        assert ChatRagCache(state=tmp_path).invoke("x").content == SAID[:2]
    finally:
        close_shared()


def test_leaving_a_stream_cancels_the_request(boats: RagCache) -> None:
    chunks = ChatRagCache(rag=boats, max_tokens=4000, min_tokens=4000).stream("Hello")
    next(chunks)
    chunks.close()
    assert ChatRagCache(rag=boats, max_tokens=1).invoke("Hello").content
    wait_until_idle(boats)


async def test_canceling_a_task_cancels_the_request(boats: RagCache) -> None:
    model = ChatRagCache(rag=boats, max_tokens=4000, min_tokens=4000)
    task = asyncio.create_task(model.ainvoke("Hello"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ChatRagCache(rag=boats, max_tokens=1).ainvoke("Hello")).content
    wait_until_idle(boats)
