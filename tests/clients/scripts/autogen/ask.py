import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

model = OpenAIChatCompletionClient(
    model="ragcache-reader",
    base_url="http://127.0.0.1:8000/v1/collections/handbook",
    api_key="YOUR_KEY",
    model_info={
        "family": "unknown",
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
    },
)
question = "Where does the key of the pool car hang?"


async def days_of_leave(name: str) -> int:
    """Return the days of leave that a person has left."""
    return len(name)


async def main() -> None:
    agent = AssistantAgent("handbook", model, tools=[days_of_leave])
    print((await agent.run(task=question)).messages[-1].content)
    streaming = AssistantAgent("handbook", model, model_client_stream=True)
    async for event in streaming.run_stream(task=question):
        if event.__class__.__name__ == "ModelClientStreamingChunkEvent":
            print(event.content, end="")
    await model.close()


asyncio.run(main())
