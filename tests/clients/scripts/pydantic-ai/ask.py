import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(
    base_url="http://127.0.0.1:8000/v1/collections/handbook", api_key="YOUR_KEY"
)
agent = Agent(OpenAIChatModel("ragcache-reader", provider=provider))
question = "Where does the key of the pool car hang?"


@agent.tool_plain
def days_of_leave(name: str) -> int:
    """Return the days of leave that a person has left."""
    return len(name)


async def main() -> None:
    print((await agent.run(question)).output)
    async with agent.run_stream(question) as answer:
        async for piece in answer.stream_text(delta=True):
            print(piece, end="")


asyncio.run(main())
