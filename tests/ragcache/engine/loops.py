"""Event loops that tell how they were woken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it, and lets that thread go on only after it has looked
    at what it was woken for: wake-ups that could have been one are never one by chance."""

    woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.woken += 1
        handle = super().call_soon_threadsafe(callback, *args, **options)
        time.sleep(0.01)
        return handle
