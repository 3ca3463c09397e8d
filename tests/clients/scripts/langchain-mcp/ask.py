import asyncio

from langchain_mcp_adapters.client import MultiServerMCPClient

SERVER = {
    "transport": "streamable_http",
    "url": "http://127.0.0.1:8000/mcp",
    "headers": {"Authorization": "Bearer YOUR_KEY"},
}
QUESTION = {"question": "Where does the key of the pool car hang?", "collection": "handbook"}


async def main() -> None:
    client = MultiServerMCPClient({"ragcache": SERVER})
    tools = {tool.name: tool for tool in await client.get_tools()}
    print(await tools["list_collections"].ainvoke({}))
    print(await tools["ask"].ainvoke(QUESTION))


asyncio.run(main())
