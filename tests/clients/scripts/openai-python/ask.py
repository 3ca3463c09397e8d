from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1/collections/handbook", api_key="YOUR_KEY")
question = [{"role": "user", "content": "Where does the key of the pool car hang?"}]

answer = client.chat.completions.create(model="ragcache-reader", messages=question)
print(answer.choices[0].message.content, [each["source"]["name"] for each in answer.sources])

for chunk in client.chat.completions.create(
    model="ragcache-reader", messages=question, stream=True
):
    print(chunk.choices[0].delta.content or "", end="")
