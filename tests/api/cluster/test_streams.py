"""Responses that go on at another replica, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragcache_api.cluster.replicas import ReplicaLost
from ragcache_api.cluster.streams import ResumableResponse, is_resumable
from ragcache_api.http.dispatch import parse_body

START = {
    "type": "http.response.start", "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}  # fmt: skip
SOURCES = b"event: sources\ndata: []\n\n"
ANSWER = b'event: answer\ndata: {"text": "26 days a year"}\n\n'


def token(text: str) -> bytes:
    return b"event: token\ndata: " + json.dumps({"text": text, "at": 0.1}).encode() + b"\n\n"


def take(response: ResumableResponse, *bodies: bytes, ends: bool = False) -> bytes:
    messages: list[Any] = [START]
    messages += [{"type": "http.response.body", "body": b, "more_body": True} for b in bodies]
    if ends:
        messages.append({"type": "http.response.body", "body": b"", "more_body": False})
    taken = [passed for message in messages for passed in response.take(message)]
    return b"".join(each.get("body", b"") for each in taken)


def texts(body: bytes) -> list[str]:
    blocks = body.split(b"\n\n")
    return [json.loads(b.split(b"data: ")[1])["text"] for b in blocks if b.startswith(b"event: t")]


@pytest.mark.parametrize(
    ("second", "rest"),
    [
        (["26", " days", " a year"], [" a year"]),
        (["26 da", "ys a ", "year"], [" a ", "year"]),
        (["26 days a year"], [" a year"]),
    ],
)
def test_what_was_sent_is_left_out(second: list[str], rest: list[str]) -> None:
    """However the other replica cuts the text."""
    response = ResumableResponse("/v1/answers", True)
    take(response, SOURCES, token("26"), token(" days"))
    response.begin_again()
    passed = take(response, SOURCES, *map(token, second), ANSWER, ends=True)
    assert texts(passed) == rest
    assert passed.endswith(ANSWER.replace(b": ", b":").replace(b"event:", b"event: "
                           ).replace(b"data:", b"data: "))  # fmt: skip
    assert SOURCES not in passed


def test_half_an_event_is_never_sent() -> None:
    response = ResumableResponse("/v1/answers", True)
    first = take(response, SOURCES + token("26") + token(" days")[:20])
    assert first == SOURCES + token("26")
    response.begin_again()
    assert texts(take(response, SOURCES, token("26"), token(" days"))) == [" days"]


def test_one_that_was_lost_before_its_sources_sends_them_later() -> None:
    response = ResumableResponse("/v1/answers", True)
    take(response)
    response.begin_again()
    assert take(response, SOURCES, token("26")).startswith(SOURCES)


@pytest.mark.parametrize("second", [[token("25")], [token("26"), ANSWER]])
def test_another_answer_is_an_error(second: list[bytes]) -> None:
    """Another text, or one that ends before what was sent."""
    response = ResumableResponse("/v1/answers", True)
    take(response, SOURCES, token("26"), token(" days"))
    response.begin_again()
    with pytest.raises(ReplicaLost, match="otherwise"):
        take(response, SOURCES, *second, ends=True)


def test_a_response_that_is_refused_elsewhere_is_an_error() -> None:
    response = ResumableResponse("/v1/answers", True)
    take(response, SOURCES)
    response.begin_again()
    with pytest.raises(ReplicaLost, match="503"):
        list(response.take({**START, "status": 503}))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True), ({"temperature": 0}, True), ({"temperature": 0.7}, False), ({"n": 2}, False),
        ({"tools": [{}]}, False), ({"logprobs": True}, False), ({"stream": False}, False),
    ],
)  # fmt: skip
def test_greedy_streams_of_one_text_may_go_on(more: dict[str, Any], expected: bool) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body = json.dumps({**chat, **more}).encode()
    assert is_resumable(parse_body("/v1/chat/completions", body, "m")) is expected
    assert not is_resumable(parse_body("/v1/chat/completions", b"[]", "m"))


def test_what_may_not_go_on_ends_where_it_was() -> None:
    response = ResumableResponse("/v1/answers", False)
    assert take(response, token("26")[:5]) == token("26")[:5]
    with pytest.raises(ReplicaLost, match="ask again"):
        response.begin_again()
