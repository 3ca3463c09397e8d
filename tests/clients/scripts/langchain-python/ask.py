from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url="http://127.0.0.1:8000/v1/collections/handbook",
    api_key="YOUR_KEY",
    model="ragcache-reader",
)
question = "Where does the key of the pool car hang?"

answer = model.invoke(question)
print(answer.content, list(answer.response_metadata["token_usage"]["sources"]))

for chunk in model.stream(question):
    print(chunk.content, end="")
