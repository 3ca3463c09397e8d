from langchain_anthropic import ChatAnthropic

model = ChatAnthropic(
    base_url="http://127.0.0.1:8000/v1/collections/handbook",
    api_key="YOUR_KEY",
    model="ragcache-reader",
    max_tokens=256,
)
question = "Where does the key of the pool car hang?"

answer = model.invoke(question)
print(answer.text, answer.usage_metadata)

for chunk in model.stream(question):
    print(chunk.text, end="")
