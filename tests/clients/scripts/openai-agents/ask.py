import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1/collections/handbook", api_key="YOUR_KEY")
question = "Where does the key of the pool car hang?"


@function_tool
def days_of_leave(name: str) -> int:
    """Return the days of leave that a person has left."""
    return len(name)


agent = Agent(
    name="Handbook",
    model=OpenAIChatCompletionsModel("ragcache-reader", client),
    tools=[days_of_leave],
)


async def main() -> None:
    print((await Runner.run(agent, question)).final_output)
    streamed = Runner.run_streamed(agent, question)
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="")


asyncio.run(main())
