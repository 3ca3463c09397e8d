"""OpenAI's chats and completions, with tools and formats; test_openai_clients has real clients."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import Citation, GenerationParams, RagCache
from ragcache.answers import citations
from ragcache.engine import LLMEngine, Request
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL
from ragcache_api.http.bodies import ChatRequest
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.model_ids import collection_in
from ragcache_api.http.sources import annotations_of, source_of
from ragcache_api.http.tools import OutputFormat, join_deltas
from tests.api.http.asgi import events
from tests.api.http.conftest import LEAVE, client_of
from tests.conftest import write_notes
from tests.ragcache.pipeline.test_chat_template import TOOLS

MODEL = "ragcache-reader"


def ask(client: TestClient, **body: Any) -> Any:
    given = {"model": MODEL, "messages": [{"role": "user", "content": LEAVE}], "max_tokens": 4}
    return client.post("/v1/chat/completions", json=given | body)


def chunks(text: str) -> list[dict[str, Any]]:
    told = [value for _, value in events(text)]
    assert told[-1] == "[DONE]"
    return told[:-1]


def test_a_chat_is_that_of_the_library(client: TestClient, rag: RagCache) -> None:
    told = ask(client).json()
    answer = rag.chat(
        [{"role": "user", "content": LEAVE}], generation=GenerationParams(max_tokens=4)
    )
    [choice] = told["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == answer.choices[0].text.lstrip()
    assert told["usage"]["prompt_tokens"] == answer.reuse.prompt_tokens
    assert told["usage"]["completion_tokens"] == len(answer.choices[0].token_ids)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert told["system_fingerprint"].startswith("fp_")
    assert "sources" not in told


def test_variables_of_the_chat_template(client: TestClient) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    for more in ({}, {"collection": "notes"}):  # the reader's template has none
        refused = ask(client, **body, **more)
        assert refused.status_code == 400
        assert "no variable 'enable_thinking'" in refused.text
    question = {"question": LEAVE, "collection": "notes", **body}
    refused = client.post("/v1/answers", json=question)
    assert refused.status_code == 400
    assert "no variable 'enable_thinking'" in refused.text
    request = ChatRequest(model=MODEL, messages=[{"role": "user", "content": "Hi"}], **body)
    assert request.reading() == request.retrieval() == body


def test_a_stream_adds_up_to_the_whole(client: TestClient) -> None:
    whole = ask(client, n=2, seed=1, temperature=0.9).json()
    streamed = chunks(ask(client, n=2, seed=1, temperature=0.9, stream=True).text)
    for index in range(2):
        deltas = [
            choice["delta"].get("content", "")
            for chunk in streamed
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert "".join(deltas) == whole["choices"][index]["message"]["content"]
    last = streamed[-1]["choices"]
    assert [c["finish_reason"] for c in last] == [c["finish_reason"] for c in whole["choices"]]
    assert all("usage" not in chunk for chunk in streamed)


def test_usage_comes_last_where_it_is_asked_for(client: TestClient) -> None:
    streamed = chunks(ask(client, stream=True, stream_options={"include_usage": True}).text)
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["completion_tokens"] > 0
    assert "cached_tokens" in streamed[-1]["usage"]["prompt_tokens_details"]
    assert all(chunk["usage"] is None for chunk in streamed[:-1])


def test_a_collection_turns_retrieval_on(client: TestClient, rag: RagCache) -> None:
    told = ask(client, collection="notes", max_tokens=None).json()
    answer = rag.ask(LEAVE, collection="notes")
    assert told["choices"][0]["message"]["content"].strip() == answer.text
    for told_source, source in zip(told["sources"], answer.sources, strict=True):
        name = source.document
        assert told_source["source"] == {"id": name, "name": name}
        assert told_source["document"] == [source.text]
        [details] = told_source["metadata"]
        assert (details["source"], details["module"]) == (name, source.module)
        assert source.uri.startswith("file:")
        assert details["uri"] == name, "paths of the server stay there"
        assert details["headings"] == [*source.headings]
    assert "26 days" in told["sources"][0]["document"][0]
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    streamed = chunks(ask(client, collection="notes", stream=True).text)
    [sources] = [chunk["sources"] for chunk in streamed if "sources" in chunk]
    assert sources == told["sources"]


@pytest.mark.parametrize("more", [{}, {"n": 2}])
def test_usage_names_the_documents(client: TestClient, more: dict[str, Any]) -> None:
    asked = {"collection": "notes", "k": 2, "relative_threshold": 0} | more
    told = ask(client, **asked).json()
    names = [source["source"]["name"] for source in told["sources"]]
    assert told["usage"]["sources"] == {name: names.count(name) for name in names}
    streamed = chunks(
        ask(client, **asked, stream=True, stream_options={"include_usage": True}).text
    )
    assert streamed[-1]["usage"]["sources"] == told["usage"]["sources"]
    assert "sources" in streamed[-3]  # Open WebUI's page shows no sources that come first
    assert "sources" not in ask(client).json()["usage"]


def test_a_collection_answers_the_last_question(client: TestClient) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A reader."},
        {"role": "user", "content": [{"type": "text", "text": LEAVE}]},
    ]
    assert ask(client, messages=messages, collection="notes").json()["sources"]
    alone = ask(client, messages=messages[-1:], collection="notes").json()
    long = [{"role": "system", "content": "Be brief. " * 3000}, *messages[1:]]
    for each in (messages, long):  # longer than the reader's window
        told = ask(client, messages=each, collection="notes", tools=[TOOL]).json()
        assert told["choices"] == alone["choices"]
    silent = ask(client, messages=messages[:1], collection="notes")
    assert silent.status_code == 400


def test_a_greeting_is_refused_by_the_reader_in_words(client: TestClient) -> None:
    greeting = {"messages": [{"role": "user", "content": "Hello!"}], "collection": "notes"}
    [choice] = ask(client, **greeting).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (REFUSAL, "stop")
    streamed = chunks(ask(client, **greeting, stream=True).text)
    said = [each["delta"].get("content", "") for chunk in streamed for each in chunk["choices"]]
    assert "".join(said) == REFUSAL


def test_extractive_answers_tell_their_spans(client: TestClient, rag: RagCache) -> None:
    body = {"collection": "notes", "extractive": True, "n": 2, "temperature": 2.0, "seed": 1}
    body |= {"min_confidence": 0}
    told = ask(client, **body, max_tokens=12).json()
    texts = [choice["message"]["content"] for choice in told["choices"]]
    spans = told["ragcache"]["spans"]
    assert {span["choice"] for span in spans} == {n for n, text in enumerate(texts) if text}
    for span in spans:
        text = rag.documents.texts("notes", [span["document"]])[span["document"]]
        assert text[span["start"] : span["end"]] == texts[span["choice"]]
    last = chunks(ask(client, **body, max_tokens=12, stream=True).text)[-1]
    assert last["ragcache"]["spans"] == spans
    refused = ask(client, **body, response_format={"type": "json_object"})
    assert refused.status_code == 400
    assert "quotation" in refused.json()["error"]["message"]


def test_a_refused_answer_stops_and_says_so(client: TestClient) -> None:
    body = {"collection": "notes", "max_tokens": 6, "n": 2, "logprobs": True}
    told = ask(client, **body, min_confidence=1, refusal="Unknown.").json()
    assert [each["message"]["content"] for each in told["choices"]] == ["Unknown."] * 2
    assert [each["finish_reason"] for each in told["choices"]] == ["stop"] * 2
    assert told["choices"][0]["logprobs"]["content"] == []
    assert told["ragcache"]["finish_reason"] == "no_answer"
    assert 0 < told["ragcache"]["confidence"] < 1
    assert told["usage"]["completion_tokens"] > 0
    streamed = chunks(ask(client, **body, min_confidence=1, refusal="Unknown.", stream=True).text)
    text = [c["delta"].get("content") for part in streamed for c in part["choices"]]
    assert [each for each in text if each] == ["Unknown."] * 2
    assert streamed[-1]["ragcache"]["finish_reason"] == "no_answer"


def test_documents_in_a_message_are_recognized(client: TestClient) -> None:
    text = (
        "# Leave\n\nEverybody has 26 days of leave a year. Requests go to Ines Marlow two weeks "
        "ahead."
    )
    told = ask(client, messages=[{"role": "user", "content": f"{text}\n\n{LEAVE}"}]).json()
    assert told["ragcache"]["mode"].startswith("recognized")
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_log_probabilities_have_openais_form(client: TestClient) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2, "min_tokens": 4}
    told = ask(client, **wanted).json()["choices"][0]["logprobs"]["content"]
    assert len(told) == 4
    for entry in told:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode() == entry["token"]
    streamed = chunks(ask(client, **wanted, stream=True).text)
    entries = [
        entry
        for chunk in streamed
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in told]


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"model": "gpt-4o"}, "model"),
        ({"n": 0}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"response_format": {"type": "json_schema"}}, None),
        (of_schema({"$ref": "#"}), None),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 2}), None),
        (of_schema({"enum": ["a string" * 8] * 4096}), None),
        pytest.param(
            of_schema({"allOf": [{"pattern": f".*{n:010}.*"} for n in range(40)]}),
            None,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_not_served_is_refused_in_openais_shape(
    client: TestClient, body: dict[str, Any], param: str | None
) -> None:
    response = ask(client, **body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"k": None, "mode": None}, {"k": None, "mode": None, "collection": "notes"},
        {"function_call": "none"}, {"function_call": None},
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "logit_bias": {}},
        pytest.param({"function_call": "auto"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_clients_send_for_nothing_is_nothing(client: TestClient, body: dict[str, Any]) -> None:
    plain = {"collection": body["collection"]} if "collection" in body else {}
    told = ask(client, **body)
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == ask(client, **plain).json()["choices"]


def test_a_top_p_of_nothing_takes_the_likeliest(client: TestClient) -> None:
    drawn = ask(client, temperature=1.5, top_p=0, seed=1)
    assert drawn.json()["choices"] == ask(client).json()["choices"]


def test_a_refusal_that_a_client_sends_back_is_text(client: TestClient) -> None:
    def asked(part: dict[str, str]) -> Any:
        said = [{"role": "assistant", "content": [part]}, {"role": "user", "content": LEAVE}]
        return ask(client, messages=[{"role": "user", "content": "Hi"}, *said])

    told = asked({"type": "refusal", "refusal": "No."})
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == asked({"type": "text", "text": "No."}).json()["choices"]
    assert asked({"type": "refusal", "text": "No."}).status_code == 400


@pytest.mark.parametrize(("settings", "most"), [({}, 1024), ({"chat_max_tokens": 9}, 9)])
def test_a_chat_without_a_limit_has_the_settings(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], most: int
) -> None:
    seen: list[Request] = []
    submit = LLMEngine.submit_request

    def submit_short(engine: LLMEngine, request: Request, **options: Any) -> Any:
        seen.append(request)
        return submit(engine, replace(request, max_tokens=1), **options)

    monkeypatch.setattr(LLMEngine, "submit_request", submit_short)
    with client_of(rag, **settings) as client:
        assert ask(client, max_tokens=None).status_code == 200
    assert [request.max_tokens for request in seen] == [most]


@pytest.mark.parametrize(
    ("sent", "ending"),
    [
        ({}, ("length", "repetition")),
        ({"repetition_limit": 0}, ("length", "length")),
        (
            {"repetition_detection": {"max_pattern_size": 1, "min_count": 9}},
            ("length", "repetition"),
        ),
        ({"repetition_detection": {"max_pattern_size": 0}}, ("length", "length")),
    ],
)
def test_an_answer_that_repeats_itself_ends(
    client: TestClient, sent: dict[str, Any], ending: tuple[str, str]
) -> None:
    told = ask(client, regex="(a a )+(b)?", max_tokens=64, min_tokens=2, **sent).json()
    assert (told["choices"][0]["finish_reason"], told["ragcache"]["finish_reason"]) == ending
    usage = told["usage"]["completion_tokens"]
    assert usage == 64 if ending[1] == "length" else usage < 40


@pytest.mark.slow
def test_without_a_limit_a_chat_may_take_what_the_window_leaves(
    client: TestClient, rag: RagCache
) -> None:
    window = rag.internals.shared.model.causal.window
    words = "word " * (window - 200)  # so that the answer, which never ends, is short
    messages = [{"role": "user", "content": words}]
    told = ask(client, messages=messages, max_tokens=None, ignore_eos=True).json()
    usage = told["usage"]
    assert told["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] > 64
    assert usage["total_tokens"] == window
    too_long = ask(client, messages=[{"role": "user", "content": words * 2}], max_tokens=None)
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        f"This model's maximum context length is {window} tokens. However, the prompt"
    )
    clamped = ask(client, messages=messages, max_tokens=window, ignore_eos=True).json()
    assert clamped["usage"]["completion_tokens"] == usage["completion_tokens"]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_steps")
def test_an_error_after_the_beginning_is_an_event(client: TestClient) -> None:
    late = client.post(
        "/v1/chat/completions",
        json={
            "model": MODEL, "messages": [{"role": "user", "content": LEAVE}], "stream": True,
            "max_tokens": 2000, "logprobs": False, "ignore_eos": True,
        },
        headers={"X-Request-Timeout": "2"},
    )  # fmt: skip
    assert late.status_code == 200
    told = [value for _, value in events(late.text)]
    assert told[-1]["error"]["code"] == "deadline_exceeded"


PROMPT = "The survey boat is"


def complete(client: TestClient, **body: Any) -> Any:
    given = {"model": "ragcache-reader", "prompt": PROMPT, "max_tokens": 4}
    return client.post("/v1/completions", json=given | body)


def test_a_text_is_continued_without_a_template(client: TestClient, rag: RagCache) -> None:
    told = complete(client).json()
    answer = rag.chat(PROMPT, generation=GenerationParams(max_tokens=4))
    assert told["object"] == "text_completion"
    assert told["choices"][0]["text"] == answer.choices[0].text
    assert told["usage"]["prompt_tokens"] == answer.reuse.prompt_tokens


def test_several_prompts_with_several_choices(client: TestClient) -> None:
    told = complete(client, prompt=[PROMPT, "Dogs"], n=2, temperature=1.0, seed=5, echo=True).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"][:4] for choice in told["choices"]]
    assert starts == ["The ", "The ", "Dogs", "Dogs"]


def test_a_streamed_completion_adds_up_to_the_whole(client: TestClient) -> None:
    whole = complete(client, logprobs=2, echo=False).json()["choices"][0]
    streamed = complete(client, logprobs=2, stream=True, stream_options={"include_usage": True})
    told = [value for _, value in events(streamed.text)]
    assert told[-1] == "[DONE]"
    parts = [choice for chunk in told[:-1] for choice in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [each["tokens"][0] for each in logprobs] == whole["logprobs"]["tokens"]
    assert [each["text_offset"][0] for each in logprobs] == whole["logprobs"]["text_offset"]
    assert told[-2]["usage"]["total_tokens"] > 4


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 10**9]},
        {"prompt": [[1], []]},
        {"prompt": [1], "collection": "notes"},
        {"prompt": []},
        {"suffix": "x"},
        {"best_of": 3},
        {"echo": True, "logprobs": 1, "collection": "notes"},
        {"echo": True, "logprobs": 1, "stream": True},
        {"echo": True, "max_tokens": 0, "stream": True},
        {"stream": True, "prompt": ["a", "b"]},
        {"max_tokens": 0},
        {"prompt": None},
    ],
)
def test_what_is_not_served_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    response = complete(client, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_models_are_listed(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "ragcache-reader"
    assert client.get("/v1/models/ragcache-reader").json()["object"] == "model"
    missing = client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


HERMES = SimpleNamespace(chat_template="{{ tools }}<tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "find", "strict": True,
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}  # fmt: skip
CALL = 'Wait. <tool_call>\n{"name": "find", "arguments": {"word": "boat"}}\n</tool_call>'


def shape(tokenizer: Any = HERMES, **body: Any) -> OutputFormat:
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return OutputFormat.of(ChatRequest.model_validate(given | body), tokenizer)


def test_calls_are_read_from_the_models_text() -> None:
    reader = shape(tools=[TOOL]).reader()
    message = join_deltas([*(reader.feed(char) for char in CALL), reader.finish()])
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"word": "boat"}'}
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert message["content"].strip() == "Wait."
    assert reader.finish_reason("stop") == "tool_calls"


def test_text_without_tools_is_text() -> None:
    reader = shape().reader()
    assert join_deltas([reader.feed("  <tool_call>"), reader.finish()])["content"] == "<tool_call>"
    assert reader.finish_reason("length") == "length"


def test_choices_of_tools_become_grammars() -> None:
    assert shape().grammar is None
    assert shape(tools=[TOOL]).grammar is None
    once = shape(tools=[TOOL], parallel_tool_calls=False)
    assert once.grammar is not None
    assert once.apply(GenerationParams(json_object=True)).forms == ("grammar",)
    assert shape(tools=[TOOL], tool_choice="none").tools is None
    named = {"type": "function", "function": {"name": "find"}}
    for choice in ("required", named):
        assert shape(tools=[TOOL], tool_choice=choice).grammar is not None
    other = {"type": "function", "function": {"name": "lose"}}
    with pytest.raises(HTTPProblem, match="lose"):
        shape(tools=[TOOL], tool_choice=other)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_only_a_required_call_needs_a_template_for_tools(choice: Any) -> None:
    plain = SimpleNamespace(chat_template="{{ messages }}")
    for optional in (None, "auto", "none"):
        made = shape(plain, tools=[TOOL], tool_choice=optional)
        assert (made.tools, made.style, made.grammar) == (None, None, None)
    with pytest.raises(HTTPProblem, match="no tool calls"):
        shape(plain, tools=[TOOL], tool_choice=choice)


@pytest.mark.parametrize("more", [{}, {"collection": "notes"}], ids=["alone", "collection"])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_are_answered_in_text(client: TestClient, choice: Any, more: dict[str, Any]) -> None:
    told = ask(client, tools=[TOOL], tool_choice=choice, **more)
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == ask(client, **more).json()["choices"]
    called = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "find"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "A boat."},
    ]
    assert ask(client, messages=called, tools=[TOOL], tool_choice=choice).status_code == 200


@pytest.fixture(scope="module")
def agent(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A service whose model's template takes tools."""
    folder, tokenizer = tmp_path_factory.mktemp("agent"), copy.deepcopy(quick_reader.tokenizer)
    tokenizer.chat_template = f"{{# <tool_call> #}}{TOOLS}"
    with RagCache.open(folder / "s", LoadedModel("a", quick_reader.causal, tokenizer)) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
        with client_of(opened) as made:
            yield made


