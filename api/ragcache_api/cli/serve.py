"""`ragcache serve`: the HTTP service over a state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache.errors import ConfigurationError
from ragcache_api.cli.console import errors


def serve(
    state: Annotated[Path | None, typer.Option("--state", help="The state folder.")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="The port; 0 takes a free one.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub name; without it, the embedded reader."),
    ] = None,
    embedding: Annotated[
        str | None, typer.Option(help="`minilm` adds retrieval by meaning to retrieval by words.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Serve a state folder over HTTP: OpenAI's interface, answers, documents, and the operator's.

    Settings also come from RAGCACHE_NAME in the environment and from ragcache.toml.
    """
    from ragcache_api.http.server import serve as serve_app
    from ragcache_api.settings import ServiceSettings

    others = _parse_settings(setting or [])
    settings = ServiceSettings.read(
        state=state, host=host, port=port, model=model, embedding=embedding, **others
    )
    with errors.status("loading the model"):
        from ragcache import RagCache

        rag = RagCache.open(settings.state, settings.model, warm_up=True, **settings.opening())
    with rag:
        serve_app(rag, settings)


def _parse_settings(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set takes NAME=VALUE, not {text!r}")
        pairs[name.replace("-", "_")] = value
    return pairs
