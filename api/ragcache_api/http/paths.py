"""Paths of requests: the shape of their errors, and what to call where nothing is served.

Everything under `/v1/` has errors in OpenAI's shape, except the service's own resources and
Anthropic's messages, which have Anthropic's. OpenAI's resources have OpenAI's shape also without
the `/v1`, which clients call whose base URL lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from starlette.convertors import PathConvertor, register_url_convertor

_VERSION = "v1"
_OWN = frozenset(("answers", "collections", "jobs", "pins", "prompts", "schemas"))
_ANTHROPIC = "messages"
_CHATS = "answer with POST /v1/chat/completions"
_DOCUMENTS = "store documents with POST /v1/collections/COLLECTION/documents"
_NO_STATE = "the service keeps no conversations: send all messages to POST /v1/chat/completions"
_TEXT_ONLY = "the service reads and writes text only"
_NO_WEBHOOKS = "the service calls no webhooks: follow an ingestion at GET /v1/jobs/JOB"
_TRAINING = "the service trains no models"
_ONE_MODEL = "GET /v1/models names the served model"
_TOKENS = frozenset(("detokenize", "tokenize", "tokenizer_info"))
_RESOURCES = {
    "agents": _NO_STATE,
    "assistants": _NO_STATE,
    "audio": _TEXT_ONLY,
    "batches": "send the requests one by one; the service runs them in one batch",
    "chat": _CHATS,
    "chatkit": _NO_STATE,
    "completions": "continue texts with POST /v1/completions",
    "containers": "the service runs no code",
    "content_provenance_checks": "the service judges no texts",
    "conversations": _NO_STATE,
    "decisions": "the service judges no texts",
    "edits": _CHATS,
    "embeddings": "embed texts with POST /v1/embeddings",
    "engines": _ONE_MODEL,
    "evals": "measure answers with the command `ragcache eval`",
    "files": "upload files with POST /v1/files",
    "fine_tuning": _TRAINING,
    "fine-tunes": _TRAINING,
    "images": _TEXT_ONLY,
    "live": _TEXT_ONLY,
    _ANTHROPIC: "Anthropic's clients take a base URL without /v1, and POST /v1/messages",
    "models": _ONE_MODEL,
    "moderations": "the service judges no texts",
    "openai": "use an OpenAI client whose base URL ends in /v1, in place of an Azure client",
    "organization": "make keys with POST /admin/keys",
    "projects": "make keys with POST /admin/keys",
    "realtime": _TEXT_ONLY,
    "rerank": "order texts with POST /v1/rerank",
    "responses": "answer with POST /v1/responses",
    "safety": "the service judges no texts",
    "score": "order texts with POST /v1/rerank",
    "skills": "the service runs no code",
    "threads": _NO_STATE,
    "uploads": _DOCUMENTS,
    "vaults": "the service runs no code",
    "vector_stores": "create a store with POST /v1/vector_stores",
    "videos": _TEXT_ONLY,
    "webhook_endpoints": _NO_WEBHOOKS,
    "webhook_event_types": _NO_WEBHOOKS,
}
"""Advice for each resource of OpenAI's and vLLM's API that is not served."""


class IdConvertor(PathConvertor):
    """Convertor `id` of path parameters: at least one character, and any number of `/`."""

    regex = ".+"


register_url_convertor("id", IdConvertor())


def is_openai(path: str) -> bool:
    """Tell whether the errors of a path have OpenAI's shape.

    Example:
        >>> [is_openai(path) for path in ("/v1/responses", "/chat/completions", "/v1/answers")]
        [True, True, False]
    """
    versions, parts = _split(path)
    if is_anthropic(path):
        return False
    if based := _below_collection(parts):
        return based[0] in _RESOURCES
    name = parts[0] if parts else ""
    return name not in _OWN if versions else name in _RESOURCES or name in _TOKENS


def is_anthropic(path: str) -> bool:
    """Tell whether the errors of a path have Anthropic's shape.

    Example:
        >>> [is_anthropic(path) for path in ("/v1/messages/count_tokens", "/v1/threads/x/messages")]
        [True, False]
    """
    parts = _split(path)[1]
    return (_below_collection(parts) or parts)[:1] == [_ANTHROPIC]


def explain_unserved(method: str, path: str, methods_of: Callable[[str], Sequence[str]]) -> str:
    """Say in a sentence that a call is not served, and what to call instead.

    Args:
        method: Method of the call.
        path: Path of the call.
        methods_of: Returns the methods that a path has.
    """
    call = f"{method} {path:.200} is not served"
    if methods := methods_of(path):
        return f"{call}: this path takes {_listed(methods)}"
    versions, parts = _split(path)
    meant = "/".join(("", _VERSION, *parts))
    if meant != path and (methods := methods_of(meant)):
        wrong = "has no /v1 at its end" if not versions else "should end in a single /v1"
        if versions == 1:
            wrong = "should have no slash at its end"
        return (
            f"{call}; {_listed([f'{each} {meant:.200}' for each in methods])} is. "
            f"The client's base URL {wrong}"
        )
    name, *_ = _below_collection(parts) or parts or [""]
    return f"{call}; {_RESOURCES.get(name, 'GET /openapi.json lists all routes')}"


def _split(path: str) -> tuple[int, list[str]]:
    """Return the number of `v1` at the beginning of a path, and the segments after them."""
    parts = [part for part in path.split("/") if part]
    versions = next((at for at, part in enumerate(parts) if part != _VERSION), len(parts))
    return versions, parts[versions:]


def _below_collection(parts: list[str]) -> list[str]:
    """Return the segments below a collection, which can be the base URL of clients.

    Anthropic's clients add a `v1` to it.
    """
    return _split("/".join(parts[2:]))[1] if parts[:1] == ["collections"] else []


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
