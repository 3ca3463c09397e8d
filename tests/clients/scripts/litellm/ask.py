from litellm import completion

question = {
    "model": "openai/ragcache-reader/handbook",
    "api_base": "http://127.0.0.1:8000/v1",
    "api_key": "YOUR_KEY",
    "messages": [{"role": "user", "content": "Where does the key of the pool car hang?"}],
}

answer = completion(**question)
print(answer.choices[0].message.content, [each["source"]["name"] for each in answer.sources])

for chunk in completion(**question, stream=True):
    print(chunk.choices[0].delta.content or "", end="")
