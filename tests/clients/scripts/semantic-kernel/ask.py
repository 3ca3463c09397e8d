import asyncio

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1/collections/handbook", api_key="YOUR_KEY")
model = OpenAIChatCompletion(ai_model_id="ragcache-reader", async_client=client)
question = ChatHistory()
question.add_user_message("Where does the key of the pool car hang?")


async def main() -> None:
    settings = OpenAIChatPromptExecutionSettings()
    print(await model.get_chat_message_content(question, settings))
    async for chunk in model.get_streaming_chat_message_content(question, settings):
        print(chunk, end="")


asyncio.run(main())
