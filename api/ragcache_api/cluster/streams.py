"""Streams that outlive their replica: another replica continues a greedy answer.

The same request gives the same text there. Text that the client already has is compared and left
out; if it differs, the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from ragcache_api.cluster.replicas import ReplicaLost
from ragcache_api.http.bodies import ChatRequest, TranslatedRequest
from ragcache_api.http.dispatch import AnsweredRequest
from ragcache_api.http.errors import ErrorInfo
from ragcache_api.http.paths import is_anthropic, is_openai

_END = b"\n\n"  # ends an event
_GREEDY_BELOW = 1e-5


def is_resumable(body: AnsweredRequest | None) -> bool:
    """Tell whether another replica can continue a stream: greedy, one choice, text only.

    Streams of other interfaces than the service's own and OpenAI's completions have events that
    refer to earlier ones.
    """
    if body is None or isinstance(body, TranslatedRequest):
        return False
    if not body.stream or body.temperature >= _GREEDY_BELOW or body.n > 1:
        return False
    return not body.logprobs and not (isinstance(body, ChatRequest) and body.tools)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of an answer's stream, in the service's own format or in OpenAI's."""

    raw: bytes
    """The event as it came, without its end."""
    value: dict[str, Any] = field(default_factory=dict)
    """JSON object of the event. Empty for a comment and for the end of OpenAI's streams."""
    holder: dict[str, Any] = field(default_factory=dict)
    """The part of `value` that has a field `name` with text of the answer."""
    name: str = ""
    """Name of that field. Empty if the event adds no text."""
    opens: bool = False
    """Whether the event comes once, before all text: sources, or a chunk that names the role."""

    @classmethod
    def parse(cls, raw: bytes) -> StreamEvent:
        """Parse one event, without its end."""
        lines = raw.split(b"\n")
        if lines[0] == b"event: sources":
            return cls(raw, opens=True)
        data = next((line[6:] for line in lines if line.startswith(b"data: {")), None)
        if data is None:
            return cls(raw)
        value = json.loads(data)
        if lines[0] == b"event: token":
            return cls(raw, value, value, "text")
        choice = next(iter(value.get("choices") or [{}]))
        delta = choice.get("delta")
        if isinstance(delta, dict):
            return cls(raw, value, delta, "content", opens="role" in delta)
        return cls(raw, value, choice, "text" if "text" in choice else "")

    @property
    def text(self) -> str:
        """Text that the event adds to the answer."""
        return (self.name and self.holder.get(self.name)) or ""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that all chunks of one OpenAI completion have in common."""
        return {key: self.value[key] for key in ("id", "created") if key in self.value}

    def changed(self, identity: dict[str, Any], text: str) -> bytes:
        """Return the event with the identity of another completion and another text."""
        if not self.value:
            return self.raw
        if self.text:
            self.holder[self.name] = text
        body = json.dumps(self.value | identity, ensure_ascii=False, separators=(",", ":"))
        names = [line for line in self.raw.split(b"\n") if line.startswith(b"event: ")]
        return b"\n".join([*names, b"data: " + body.encode()])


@dataclass(slots=True)
class ResumableResponse:
    """The response to one request, from one replica or from several in turn."""

    path: str
    resumable: bool
    """Whether another replica can continue the response after it has begun."""
    started: bool = False
    """Whether the client has received a part of the response."""
    is_stream: bool = False
    """Whether the response consists of events."""
    _resumed: bool = False
    _opened: bool = False  # the client has the opening event
    _sent: str = ""
    _behind: str = ""  # text that the client has and the current replica has not repeated yet
    _rest: bytes = b""  # begin of an incomplete event
    _identity: dict[str, Any] = field(default_factory=dict)

    def begin_again(self) -> None:
        """Prepare for another replica. Raises `ReplicaLost` if it cannot continue the response."""
        if not self.started:
            return
        if not self.resumable:
            raise ReplicaLost("the replica that answered has ended; ask again")
        self._resumed, self._behind, self._rest = True, self._sent, b""

    def take(self, message: Message) -> Iterator[Message]:
        """Return the part of a message that the client lacks.

        Raises:
            ReplicaLost: Another replica gives a different answer.
        """
        if message["type"] == "http.response.start":
            yield from self._start(message)
        elif not self.resumable:
            yield message
        else:
            body, more = message.get("body", b""), message.get("more_body", False)
            *events, self._rest = (self._rest + body).split(_END)
            take = self._repeated if self._resumed else self._first
            taken = [take(StreamEvent.parse(event)) for event in events]
            passed = b"".join(event + _END for event in taken if event is not None)
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
        if self._resumed:
            if not streams or message["status"] != 200:
                raise ReplicaLost(f"no other replica goes on: status {message['status']}")
            return
        self.resumable = self.resumable and streams
        self.started, self.is_stream = True, streams
        yield message

    def _first(self, event: StreamEvent) -> bytes:
        """Record an event of the first replica, and return it unchanged."""
        self._opened = self._opened or event.opens
        self._identity = self._identity or event.identity
        self._sent += event.text
        return event.raw

    def _repeated(self, event: StreamEvent) -> bytes | None:
        """Return the part of another replica's event that the client lacks, if any."""
        if event.opens and not event.text:
            opened, self._opened = self._opened, True
            return None if opened else event.raw
        text = event.text
        if not text:
            return None if self._behind else event.changed(self._identity, "")
        known = self._behind[: len(text)]
        if not text.startswith(known):
            raise _differs()
        new = text[len(known) :]
        self._behind = self._behind[len(known) :]
        self._sent += new
        return event.changed(self._identity, new) if new else None


def _differs() -> ReplicaLost:
    return ReplicaLost("the replica that answered has ended, and another one answers otherwise")


def error_event(info: ErrorInfo, path: str) -> bytes:
    """Write the last event of a response that cannot go on, in the shape of its path."""
    if is_openai(path):
        return b"data: " + json.dumps(info.openai()).encode() + _END
    told = info.anthropic() if is_anthropic(path) else info.problem(path)
    return b"event: error\ndata: " + json.dumps(told).encode() + _END
