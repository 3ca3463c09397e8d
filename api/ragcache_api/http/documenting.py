"""The OpenAPI document, as far as FastAPI does not write it as the service answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from ragcache_api.http.errors import is_openai


class Documented(FastAPI):
    """FastAPI adds an answer 422 to every operation that takes something; under OpenAI's interface
    what cannot be read gets 400."""

    def openapi(self) -> dict[str, Any]:
        """The document, made at the first call."""
        if self.openapi_schema is None:
            for path, operations in super().openapi()["paths"].items():
                if is_openai(path):
                    for operation in operations.values():
                        operation["responses"].pop("422", None)
        return super().openapi()
