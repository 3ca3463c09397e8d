"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import Generation, RagCache
from tests.api.http.events import events

PROMPT = "The survey boat is"


def complete(client: TestClient, **body: Any) -> Any:
    given = {"model": "ragcache-reader", "prompt": PROMPT, "max_tokens": 4}
    return client.post("/v1/completions", json=given | body)


def test_a_text_is_continued_without_a_template(client: TestClient, rag: RagCache) -> None:
    told = complete(client).json()
    answer = rag.chat(PROMPT, generation=Generation(max_new_tokens=4))
    assert told["object"] == "text_completion"
    assert told["choices"][0]["text"] == answer.choices[0].text
    assert told["usage"]["prompt_tokens"] == answer.reuse.prompt_tokens


def test_several_prompts_with_several_choices(client: TestClient) -> None:
    told = complete(client, prompt=[PROMPT, "Dogs"], n=2, temperature=1.0, seed=5, echo=True).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"][:4] for choice in told["choices"]]
    assert starts == ["The ", "The ", "Dogs", "Dogs"]


def test_a_stream_adds_up_to_the_whole(client: TestClient) -> None:
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


def test_a_stop_string_ends_the_text(client: TestClient) -> None:
    whole = complete(client).json()["choices"][0]["text"]
    word = whole.split()[-1]
    cut = complete(client, stop=word).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert word not in cut["text"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"suffix": "x"},
        {"best_of": 3},
        {"echo": True, "logprobs": 1},
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