def test_tools_go_together_with_a_collection(agent: TestClient) -> None:
    called = {"id": "1", "function": {"name": "find", "arguments": '{"word": "leave"}'}}
    messages = [
        {"role": "user", "content": LEAVE},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "Nothing."},
    ]
    given = {"model": "a", "messages": messages, "tools": [TOOL], "k": 1}
    told = ask(agent, **given, collection="notes").json()
    [source] = told["sources"]
    assert source["source"]["name"] == "leave.md"
    assert told["ragcache"]["mode"] == "recognized:rooted"
    kept = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    without = ask(agent, **given | {"k": None}).json()
    assert 0 < kept < told["usage"]["prompt_tokens"] - without["usage"]["prompt_tokens"]
    streamed = chunks(ask(agent, **given, collection="notes", stream=True).text)
    [sources] = [chunk["sources"] for chunk in streamed if "sources" in chunk]
    assert [each["source"]["name"] for each in sources] == ["leave.md"]


def test_a_collection_leaves_the_conversation_in_the_prompt(agent: TestClient) -> None:
    question = {"role": "user", "content": LEAVE}
    earlier = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A reader."},
    ]
    asked = {"model": "a", "collection": "notes", "k": 1}
    alone = ask(agent, **asked, messages=[question]).json()
    whole = ask(agent, **asked, messages=[*earlier, question]).json()
    assert whole["ragcache"]["mode"] == "recognized:rooted"
    assert whole["sources"][0]["source"] == alone["sources"][0]["source"]
    brief = ask(agent, **asked, messages=[earlier[0], question]).json()
    assert brief["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    quoted = ask(agent, **asked, messages=[*earlier, question], extractive=True).json()
    assert quoted["ragcache"]["spans"]


BARE = '{"name": "find", "arguments": {"word": "boat"}}'


def test_a_bare_call_of_an_offered_tool_is_a_call() -> None:
    for tokenizer in (HERMES, SimpleNamespace(chat_template="{{ messages }}")):
        reader = shape(tokenizer, tools=[TOOL]).reader()
        deltas = [*(reader.feed(char) for char in BARE), reader.finish()]
        [call] = join_deltas(deltas)["tool_calls"]
        assert call["function"] == {"name": "find", "arguments": '{"word": "boat"}'}
        assert not any("content" in delta for delta in deltas)
        assert reader.finish_reason("stop") == "tool_calls"
    formed = shape(tools=[TOOL], response_format={"type": "json_object"}).reader()
    assert join_deltas([formed.feed(BARE), formed.finish()])["content"] == BARE


def test_templates_get_what_they_know() -> None:
    [tool] = shape(tools=[TOOL]).tools or []
    assert set(tool["function"]) == {"name", "parameters"}


QUESTION = {"messages": [{"role": "user", "content": LEAVE}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": f"{MODEL}/notes"}),
        ("/v1/collections/notes/chat/completions", {"model": MODEL}),
        ("/v1/collections/notes/chat/completions", {"model": f"{MODEL}/notes"}),
        ("/v1/collections/notes/chat/completions", {"model": MODEL, "collection": "notes"}),
    ],
)
def test_collections_named_without_a_field(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    expected = ask(client, collection="notes").json()
    told = client.post(path, json=QUESTION | body).json()
    assert told["choices"] == expected["choices"]
    assert told["sources"][0]["source"] == expected["sources"][0]["source"]


def test_a_completion_below_a_collection(client: TestClient) -> None:
    body = {"model": MODEL, "prompt": LEAVE, "max_tokens": 4}
    told = client.post("/v1/collections/notes/completions", json=body).json()
    assert told["sources"]
    assert told["object"] == "text_completion"


@pytest.mark.parametrize(
    ("path", "model", "status", "code"),
    [
        ("/v1/chat/completions", f"{MODEL}/none", 404, "unknown_collection"),
        ("/v1/chat/completions", "other/notes", 404, "model_not_found"),
        ("/v1/collections/none/chat/completions", MODEL, 404, "unknown_collection"),
        ("/v1/collections/notes/chat/completions", "other", 404, "model_not_found"),
        ("/v1/collections/notes/chat/completions", f"{MODEL}/other", 400, "invalid_request"),
    ],
)
def test_wrong_names_of_collections(
    client: TestClient, path: str, model: str, status: int, code: str
) -> None:
    refused = client.post(path, json=QUESTION | {"model": model})
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


def test_models_name_the_collections(client: TestClient) -> None:
    listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert listed == [MODEL, f"{MODEL}/notes"]
    assert [client.get(f"/v1/models/{each}").json()["id"] for each in listed] == listed
    assert client.get(f"/v1/models/{MODEL}/none").status_code == 404
    base = "/v1/collections/notes/models"
    [card] = client.get(base).json()["data"]
    assert card["id"] == MODEL
    assert [client.get(f"{base}/{each}").json()["id"] for each in listed] == listed
    assert client.get(f"{base}/{MODEL}/other").status_code == 400
    for path in ("/v1/collections/none/models", f"/v1/collections/none/models/{MODEL}"):
        missing = client.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_collection")


@pytest.mark.parametrize("model", [None, "", MODEL, f"openai/{MODEL}", f"openai/{MODEL}/notes"])
def test_names_of_the_one_model(client: TestClient, model: str | None) -> None:
    told = client.post("/v1/chat/completions", json=QUESTION | {"model": model})
    assert told.status_code == 200, told.text
    assert told.json()["model"] == MODEL
    assert ("sources" in told.json()) is str(model).endswith("/notes")
    if model:
        card = client.get(f"/v1/models/{model}").json()
        assert card["id"] == model.removeprefix("openai/")


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ("/srv/models/Qwen3-4B", {}, "Qwen3-4B"),
        ("Qwen/Qwen3-4B", {}, "Qwen3-4B"),
        ("/c/models--Qwen--Qwen3-4B/snapshots/0a1b", {}, "Qwen3-4B"),
        ("/srv/a b@c", {}, "a-b@c"),
        ("/srv/models/Qwen3-4B", {"served_name": "team/chat"}, "team/chat"),
    ],
)
def test_the_id_of_a_model_is_no_path(
    rag: RagCache, model: str, settings: dict[str, Any], expected: str
) -> None:
    named = replace(rag.internals.shared.model, name=model)
    shared = replace(rag.internals.shared, model=named)
    internals = replace(rag.internals, shared=shared)
    with client_of(RagCache(internals, closes=False), **settings) as served:
        assert served.get("/v1/models").json()["data"][0]["id"] == expected
        assert ask(served, model=expected).json()["model"] == expected
        refused = ask(served, model="gpt-4o").json()["error"]
        assert f"{expected!r} is" in refused["message"]
        assert "/srv" not in refused["message"]


