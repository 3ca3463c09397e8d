"""The clients of others against a started server: `openai`, and LangChain's `ChatOpenAI`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.api.http.conftest import LEAVE
from tests.cluster.machines import wait_until

if TYPE_CHECKING:  # their import costs seconds, which only the process that runs these tests pays
    from openai import OpenAI

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]
MODEL = "ragcache-reader"
MESSAGES = [{"role": "user", "content": LEAVE}]


@pytest.fixture(scope="module")
def openai(served: str) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_a_stream_adds_up_to_the_whole(openai: OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "extra_body": {"collection": "notes"}}
    whole = openai.chat.completions.create(**asked, max_completion_tokens=6)
    told = list(openai.chat.completions.create(
        **asked, max_tokens=6, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in told if c.choices)
    assert text == whole.choices[0].message.content
    assert told[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    assert whole.model_extra["sources"]


def test_n_stop_seed_and_logprobs(openai: OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 1.2, "seed": 4}
    first = openai.chat.completions.create(**options, n=3, logprobs=True, top_logprobs=3)
    again = openai.chat.completions.create(**options, n=3)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    entry = first.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3
    word = texts[0].split()[-1]
    cut = openai.chat.completions.create(**options, stop=[word])
    assert cut.choices[0].finish_reason == "stop"
    assert word not in cut.choices[0].message.content


def test_completions_models_and_errors(openai: OpenAI) -> None:
    from openai import NotFoundError

    made = openai.completions.create(model=MODEL, prompt="The boat", max_tokens=3, logprobs=1)
    assert len(made.choices[0].logprobs.tokens) == 3
    assert [model.id for model in openai.models.list()] == [MODEL, f"{MODEL}/notes"]
    with pytest.raises(NotFoundError, match="not served"):
        openai.chat.completions.create(model="other", messages=MESSAGES)


def test_json_that_keeps_to_a_schema(openai: OpenAI) -> None:
    schema = {
        "type": "object", "properties": {"days": {"type": "integer", "maximum": 99}},
        "required": ["days"], "additionalProperties": False,
    }  # fmt: skip
    import json

    made = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "d", "schema": schema}},
    )  # fmt: skip
    assert made.choices[0].finish_reason == "stop"
    assert set(json.loads(made.choices[0].message.content or "")) == {"days"}


def last_outcome(served: str) -> str:
    """How the last request ended, once none is left: long before the 3,000 tokens of these."""

    def ended() -> dict[str, Any] | None:
        told: dict[str, Any] = httpx.get(f"{served}/admin/requests").json()
        metrics = httpx.get(f"{served}/metrics").text
        idle = "ragcache_engine_running 0.0" in metrics
        return told if idle and not told["running"] else None

    return str(wait_until(30, ended)["recent"][0]["outcome"])


def test_leaving_a_stream_ends_its_request(openai: OpenAI, served: str) -> None:
    with openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
    assert last_outcome(served) == "cancelled"


def test_a_client_that_gives_up_waiting_ends_its_request(served: str) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 3000,
        "extra_body": {"ignore_eos": True},
    }
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served}/v1/chat/completions", json=body, timeout=0.5)
    assert last_outcome(served) == "cancelled"


def test_asynchronous_clients_at_once(served: str) -> None:
    from openai import AsyncOpenAI

    async def many() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served}/v1", api_key="none") as client:
            made = [
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
                for _ in range(8)
            ]
            return [each.choices[0].message.content or "" for each in await asyncio.gather(*made)]

    assert len(set(asyncio.run(many()))) == 1


@pytest.mark.slow
def test_langchains_chat_model(served: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{served}/v1", api_key="none", model=MODEL, max_tokens=5,
        stream_usage=True, extra_body={"collection": "notes"},
    )  # fmt: skip
    message = model.invoke(LEAVE)
    assert message.content
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    pieces = list(model.stream(LEAVE))
    assert "".join(str(piece.content) for piece in pieces) == message.content
    assert len(model.batch([LEAVE, LEAVE])) == 2
