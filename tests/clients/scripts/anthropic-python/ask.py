import asyncio

from anthropic import Anthropic, AsyncAnthropic

service = {"base_url": "http://127.0.0.1:8000/v1/collections/handbook", "api_key": "YOUR_KEY"}
question = {
    "model": "ragcache-reader",
    "max_tokens": 256,
    "messages": [{"role": "user", "content": "Where does the key of the pool car hang?"}],
}
client = Anthropic(**service)

message = client.messages.create(**question)
print(message.content[0].text, [each.source for each in message.content[0].citations])
print(client.messages.count_tokens(model="ragcache-reader", messages=question["messages"]))


async def main() -> None:
    async with AsyncAnthropic(**service).messages.stream(**question) as stream:
        async for text in stream.text_stream:
            print(text, end="")
        assert (await stream.get_final_message()).usage.cache_read_input_tokens > 0


asyncio.run(main())
