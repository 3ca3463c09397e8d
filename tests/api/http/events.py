"""Reading server-sent events."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[tuple[str, Any]]:
    """Names and values; the name of an event without one is `message`."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        names = [line[7:] for line in lines if line.startswith("event: ")]
        told = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        found.append(
            (names[0] if names else "message", told if told == "[DONE]" else json.loads(told))
        )
    return found
