"""Clients that cost little, so that what is measured is the service. Imports nothing heavy: it also
runs in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import re
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

_END = b"0\r\n\r\n"
_TOKEN = re.compile(rb'"delta":\{"content":"(?!")|"text_delta"|response\.output_text\.delta')
"""A token in a chunk of a chat, or in an event of messages or responses."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_MORE_THAN_COMES = 1 << 20  # bytes


def request(path: str, body: Any, port: int, key: str | None = None, more: str = "") -> bytes:
    """A request over a connection that stays open, unless a header in `more` says else."""
    sent = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}{more}Content-Length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


class ClientProcess:
    """A client in a process of its own: what it does takes nothing from the service, which would
    wait for the interpreter of a client in its process. Its connection stays open."""

    def __init__(self, port: int) -> None:
        self._port = port
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context)

    def first_token(self, sent: bytes) -> float:
        """Seconds to the first token of a streamed answer, which is read to its end."""
        return self._process.submit(_first_token, self._port, sent).result()

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()


@cache
def _connection(port: int) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _first_token(port: int, sent: bytes) -> float:
    link = _connection(port)
    begin = time.perf_counter()
    link.sendall(sent)
    got, first = b"", 0.0
    while not got.endswith(_END):
        part = link.recv(65536)
        if not part:
            raise ConnectionError(got.decode(errors="replace"))
        got += part
        if not first and _TOKEN.search(got):
            first = time.perf_counter() - begin
    return first


def run_clients(port: int, queues: Sequence[Sequence[dict[str, Any]]]) -> tuple[int, float]:
    """Clients at once, each of which sends its streamed chats, whose usage is told, one after
    another: how many tokens came, and in how many seconds.

    The system wakes this thread when an answer has ended, and for nothing before: a client that
    wakes for every event takes the cores that the service computes on.
    """
    selector = selectors.DefaultSelector()
    begin = time.perf_counter()
    for bodies in queues:
        _send_next(selector, port, iter(bodies))
    tokens = 0
    while selector.get_map():
        for ready, _ in selector.select():
            link = selector.unregister(ready.fileobj).fileobj
            assert isinstance(link, socket.socket)
            with link:
                tokens += _tokens(_rest(link))
            _send_next(selector, port, ready.data)
    return tokens, time.perf_counter() - begin


def _send_next(
    selector: selectors.BaseSelector, port: int, bodies: Iterator[dict[str, Any]]
) -> None:
    body = next(bodies, None)
    if body is None:
        return
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _MORE_THAN_COMES)
    link.sendall(request("/v1/chat/completions", body, port, more="Connection: close\r\n"))
    selector.register(link, selectors.EVENT_READ, bodies)


def _rest(link: socket.socket) -> bytes:
    """Everything, up to where the service closed the connection."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    parts = []
    while part := link.recv(65536):
        parts.append(part)
    return b"".join(parts)


def _tokens(got: bytes) -> int:
    told = _USAGE.search(got)
    if told is None or not got.endswith(_END):
        raise ConnectionError(got[-1024:].decode(errors="replace"))
    return int(told[1])
