from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    api_base="http://127.0.0.1:8000/v1/collections/handbook",
    api_key="YOUR_KEY",
    model="ragcache-reader",
    is_chat_model=True,
)
question = [ChatMessage(role="user", content="Where does the key of the pool car hang?")]

answer = model.chat(question)
print(answer.message.content, [each["source"]["name"] for each in answer.raw.sources])

for chunk in model.stream_chat(question):
    print(chunk.delta, end="")
