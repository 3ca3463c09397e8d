"""JSON as the service writes it."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json
from starlette.responses import JSONResponse


def compact(value: Any) -> bytes:
    """JSON without spaces, of dataclasses too. Numbers that are not finite have no place in it:
    null stands there."""
    return to_json(value, inf_nan_mode="null")


class CompactResponse(JSONResponse):
    """Answers with a value."""

    def render(self, content: Any) -> bytes:
        return compact(content)
