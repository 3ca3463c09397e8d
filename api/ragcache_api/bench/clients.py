"""Clients that cost little, so that what is measured is the service. Imports nothing heavy: it also
runs in a process of its own."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import suppress
from typing import Any

_END = b"0\r\n\r\n"
_TOKEN = b'"delta":{"content":"'
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_LOOK_SECONDS = 0.02
_KEPT = 1024  # of what came: the usage, which comes last, stands in it, however it was cut


def request(path: str, body: Any, port: int, key: str | None = None) -> bytes:
    """A request over a connection that stays open."""
    sent = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


def first_token(link: socket.socket, sent: bytes) -> float:
    """Seconds to the first token of a streamed answer, which is read to its end."""
    begin = time.perf_counter()
    link.sendall(sent)
    got, first = b"", 0.0
    while not got.endswith(_END):
        part = link.recv(65536)
        if not part:
            raise ConnectionError(got.decode(errors="replace"))
        got += part
        if not first and _TOKEN in got.replace(b'"content":""', b""):
            first = time.perf_counter() - begin
    return first


def run_streams(port: int, bodies: list[dict[str, Any]]) -> tuple[int, float]:
    """Streams of chats at once, whose usage is told: how many tokens, and in how many seconds.

    Looks for what has come every few steps alone: a client that wakes for every event takes the
    cores that the service computes on, which on two of them costs more than the service does.
    """
    links = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    begin = time.perf_counter()
    for link, body in zip(links, bodies, strict=True):
        link.sendall(request("/v1/chat/completions", body, port))
        link.setblocking(False)
    kept = dict.fromkeys(links, b"")
    while not all(last.endswith(_END) for last in kept.values()):
        time.sleep(_LOOK_SECONDS)
        for link, last in kept.items():
            if not last.endswith(_END):
                kept[link] = _read(link, last)
    seconds = time.perf_counter() - begin
    for link in links:
        link.close()
    return sum(_tokens(last) for last in kept.values()), seconds


def _read(link: socket.socket, last: bytes) -> bytes:
    """The end of what came until now."""
    with suppress(BlockingIOError):
        while part := link.recv(65536):
            last = (last + part)[-_KEPT:]
        if not last.endswith(_END):
            raise ConnectionError("the service ended before the answer did")
    return last


def _tokens(last: bytes) -> int:
    told = _USAGE.search(last)
    if told is None:
        raise ConnectionError(last.decode(errors="replace"))
    return int(told[1])
