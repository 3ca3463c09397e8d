from smolagents import OpenAIModel

model = OpenAIModel(
    model_id="ragcache-reader",
    api_base="http://127.0.0.1:8000/v1/collections/handbook",
    api_key="YOUR_KEY",
)
question = [{"role": "user", "content": "Where does the key of the pool car hang?"}]

print(model(question).content)

for chunk in model.generate_stream(question):
    print(chunk.content or "", end="")
