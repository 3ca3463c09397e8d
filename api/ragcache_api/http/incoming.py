"""Bodies of requests on their way in: bounded in size and time, and unpacked."""

from __future__ import annotations

import asyncio
import math
import time
import zlib

from starlette.types import Message, Receive, Scope

from ragcache_api.http.errors import HTTPProblem

TIMEOUT_HEADER = "x-request-timeout"
_PIECE = 2**20  # bytes that are unpacked at once: more would halt other requests
_GZIP = 16 + zlib.MAX_WBITS


def check_length(declared: str | None, limit: int) -> None:
    """Check the value of `Content-Length` against a limit. Raises `HTTPProblem` (400, 413)."""
    try:
        length = int(declared or 0)
    except ValueError:
        raise HTTPProblem(400, "bad-length", "Content-Length is not a number") from None
    if length > limit:
        raise _too_large(limit)


def end_of(wanted: str | None, limit: float) -> float:
    """Return the end of a request that arrives now, on `time.monotonic`.

    Args:
        wanted: `X-Request-Timeout`, the seconds that the caller asks for.
        limit: The most seconds, from the settings.

    Raises:
        HTTPProblem: (400) The header is not a positive number.
    """
    try:
        seconds = limit if wanted is None else float(wanted)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise HTTPProblem(400, "bad-timeout", "X-Request-Timeout is not a positive time in seconds")
    return time.monotonic() + min(seconds, limit)


def bounded_receive(receive: Receive, limit: int, end: float) -> Receive:
    """Wrap `receive` to count the bytes of the body.

    The wrapper raises `HTTPProblem`: 413 for more bytes than the limit, and 408 if the body is not
    complete at `end`, on `time.monotonic`.
    """
    taken, more = 0, True

    async def receive_body() -> Message:
        nonlocal taken, more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                message = await receive()
        except TimeoutError:
            detail = "the body has not come within the time of the request"
            raise HTTPProblem(408, "body-too-slow", detail, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            more = message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _too_large(limit)
        return message

    return receive_body


def is_packed(encoding: str | None) -> bool:
    """Tell from `Content-Encoding` whether a body must be unpacked with `gunzipped`.

    Raises:
        HTTPProblem: (415) The encoding is not gzip.
    """
    name = (encoding or "identity").strip().lower()
    if name not in ("identity", "gzip", "x-gzip"):
        detail = f"bodies with Content-Encoding {name:.80} are not read; send gzip, or none"
        raise HTTPProblem(415, "unsupported-encoding", detail, {"Accept-Encoding": "gzip"})
    return name != "identity"


def gunzipped(receive: Receive) -> Receive:
    """Wrap `receive` to unpack a body of gzip, at most one MiB at a time.

    The wrapper raises `HTTPProblem` (400) for a body that is not gzip, or ends too early.
    """
    unpacker = zlib.decompressobj(_GZIP)
    packed, more, full, ended = b"", True, False, False

    async def receive_unpacked() -> Message:
        nonlocal unpacker, packed, more, full, ended
        if ended:
            return await receive()
        while more and not packed and not full:
            message = await receive()
            if message["type"] != "http.request":
                return message
            packed, more = message.get("body", b""), message.get("more_body", False)
        if unpacker.eof and packed:  # gzip files may follow each other
            unpacker = zlib.decompressobj(_GZIP)
        try:
            body = unpacker.decompress(packed, _PIECE)
        except zlib.error as error:
            raise _bad_gzip(str(error)) from None
        packed = unpacker.unconsumed_tail or unpacker.unused_data
        full = len(body) == _PIECE and not unpacker.eof
        ended = not (more or packed or full)
        if ended and not unpacker.eof:
            raise _bad_gzip("it ends too early")
        return {"type": "http.request", "body": body, "more_body": not ended}

    return receive_unpacked


def unpacked_scope(scope: Scope) -> Scope:
    """Return the scope of a request without the headers of its packed body."""
    packed = (b"content-encoding", b"content-length")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in packed]
    return {**scope, "headers": headers}


async def wait_for_disconnect(receive: Receive) -> None:
    """Receive messages until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _bad_gzip(reason: str) -> HTTPProblem:
    return HTTPProblem(400, "bad-encoding", f"the body cannot be unpacked as gzip: {reason}")


def _too_large(limit: int) -> HTTPProblem:
    detail = f"the body has more than the {limit:,} bytes that are allowed here"
    return HTTPProblem(413, "body-too-large", detail, {"Connection": "close"})
