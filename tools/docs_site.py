"""Hooks of mkdocs: pages that are generated from the code, and links to files beside the docs.

Command line, REST routes, settings and the list of decisions come from Typer, OpenAPI, the settings
model and the decision records, so that they are never behind the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from typer.cli import get_docs_for_click
from typer.main import get_command
from typer.models import Context

from ragcache_api.cli.main import app as command_line
from ragcache_api.http.anthropic import (
    IGNORED_IN_MESSAGES,
    UNSERVED_IN_MESSAGES,
    MessagesRequest,
)
from ragcache_api.http.app import ROUTERS
from ragcache_api.http.bodies import ChatRequest, CompletionRequest
from ragcache_api.http.client_fields import (
    IGNORED,
    UNSERVED_IN_CHATS,
    UNSERVED_IN_COMPLETIONS,
    UnservedField,
)
from ragcache_api.http.responses import UNSERVED_IN_RESPONSES, ResponsesRequest
from ragcache_api.settings import ServiceSettings
from tools.notebooks import NOTEBOOKS, notebook_page

DOCS = Path(__file__).parent.parent / "docs"
_METHODS = ("get", "post", "put", "patch", "delete")
_DIALECTS: dict[str, tuple[type[BaseModel], Mapping[str, UnservedField], Mapping[str, str]]] = {
    "/v1/chat/completions": (ChatRequest, UNSERVED_IN_CHATS, IGNORED),
    "/v1/completions": (CompletionRequest, UNSERVED_IN_COMPLETIONS, IGNORED),
    "/v1/responses": (ResponsesRequest, UNSERVED_IN_RESPONSES, IGNORED),
    "/v1/messages": (MessagesRequest, UNSERVED_IN_MESSAGES, IGNORED_IN_MESSAGES),
}
"""Bodies of the interfaces of others, with their fields that are refused and ignored."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages of `docs/reference/`, and the notebooks as pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for path in NOTEBOOKS.glob("*.ipynb"):
        text = notebook_page(json.loads(path.read_text(encoding="utf-8")))
        linked = text.replace("\n\n", f"\n\n[Download this page as a notebook]({path.name})\n\n", 1)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=linked))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """List the decisions on their index, lead to the pages of notebooks, and name files outside
    `docs/` instead of linking them."""
    if page.file.src_uri == "internals/adr/README.md":
        markdown += "\n" + decisions()
    folder = (DOCS / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        path = (folder / target).resolve()
        if path.parent == NOTEBOOKS != folder:
            return f"[{text}]({target.removesuffix('.ipynb')}.md)"
        if ":" in target or not target or path.is_relative_to(DOCS):
            return match[0]
        return f"{text} (`{path.relative_to(DOCS.parent)}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)


def decisions() -> str:
    """A list of all decision records by number, with a link to each."""
    lines = []
    for path in sorted((DOCS / "internals" / "adr").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})\n")
    return "".join(lines)


def command_line_page() -> str:
    """Every command with its arguments and options, from Typer."""
    command = get_command(command_line)
    text = get_docs_for_click(obj=command, ctx=Context(command), name="ragcache")
    return text.replace("# `ragcache`", "# Command line", 1)


def settings_page() -> str:
    """Every setting of the service with its default, from `ServiceSettings`."""
    rows = []
    for name, field in ServiceSettings.model_fields.items():
        if name not in ServiceSettings.withheld:
            default = _cell(field.get_default(call_default_factory=True))
            meaning = _line(field.description or "")
            rows.append(f"| `{name}` | `RAGCACHE_{name.upper()}` | {default} | {meaning} |")
    head = (
        "# Settings\n\nA setting is an option of `ragcache serve`, an environment variable or a "
        "line of `ragcache.toml`. The first of these that is given counts.\n\n"
        "| setting | variable | default | meaning |\n|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def _cell(value: object) -> str:
    return f"`{value}`" if value not in (None, "") else ""


def rest_page() -> str:
    """Fields by dialect, and every route with parameters and body, from the OpenAPI document."""
    service = FastAPI(title="ragcache")
    for router in ROUTERS:
        service.include_router(router)
    document = service.openapi()
    schemas = document.get("components", {}).get("schemas", {})
    parts = ["# REST\n", *_dialects()]
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                parts += _route(method, path, item[method], schemas)
    return "\n".join(parts) + "\n"


def _dialects() -> Iterator[str]:
    """Tables of the fields that are served, refused and ignored in each interface of others."""
    yield "\n## Fields by dialect\n"
    yield "All other fields are ignored, except in `/v1/messages`, where they are refused.\n"
    for path, (body, refused, ignored) in _DIALECTS.items():
        yield f"\n### {path}\n\n| fields | | |\n|---|---|---|"
        left_out = {*refused, *getattr(body, "withheld", ())}
        names = ", ".join(f"`{name}`" for name in body.model_fields if name not in left_out)
        yield f"| {names} | served | |"
        for name, field in refused.items():
            yield f"| `{name}` | refused | {_line(field.remedy)} |"
        for name, reason in ignored.items():
            if name not in refused:
                yield f"| `{name}` | ignored | {_line(reason)} |"


def _route(method: str, path: str, route: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {method.upper()} {path}\n"
    yield route.get("description") or route.get("summary", "")
    parameters = route.get("parameters", [])
    if parameters:
        yield "\n| parameter | in | type | meaning |\n|---|---|---|---|"
    for each in parameters:
        meaning = _line(each.get("description") or each["schema"].get("description", ""))
        yield f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {meaning} |"
    for media, content in route.get("requestBody", {}).get("content", {}).items():
        reference = content["schema"].get("$ref", "").rpartition("/")[2]
        fields = schemas.get(reference, {}).get("properties", {})
        if fields:
            yield f"\nBody, `{media}`:\n\n| field | type | default | meaning |\n|---|---|---|---|"
        for name, schema in fields.items():
            meaning = _line(schema.get("description", ""))
            yield f"| `{name}` | {_type(schema)} | {_cell(schema.get('default'))} | {meaning} |"


def _type(schema: dict[str, Any]) -> str:
    """Type of a value in words, such as `string` or `array of integer`."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        names = dict.fromkeys(_type(each) for each in schema["anyOf"])
        return " or ".join(name for name in names if name != "null")
    kind = str(schema.get("type", "any"))
    return f"array of {_type(schema.get('items', {}))}" if kind == "array" else kind


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "command-line": command_line_page,
    "rest": rest_page,
    "settings": settings_page,
}
"""Generated pages by name."""
