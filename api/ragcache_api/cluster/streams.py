"""Streams that outlive their replica: a greedy answer that has begun goes on at another one.

The same request gives the same text there. What the client has already is left out, and compared:
where it differs, the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from ragcache_api.cluster.replicas import ReplicaLost
from ragcache_api.http.errors import ErrorInfo, is_openai

_END = b"\n\n"  # of an event
_GREEDY_BELOW = 1e-5
_ONE_CHOICE = (None, 1)
_NOT_TEXT_ALONE = ("tools", "logprobs", "top_logprobs")


def is_resumable(body: Any) -> bool:
    """Whether a request's stream may go on elsewhere: it is greedy, and of one choice of text."""
    if not isinstance(body, dict) or not body.get("stream"):
        return False
    return (
        (body.get("temperature") or 0.0) < _GREEDY_BELOW
        and body.get("n") in _ONE_CHOICE
        and not any(body.get(name) for name in _NOT_TEXT_ALONE)
    )


@dataclass(slots=True)
class ResumableResponse:
    """The response of one request, from one replica or several after each other. resumable: whether
    it may go on at another one after it has begun. started: whether the client has some of it;
    is_stream: whether it consists of events."""

    path: str
    resumable: bool
    started: bool = False
    is_stream: bool = False
    _again: bool = False
    _opened: bool = False
    _sent: str = ""
    _behind: str = ""
    _rest: bytes = b""
    _head: dict[str, Any] = field(default_factory=dict)

    def begin_again(self) -> None:
        """The replica was lost, and another one begins. Raises `ReplicaLost` where the response
        cannot go on there."""
        if not self.started:
            return
        if not self.resumable:
            raise ReplicaLost("the replica that answered has ended; ask again")
        self._again, self._behind, self._rest = True, self._sent, b""

    def take(self, message: Message) -> Iterator[Message]:
        """What the client is to get of a message. Raises `ReplicaLost` where another replica
        answers otherwise."""
        if message["type"] == "http.response.start":
            yield from self._start(message)
        elif not self.resumable:
            yield message
        else:
            body, more = message.get("body", b""), message.get("more_body", False)
            *events, self._rest = (self._rest + body).split(_END)
            passed = b"".join(self._event(event) for event in events)
            if not more:
                if self._behind:
                    raise _differs()
                passed += self._rest
            if passed or not more:
                yield {"type": message["type"], "body": passed, "more_body": more}

    def _start(self, message: Message) -> Iterator[Message]:
        streams = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message["headers"]
        )
        if self._again:
            if not streams or message["status"] != 200:
                raise ReplicaLost(f"no other replica goes on: status {message['status']}")
            return
        self.resumable = self.resumable and streams
        self.started, self.is_stream = True, streams
        yield message

    def _event(self, event: bytes) -> bytes:
        """An event as it is passed on: whole, in part, or not at all."""
        lines = event.split(b"\n")
        if lines[0] == b"event: sources":
            return self._opening(event)
        data = next((line[6:] for line in lines if line.startswith(b"data: {")), None)
        if data is None:  # a comment, or the end of OpenAI's streams
            return b"" if self._behind else event + _END
        value = json.loads(data)
        holder, name = _text_of(value, lines[0] == b"event: token")
        text = holder.get(name) if name else None
        if not self._again:
            self._head = self._head or {key: value.get(key) for key in ("id", "created")}
            self._sent += text or ""
            self._opened = self._opened or "role" in holder
            return event + _END
        if not text:
            if "role" in holder:
                return self._opening(event)
            return b"" if self._behind else self._as_before(lines, value)
        known = self._behind[: len(text)]
        if not text.startswith(known):
            raise _differs()
        self._behind = self._behind[len(known) :]
        holder[name] = text[len(known) :]
        self._sent += holder[name]
        return self._as_before(lines, value) if holder[name] else b""

    def _opening(self, event: bytes) -> bytes:
        """An event that comes once, before all text."""
        if self._opened:
            return b""
        self._opened = True
        return event + _END

    def _as_before(self, lines: list[bytes], value: dict[str, Any]) -> bytes:
        """An event of the second replica under the first one's id."""
        value |= {key: kept for key, kept in self._head.items() if kept is not None}
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        head = b"".join(line + b"\n" for line in lines if line.startswith(b"event: "))
        return head + b"data: " + text + _END


def _differs() -> ReplicaLost:
    return ReplicaLost("the replica that answered has ended, and another one answers otherwise")


def _text_of(value: dict[str, Any], token: bool) -> tuple[dict[str, Any], str]:
    """Where an event has text: the object and the name of its field; "" for none."""
    if token:
        return value, "text"
    choices = value.get("choices") or [{}]
    delta = choices[0].get("delta")
    if isinstance(delta, dict):
        return delta, "content"
    return (choices[0], "text") if "text" in choices[0] else ({}, "")


def error_event(info: ErrorInfo, path: str) -> bytes:
    """The last event of a response that cannot go on, in the shape of its path."""
    if is_openai(path):
        return b"data: " + json.dumps(info.openai()).encode() + _END
    return b"event: error\ndata: " + json.dumps(info.problem(path)).encode() + _END
