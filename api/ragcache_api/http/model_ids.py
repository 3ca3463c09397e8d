"""Ids of models in requests: the served model, alone or with the collection to answer from."""

from __future__ import annotations

import re
from pathlib import PurePath

from ragcache_api.http.errors import HTTPProblem
from ragcache_api.settings import ServiceSettings

READER = "ragcache-reader"
"""Name of the embedded reader."""
_SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)/snapshots/[^/]+/?$")  # of the hub's cache


def served_name_of(settings: ServiceSettings, model: str | None = None) -> str:
    """Return the id of the served model for clients, which names no folder of the machine.

    Args:
        settings: Settings of the service. Their `served_name` is the id, if it is set.
        model: Name of the model. Defaults to the model of the settings.
    """
    return settings.served_name or _last_part(model or settings.model or READER)


def collection_in(model_id: str, served: str) -> str | None:
    """Return the collection that a model's id names: `MODEL/COLLECTION`, or `MODEL` for none.

    One model is served, so an empty id means it, and names before it, as in `openai/MODEL`, are
    ignored. The served name may contain `/`, and a collection's may not: the first place of the
    served name with at most one name after it counts.

    Raises:
        HTTPProblem: (404) The id names another model.

    Example:
        >>> collection_in("openai/Qwen3-4B/handbook", "Qwen3-4B")
        'handbook'
        >>> collection_in("Qwen/Qwen3-4B", "Qwen3-4B") is None
        True
    """
    if not model_id:
        return None
    found = re.fullmatch(rf"(?:.*?/)??{re.escape(served)}(?:/([^/]+))?", model_id, re.DOTALL)
    if found is None:
        detail = f"the model {model_id!r:.200} is not served; {served!r} is"
        raise HTTPProblem(404, "model-not-found", detail, None, "model")
    return found[1]


def _last_part(model: str) -> str:
    """Return the last part of a model's folder or hub name, without white space."""
    cached = _SNAPSHOT.search(model)
    return re.sub(r"\s", "-", cached[1] if cached else PurePath(model).name) or "model"
