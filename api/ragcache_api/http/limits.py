"""Limits before a request is read: how large it is, and how many come."""

from __future__ import annotations

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


def counted(receive: Receive, most: int) -> Receive:
    """A body without a declared length is counted while it comes."""
    taken = 0

    async def receive_counted() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > most:
                raise _too_large(most)
        return message

    return receive_counted


def _too_large(most: int) -> Refusal:
    detail = f"the body has more than the {most:,} bytes that are allowed here"
    return Refusal(413, "body-too-large", detail, {"Connection": "close"})
