"""Pages for browsers: `/` to ask, `/admin/` to operate, and Swagger UI at `/docs`.

All files are local, and a content security policy allows no other host. The two pages share the
files below `/page`, and name them by relative paths, since a proxy may add a prefix.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parent / "page"
SWAGGER = Path(str(files("fastapi_offline"))) / "static"
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
_STRICT = f"{_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
"""Policy of the two pages: the browser itself refuses to parse any string as HTML."""
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # scripts of two versions must not meet after an upgrade
}
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def open_paths() -> frozenset[str]:
    """Return the paths that need no key, since they reveal no stored data.

    They include `/openapi.json` for Swagger UI, the same for every service of a version.
    """
    files = (file.relative_to(PAGE).as_posix() for file in PAGE.rglob("*") if file.is_file())
    return frozenset(
        (
            "/",
            "/admin",
            "/admin/",
            *(f"/page/{name}" for name in files),
            "/docs",
            "/openapi.json",
            *(f"/docs/{name}" for name in SWAGGER_FILES),
        )
    )


def install_pages(app: FastAPI) -> None:
    """Add the routes of the pages, which the OpenAPI document leaves out."""

    @app.get("/", tags=["pages"], include_in_schema=False)
    async def show_ask_page() -> Response:
        return _page("ask.html")

    @app.get("/admin/", tags=["pages"], include_in_schema=False)
    async def show_operator_page() -> Response:
        return _page("admin.html")

    @app.get("/admin", tags=["pages"], include_in_schema=False)
    async def complete_path() -> Response:
        return RedirectResponse("admin/")

    document = _swagger_page(app)

    @app.get("/docs", tags=["pages"], include_in_schema=False)
    async def describe_api() -> Response:
        return document

    app.mount("/page", LocalFiles(directory=PAGE), name="page")
    app.mount("/docs", LocalFiles(directory=SWAGGER), name="swagger")


def _page(name: str) -> Response:
    return FileResponse(PAGE / name, headers=HEADERS | {"Content-Security-Policy": _STRICT})


class LocalFiles(StaticFiles):
    """Static files with a policy that allows no other host, no inline code, and no framing."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file with the headers of the policy. Raises `HTTPException` (404, 405)."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def _swagger_page(app: FastAPI) -> Response:
    """Make FastAPI's page of Swagger UI, and allow its inline script by digest.

    Swagger UI draws icons from `data:` addresses.
    """
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{app.title} · API",
        swagger_js_url=f"docs/{SWAGGER_FILES[0]}",
        swagger_css_url=f"docs/{SWAGGER_FILES[1]}",
        swagger_favicon_url="page/icon.svg",
        swagger_ui_parameters={"persistAuthorization": False, "tryItOutEnabled": True},
    )
    scripts = " ".join(
        f"'sha256-{b64encode(hashlib.sha256(script).digest()).decode()}'"
        for script in _INLINE.findall(bytes(page.body))
    )
    policy = f"{_POLICY}; script-src 'self' {scripts}; img-src 'self' data:"
    page.headers.update(HEADERS | {"Content-Security-Policy": policy})
    return page