@pytest.mark.parametrize(
    ("model_id", "served", "expected"),
    [
        ("", "Qwen3-4B", None),
        ("Qwen3-4B", "Qwen3-4B", None),
        ("Qwen/Qwen3-4B", "Qwen3-4B", None),
        ("Qwen3-4B/notes", "Qwen3-4B", "notes"),
        ("openai/Qwen/Qwen3-4B/notes", "Qwen3-4B", "notes"),
        ("team/chat/notes", "team/chat", "notes"),
        ("openai/team/chat", "team/chat", None),
        ("chat/chat", "chat", "chat"),
        ("a/a/b", "a/a", "b"),
    ],
)
def test_ids_of_models_name_a_collection(model_id: str, served: str, expected: str | None) -> None:
    assert collection_in(model_id, served) == expected


@pytest.mark.parametrize(
    "model_id", ["notes", "Qwen3-4B/", "Qwen3-4B/a/b", "my-Qwen3-4B", "@notes"]
)
def test_ids_of_other_models_are_refused(model_id: str) -> None:
    with pytest.raises(HTTPProblem, match="is not served; 'Qwen3-4B' is"):
        collection_in(model_id, "Qwen3-4B")


def test_annotations_cite_the_documents_of_the_text(client: TestClient) -> None:
    told = ask(client, collection="notes", max_tokens=None, min_confidence=0, k=1).json()
    [choice] = told["choices"]
    message = choice["message"]
    [annotation] = message["annotations"]
    assert annotation["url_citation"] == {
        "start_index": 0,
        "end_index": len(message["content"]),
        "title": "leave.md",
        "url": "leave.md",
    }
    refused = ask(client, collection="notes", min_confidence=1).json()["choices"][0]["message"]
    assert refused["annotations"] == []
    assert "annotations" not in ask(client).json()["choices"][0]["message"]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"tools": [TOOL]}])
