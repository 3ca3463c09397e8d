"""Limits before a request is read: how large it is, how long it takes, and how many come."""

from __future__ import annotations

import asyncio
import math
import time

from limits import RateLimitItem, parse_many
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.types import Message, Receive

from ragcache_api.http.errors import Refusal


class RateLimit:
    """Counts requests of each bucket in moving windows."""

    def __init__(self, rate: str | None) -> None:
        self._items: list[RateLimitItem] = parse_many(rate) if rate else []
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def hit(self, bucket: str) -> None:
        """Raises `Refusal` (429) with the seconds after which there is room again."""
        for item in self._items:
            if not self._limiter.hit(item, bucket):
                until = self._limiter.get_window_stats(item, bucket).reset_time
                wait = max(1, math.ceil(until - time.time()))
                raise Refusal(
                    429, "rate-limited", f"more than {item} requests; try again in {wait} s",
                    {"Retry-After": str(wait)},
                )  # fmt: skip


def check_length(declared: bytes | None, most: int) -> None:
    """Refuses by the declared length, before anything is read. Raises `Refusal`."""
    if declared is None:
        return
    try:
        length = int(declared)
    except ValueError:
        raise Refusal(400, "bad-length", "Content-Length is not a number") from None
    if length > most:
        raise _too_large(most)


def end_of(asked: str | None, most: float) -> float:
    """When a request that comes now is to have ended, on `time.monotonic`: after the seconds that
    it asks for, at most those of the settings. Raises `Refusal` (400)."""
    try:
        seconds = most if asked is None else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise Refusal(400, "bad-timeout", "X-Request-Timeout is not a positive time in seconds")
    return time.monotonic() + min(seconds, most)


def bounded(receive: Receive, most: int, end: float) -> Receive:
    """A body without a declared length is counted while it comes, and it comes in time. Raises
    `Refusal` (413, 408)."""
    taken, more = 0, True

    async def receive_bounded() -> Message:
        nonlocal taken, more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                message = await receive()
        except TimeoutError:
            detail = "the body has not come within the time of the request"
            raise Refusal(408, "body-too-slow", detail, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            more = message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > most:
                raise _too_large(most)
        return message

    return receive_bounded


def _too_large(most: int) -> Refusal:
    detail = f"the body has more than the {most:,} bytes that are allowed here"
    return Refusal(413, "body-too-large", detail, {"Connection": "close"})
