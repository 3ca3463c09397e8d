from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

model = OpenAIChatGenerator(
    api_base_url="http://127.0.0.1:8000/v1/collections/handbook",
    api_key=Secret.from_token("YOUR_KEY"),
    model="ragcache-reader",
)
question = [ChatMessage.from_user("Where does the key of the pool car hang?")]

print(model.run(question)["replies"][0].text)

model.run(question, streaming_callback=print_streaming_chunk)