def test_a_stream_ends_with_its_annotations(client: TestClient, more: dict[str, Any]) -> None:
    asked = {"collection": "notes", "max_tokens": 16, "min_confidence": 0, "k": 2} | more
    whole = ask(client, **asked).json()
    streamed = chunks(ask(client, **asked, stream=True).text)
    for choice, written in zip(streamed[-1]["choices"], whole["choices"], strict=True):
        assert choice["finish_reason"] == written["finish_reason"]
        assert choice["delta"] == {"annotations": written["message"]["annotations"]}
    refused = chunks(ask(client, collection="notes", min_confidence=1, stream=True).text)
    assert refused[-1]["choices"][0]["delta"] == {"annotations": []}
    assert chunks(ask(client, stream=True).text)[-1]["choices"][0]["delta"] == {}


def test_annotations_follow_sources_of_their_ids(client: TestClient) -> None:
    """Open WebUI joins an annotation with a source of the same id that it has already."""
    asked = {"collection": "notes", "max_tokens": None, "min_confidence": 0, "stream": True}
    streamed = chunks(ask(client, **asked).text)
    assert "sources" in streamed[-2]
    ids = {each["metadata"][0]["source"] for each in streamed[-2]["sources"]}
    annotations = streamed[-1]["choices"][0]["delta"]["annotations"]
    assert annotations
    assert ids >= {each["url_citation"]["url"] for each in annotations}


