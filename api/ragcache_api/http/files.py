"""The operator's page as files, with a strict policy for the browser that shows them."""

from __future__ import annotations

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # scripts of two versions must not meet after an upgrade
}


class PageFiles(StaticFiles):
    """Nothing from other hosts, nothing inline, and no other site may frame it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Raises `HTTPException` (404, 405)."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
