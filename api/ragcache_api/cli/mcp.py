"""`ragcache mcp`: the Model Context Protocol over standard input and output, for desktops."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.config import NAMESPACE, check_namespace
from ragcache.errors import MissingExtra
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ASKING, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import RagCache


@expand_options
def mcp(
    options: Annotated[ServiceOptions, ASKING],
    ingest: Annotated[
        bool, typer.Option("--ingest", help="Let the program store documents, too.")
    ] = False,
    namespace: ui.NamespaceOption = NAMESPACE,
) -> None:
    """Serve collections to a program that starts this command, such as a desktop assistant.

    Requests come on standard input, and responses go to standard output. A running service has the
    same at `/mcp`.
    """
    check_namespace(namespace)
    if find_spec("mcp") is None:
        raise MissingExtra(
            "the Model Context Protocol needs another package: pip install 'ragcache[mcp]'"
        )
    with ui.open_rag(options) as rag:
        import anyio

        anyio.run(_serve, rag.within(namespace), ingest)


async def _serve(rag: RagCache, ingests: bool) -> None:
    from mcp.server.stdio import stdio_server

    from ragcache import Answer, AsyncRagCache
    from ragcache_api.mcp.server import create_mcp_server
    from ragcache_api.mcp.tools import AskArguments, McpSession

    async def ask(wanted: AskArguments) -> Answer:
        return await AsyncRagCache(rag).ask(
            wanted.question, collection=wanted.collection, k=wanted.k, filters=wanted.filters
        )

    session = McpSession(rag, ask, ingests)
    server: Any = create_mcp_server(lambda _: session)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
