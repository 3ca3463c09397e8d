"""Token ids as prompts, scored prompts, and vLLM's routes for tokens, as lm-eval uses them."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from tests.api.http.conftest import LEAVE
from tests.api.http.test_openai_routes import PROMPT, complete


def tokens_of(client: TestClient, **body: Any) -> list[int]:
    told = client.post("/tokenize", json=body)
    assert told.status_code == 200, told.text
    assert told.json()["count"] == len(told.json()["tokens"])
    tokens: list[int] = told.json()["tokens"]
    return tokens


def test_a_text_and_its_tokens_have_the_same_answer(client: TestClient) -> None:
    tokens = tokens_of(client, prompt=PROMPT, model="ragcache-reader")
    told = complete(client, echo=True).json()
    assert told["usage"]["prompt_tokens"] == len(tokens)
    for prompt in (tokens, [tokens], [tokens, tokens]):
        same = complete(client, prompt=prompt, echo=True).json()["choices"]
        assert [each["text"] for each in same] == [told["choices"][0]["text"]] * len(same)
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}


def test_a_scored_prompt_agrees_with_answers_to_its_beginnings(client: TestClient) -> None:
    tokens = tokens_of(client, prompt=PROMPT)
    told = complete(client, prompt=tokens, echo=True, logprobs=2, max_tokens=0).json()
    [choice] = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert told["usage"]["completion_tokens"] == 0
    scored = choice["logprobs"]
    assert "".join(scored["tokens"]) == PROMPT
    assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in scored["top_logprobs"][1:])
    for at in range(1, len(tokens)):
        begun = complete(client, prompt=tokens[:at], logprobs=2, max_tokens=1, min_tokens=1)
        [top] = begun.json()["choices"][0]["logprobs"]["top_logprobs"]
        assert scored["top_logprobs"][at] == pytest.approx(top, abs=1e-3)
        if value := top.get(scored["tokens"][at]):
            assert scored["token_logprobs"][at] == pytest.approx(value, abs=1e-3)


def test_lm_evals_request_scores_a_continuation(client: TestClient) -> None:
    """The request of its `local-completions`, which leaves out the last token."""
    context, tokens = tokens_of(client, prompt=PROMPT), tokens_of(client, prompt=f"{PROMPT} moored")
    assert tokens[: len(context)] == context
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    told = complete(client, prompt=[tokens, tokens], **body).json()
    for choice in told["choices"]:
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == len(tokens) + 1
        assert all(value <= 0 for value in values[len(context) : -1])
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert all(max(top.values()) >= value for top, value in zip(tops, values[1:], strict=False))


def test_a_conversation_has_the_tokens_of_its_prompt(client: TestClient, rag: RagCache) -> None:
    messages = [{"role": "user", "content": LEAVE}]
    tokens = tokens_of(client, messages=messages)
    assert len(tokens) == rag.chat(messages).reuse.prompt_tokens
    text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert LEAVE in text
    named = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert len(named["token_strs"]) == named["count"]
    assert named["max_model_len"] == rag.internals.shared.model.causal.window


def test_the_tokenizer_describes_itself(client: TestClient, rag: RagCache) -> None:
    told = client.get("/tokenizer_info").json()
    tokenizer = rag.internals.shared.model.tokenizer
    assert told["eos_token"] == tokenizer.eos_token
    assert told["chat_template"] == tokenizer.chat_template
    assert told["tokenizer_class"]
    assert "/" not in str({**told, "chat_template": ""}), "no path of the server"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "is not served"),
        ("/tokenize", {"messages": [], "prompt": None}, "messages"),
        ("/detokenize", {"tokens": [10**9]}, "none of the model's"),
        ("/detokenize", {"tokens": [-1]}, "none of the model's"),
    ],
)
def test_wrong_requests_about_tokens_are_named(
    client: TestClient, path: str, body: dict[str, Any], said: str
) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code in (400, 404)
    assert said in refused.json()["error"]["message"]
