"""Answers of a running service, for `ragcache ask` and `chat --server`: no model is loaded here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ragcache.errors import ConfigurationError, PromptTooLong, ServiceFailed

_SECONDS = 600.0  # maximum silence; a service sends a comment every 15 s


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirections: the key is for the named server only."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = build_opener(_NoRedirect)


class ServedAnswer:
    """The answer of a running service. Iterate over it for pieces of its text."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self.values: dict[str, Any] = {}

    @classmethod
    def ask(cls, server: str, key: str | None, body: Mapping[str, Any]) -> ServedAnswer:
        """Send a question to `/v1/answers`.

        Args:
            server: The URL of the service.
            key: The API key, if the service needs one.
            body: The body of the request. None values are left out.

        Raises:
            ConfigurationError: The URL is invalid.
            ServiceFailed: The service cannot be reached, or refuses the question.
        """
        return cls(_post(server, "/v1/answers", key, body))

    @staticmethod
    def chat(server: str, key: str | None, body: Mapping[str, Any]) -> ServedAnswer:
        """Send a conversation to `/v1/chat/completions`, like `ask`.

        Raises:
            PromptTooLong: The conversation does not fit the model's window.
        """
        return _ServedChat(_post(server, "/v1/chat/completions", key, body))

    def __iter__(self) -> Iterator[str]:
        try:
            with closing(self._response):
                yield from self._pieces()
        except (OSError, HTTPException) as error:
            raise ServiceFailed(f"the connection ended before the answer did: {error}") from error
        if not self.values:
            raise ServiceFailed("the connection ended before the answer did")

    def _pieces(self) -> Iterator[str]:
        """Yield pieces of the text, and set `values` at the end."""
        for name, value in _events(self._response):
            if name == "token":
                yield value["text"]
            elif name == "answer":
                self.values = value
            elif name == "error":
                raise _failure(value)

    def result(self) -> Any:
        """Wait for the whole answer."""
        for _ in self:
            pass
        return self.answer

    @property
    def answer(self) -> Any:
        """The finished answer, with the attributes of `ragcache.Answer` except `choices`."""
        return json.loads(
            json.dumps(self.values), object_hook=lambda given: SimpleNamespace(**given)
        )


class _ServedChat(ServedAnswer):
    """The answer of `POST /v1/chat/completions`."""

    def _pieces(self) -> Iterator[str]:
        text, sources = "", list[dict[str, Any]]()
        for _, value in _events(self._response):
            if "error" in value:
                raise _failure(value["error"])
            for choice in value["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    yield piece
            for each in value.get("sources") or ():
                named = {"document": each["source"]["id"], "text": each["document"][0]}
                sources.append(named | each["metadata"][0])
            if "ragcache" in value:
                self.values = {"text": text, "sources": sources, **value["ragcache"]}


def _post(server: str, path: str, key: str | None, body: Mapping[str, Any]) -> HTTPResponse:
    """Send a request for an answer in events."""
    if urlsplit(server).scheme not in ("http", "https"):
        raise ConfigurationError(
            f"--server takes a URL such as http://127.0.0.1:8000, not {server!r}"
        )
    given = {name: value for name, value in body.items() if value is not None}
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(given | {"stream": True}).encode()
    try:
        opened = _OPENER.open(
            Request(f"{server.rstrip('/')}{path}", data, headers), timeout=_SECONDS
        )
        return cast("HTTPResponse", opened)
    except HTTPError as error:
        with closing(error):
            raise _refusal(server, error) from None
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServiceFailed(
            f"no service answers at {server} ({reason}); start one with `ragcache serve`, or go "
            "on without --server"
        ) from None


def _events(lines: Iterator[bytes] | HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yield names and values of server-sent events with one line of data each."""
    name = ""
    for line in lines:
        field, _, value = line.decode("utf-8").rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data" and value != "[DONE]":
            yield name, json.loads(value)


def _refusal(server: str, error: HTTPError) -> ServiceFailed | PromptTooLong:
    """Return the error of a request that a service refuses."""
    text = error.read(100_000)
    try:
        value = json.loads(text)
        return _failure(value.get("error", value), f"{server}: ")
    except (ValueError, AttributeError):
        return ServiceFailed(f"{server}: status {error.code}; is this a ragcache service?")


def _failure(
    value: Mapping[str, Any], place: str = "the service failed: "
) -> ServiceFailed | PromptTooLong:
    """Return the error that a service describes, in its own shape or in OpenAI's."""
    reason = value.get("detail") or value.get("message") or value.get("title") or value
    if value.get("code") == "context_length_exceeded":
        return PromptTooLong(str(reason))
    return ServiceFailed(f"{place}{reason}")
