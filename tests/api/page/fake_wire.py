"""The forms in which the fake server answers."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


def fits(module: dict[str, Any], query: Any) -> bool:
    """Whether a module passes the filters of a query."""
    if query.get("tier") and query["tier"] not in module["tiers"]:
        return False
    if query.get("pinned") and str(module["pinned"]).lower() != query["pinned"]:
        return False
    if query.get("search", "").lower() not in module["name"].lower():
        return False
    return all(
        module[name] == query[name] for name in ("collection", "document") if query.get(name)
    )


def paged(items: list[dict[str, Any]], request: Request) -> Response:
    """The items that a cursor and a limit ask for."""
    start, limit = (
        int(request.query_params.get("cursor", 0)),
        int(request.query_params.get("limit", 100)),
    )
    end = start + limit
    following = str(end) if end < len(items) else None
    return JSONResponse({"items": items[start:end], "next": following, "total": len(items)})


def changed(action: str, module: dict[str, Any]) -> Response:
    """What was done to a module."""
    change = {
        "key": f"{module['id']:064x}",
        "action": action,
        "tier": "host",
        "nbytes": module["nbytes"],
    }
    return JSONResponse({"dry_run": False, "changes": [change], "bytes": module["nbytes"]})


def problem(status: int, title: str, detail: str) -> Response:
    """An error by RFC 9457."""
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": "/",
    }
    return JSONResponse(body, status, media_type="application/problem+json")


def event(name: str, value: Any) -> str:
    """An event of a stream."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"
