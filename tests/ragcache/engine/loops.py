"""Event loops that tell how they were woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.woken += 1
        return super().call_soon_threadsafe(callback, *args, **options)
