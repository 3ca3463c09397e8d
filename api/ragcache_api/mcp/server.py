"""The server of the Model Context Protocol, by the official SDK (extra `mcp`).

One `Server` serves all callers: each request finds its caller's `McpSession`. It keeps no state
between requests, so that any replica can answer any of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from mcp import MCPError, types
from mcp.server.lowlevel import Server
from pydantic import ValidationError

from ragcache import RagCache, __version__
from ragcache.errors import RagCacheError
from ragcache_api.mcp.tools import (
    SCHEME,
    TOOLS,
    McpSession,
    ToolSpec,
    offered_tools,
    parse_resource_uri,
    read_document,
    resource_uri,
)

logger = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Answers questions from collections of documents. Call list_collections first, then ask for an "
    "answer with citations, or search for passages to read yourself."
)
MIME_TYPE = "text/plain"
_PAGE = 100  # resources of a page
_RESOURCE_NOT_FOUND = -32002

FindSession = Callable[[Any], McpSession]
"""Returns the session of a request, from the SDK's `ServerRequestContext`."""


def create_mcp_server(find_session: FindSession) -> Any:
    """Make the SDK's `Server` with ragcache's tools and resources.

    Args:
        find_session: Returns the caller's session.
    """
    handlers = _Handlers(find_session)
    return Server(
        "ragcache",
        version=__version__,
        title="ragcache",
        instructions=INSTRUCTIONS,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_resource_templates,
        on_read_resource=handlers.read_resource,
    )


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The requests of the protocol."""

    find_session: FindSession

    async def list_tools(self, context: Any, _: Any) -> types.ListToolsResult:
        session = self.find_session(context)
        return types.ListToolsResult(tools=[_tool(*each) for each in offered_tools(session)])

    async def call_tool(self, context: Any, params: Any) -> types.CallToolResult:
        """Run a tool. Errors that a model can act on are results, as the protocol wants."""
        session = self.find_session(context)
        tool = dict(offered_tools(session)).get(params.name)
        if tool is None:
            closed = " is not offered by this server" if params.name in TOOLS else " is unknown"
            raise MCPError(types.INVALID_PARAMS, f"the tool {params.name!r:.100}{closed}")
        try:
            arguments = tool.arguments.model_validate(params.arguments or {})
            result = (await tool.run(arguments, session)).model_dump(exclude_none=True)
        except ValidationError as error:
            return _failed(_explain(error))
        except RagCacheError as error:
            return _failed(f"{type(error).__name__}: {error}")
        text = json.dumps(result, ensure_ascii=False)
        content = [types.TextContent(type="text", text=text)]
        return types.CallToolResult(content=content, structured_content=result)

    async def list_resources(self, context: Any, params: Any) -> types.ListResourcesResult:
        cursor = None if params is None else params.cursor
        rag = self.find_session(context).rag
        try:
            found, following = await to_thread.run_sync(_page_of_documents, rag, cursor)
        except (RagCacheError, ValueError) as error:
            raise MCPError(types.INVALID_PARAMS, f"the cursor cannot be used: {error}") from error
        resources = [
            types.Resource(
                uri=resource_uri(collection, name),
                name=name,
                title=name,
                description=f"Document of the collection {collection}",
                mime_type=MIME_TYPE,
            )
            for collection, name in found
        ]
        return types.ListResourcesResult(resources=resources, next_cursor=following)

    async def list_resource_templates(
        self, context: Any, _: Any
    ) -> types.ListResourceTemplatesResult:
        self.find_session(context)
        template = types.ResourceTemplate(
            uri_template=f"{SCHEME}://{{collection}}/{{document}}",
            name="document",
            description="The whole text of a document of a collection",
            mime_type=MIME_TYPE,
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(self, context: Any, params: Any) -> types.ReadResourceResult:
        uri = str(params.uri)
        rag = self.find_session(context).rag
        try:
            collection, document = parse_resource_uri(uri)
            found = await to_thread.run_sync(read_document, rag, collection, document)
        except RagCacheError as error:
            raise MCPError(_RESOURCE_NOT_FOUND, str(error), {"uri": uri}) from error
        contents = types.TextResourceContents(uri=uri, text=found.text, mime_type=MIME_TYPE)
        return types.ReadResourceResult(contents=[contents])


def _tool(name: str, tool: ToolSpec) -> types.Tool:
    return types.Tool(
        name=name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(),
        output_schema=tool.result.model_json_schema(),
        annotations=types.ToolAnnotations(
            read_only_hint=not tool.writes,
            destructive_hint=tool.writes,
            idempotent_hint=True,
            open_world_hint=False,
        ),
    )


def _failed(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)


def _explain(error: ValidationError) -> str:
    wrong = [
        f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
        for each in error.errors(include_url=False, include_input=False)
    ]
    return f"InvalidArguments: {'; '.join(wrong)}"


def _page_of_documents(
    rag: RagCache, cursor: str | None
) -> tuple[list[tuple[str, str]], str | None]:
    """Return a page of the documents of all collections, and the cursor of the next page.

    A cursor is the JSON of the collection to go on with, and of the last document before the page.
    """
    start, after = (None, None) if cursor is None else _parse_cursor(cursor)
    found: list[tuple[str, str]] = []
    collections = sorted(rag.internals.catalog.collections())
    for collection in collections:
        if start is not None and collection < start:
            continue
        before = after if collection == start else None
        page = rag.documents.page(collection, before, _PAGE - len(found))
        found += [(collection, row.source_id) for row in page.items]
        if page.next is not None:
            return found, json.dumps([collection, page.next])
        if len(found) == _PAGE and collection != collections[-1]:
            return found, json.dumps([collections[collections.index(collection) + 1], None])
    return found, None


def _parse_cursor(cursor: str) -> tuple[str, str | None]:
    found = json.loads(cursor)
    if not (isinstance(found, list) and len(found) == 2 and isinstance(found[0], str)):
        raise ValueError("it is from no page of this list")
    return found[0], found[1]