def test_a_free_answer_cites_every_document(rag: RagCache) -> None:
    params = GenerationParams(extractive=False, max_tokens=2, min_confidence=0)
    answer = rag.ask(LEAVE, collection="notes", k=3, relative_threshold=0, generation=params)
    web = replace(answer.sources[0], uri="https://a.example/leave")
    answer = replace(answer, sources=(web, *answer.sources[1:]))
    cited = [each["url_citation"] for each in annotations_of(answer, 0, "Yes.")]
    assert [each["title"] for each in cited] == [source.document for source in answer.sources]
    assert cited[0]["url"] == source_of(web)["source"]["url"] == "https://a.example/leave"
    assert source_of(web)["metadata"][0]["source"] == "https://a.example/leave"


def test_annotations_have_the_ranges_of_marks(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(citations, "sources_of", lambda _, passages: passages[:: len(passages) - 1])
    asked = {"collection": "notes", "extractive": False, "citations": True, "k": 2} | {
        "relative_threshold": 0, "max_tokens": 12, "min_confidence": 0, "n": 2,
        "temperature": 1.0, "seed": 3,
    }  # fmt: skip
    told = ask(client, **asked).json()
    spans = {(each["choice"], each["mark"]): each for each in told["ragcache"]["spans"]}
    for number, choice in enumerate(told["choices"]):
        text, annotations = choice["message"]["content"], choice["message"]["annotations"]
        cited = [each["url_citation"] for each in annotations]
        marks = [text[each["start_index"] : each["end_index"]] for each in cited]
        assert marks == re.findall(r"\[\d+\]", text)
        assert {"[1]", "[2]"} <= set(marks)
        for mark, each in zip(marks, cited, strict=True):
            assert spans[number, int(mark[1:-1])]["document"] == each["title"]
    streamed = chunks(ask(client, **asked, stream=True).text)[-1]["choices"]
    assert [each["delta"]["annotations"] for each in streamed] == [
        each["message"]["annotations"] for each in told["choices"]
    ]


def test_a_text_without_a_mark_cites_nothing(rag: RagCache) -> None:
    params = GenerationParams(extractive=False, max_tokens=2, min_confidence=0)
    answer = rag.ask(LEAVE, collection="notes", generation=params)
    assert annotations_of(answer, 0, "Yes.")
    assert annotations_of(answer, 0, "Yes [1].", marked=True) == []


@pytest.mark.parametrize(
    ("scores", "distances"),
    [
        ({}, None),
        ({"cosine": 0.5}, [0.5]),
        ({"cosine": -0.1}, [0.0]),
        ({"cosine": 0.5, "rerank": 0.9}, [0.9]),
    ],
)
def test_similarity_of_a_source(scores: dict[str, float], distances: list[float] | None) -> None:
    citation = Citation("leave.md", "leave.md#1", "", 1.0, text="26 days", **scores)
    assert source_of(citation).get("distances") == distances
