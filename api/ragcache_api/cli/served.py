"""Answers of a running service, for `ragcache ask --server`: no model is loaded here."""

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

from ragcache.errors import ConfigurationError, ServiceFailed

_SECONDS = 600.0  # maximum silence; a service sends a comment every 15 s


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirections: the key is for the named server only."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = build_opener(_NoRedirect)


class ServedAnswer:
    """The answer of `POST /v1/answers`. Iterate over it for pieces of its text."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self.values: dict[str, Any] = {}

    @classmethod
    def ask(cls, server: str, key: str | None, body: Mapping[str, Any]) -> ServedAnswer:
        """Send a question.

        Args:
            server: The URL of the service.
            key: The API key, if the service needs one.
            body: The body of the request. None values are left out.

        Raises:
            ConfigurationError: The URL is invalid.
            ServiceFailed: The service cannot be reached, or refuses the question.
        """
        if urlsplit(server).scheme not in ("http", "https"):
            raise ConfigurationError(
                f"--server takes a URL such as http://127.0.0.1:8000, not {server!r}"
            )
        given = {name: value for name, value in body.items() if value is not None}
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = Request(
            f"{server.rstrip('/')}/v1/answers",
            json.dumps(given | {"stream": True}).encode(),
            headers,
        )
        try:
            return cls(cast("HTTPResponse", _OPENER.open(request, timeout=_SECONDS)))
        except HTTPError as error:
            with closing(error):
                raise ServiceFailed(_refusal(server, error)) from None
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServiceFailed(
                f"no service answers at {server} ({reason}); start one with `ragcache serve`, or "
                "ask without --server"
            ) from None

    def __iter__(self) -> Iterator[str]:
        try:
            with closing(self._response):
                for name, value in _events(self._response):
                    if name == "token":
                        yield value["text"]
                    elif name == "answer":
                        self.values = value
                    elif name == "error":
                        raise ServiceFailed(f"the service failed: {_problem(value)}")
        except (OSError, HTTPException) as error:
            raise ServiceFailed(f"the connection ended before the answer did: {error}") from error
        if not self.values:
            raise ServiceFailed("the connection ended before the answer did")

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


def _events(lines: Iterator[bytes] | HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yield names and values of server-sent events with one line of data each."""
    name = ""
    for line in lines:
        field, _, value = line.decode("utf-8").rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def _refusal(server: str, error: HTTPError) -> str:
    """Return a service's reason for refusing a request."""
    text = error.read(100_000)
    try:
        reason = _problem(json.loads(text))
    except ValueError:
        reason = f"status {error.code}; is this a ragcache service?"
    return f"{server}: {reason}"


def _problem(value: Mapping[str, Any]) -> str:
    return str(value.get("detail") or value.get("title") or value)
