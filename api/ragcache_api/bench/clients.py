"""Clients that cost little, so that what is measured is the service. Imports nothing heavy: it also
runs in a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from typing import Any

_END = b"0\r\n\r\n"
_TOKEN = b'"delta":{"content":"'
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
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
    """Streams of chats at once, whose usage is told: how many tokens, and in how many seconds."""
    return asyncio.run(_run(port, bodies))


async def _run(port: int, bodies: list[dict[str, Any]]) -> tuple[int, float]:
    links = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
    begin = time.perf_counter()
    counts = await asyncio.gather(
        *(_stream(*link, request("/v1/chat/completions", body, port))
          for link, body in zip(links, bodies, strict=True))
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    for _, writer in links:
        writer.close()
    return sum(counts), seconds


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> int:
    writer.write(sent)
    kept = b""
    while not kept.endswith(_END):
        part = await reader.read(65536)
        if not part:
            raise ConnectionError("the service ended before the answer did")
        kept = (kept + part)[-_KEPT:]
    told = _USAGE.search(kept)
    if told is None:
        raise ConnectionError(kept.decode(errors="replace"))
    return int(told[1])
