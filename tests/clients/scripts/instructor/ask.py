import instructor
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel):
    place: str


client = instructor.from_openai(
    OpenAI(base_url="http://127.0.0.1:8000/v1/collections/handbook", api_key="YOUR_KEY"),
    mode=instructor.Mode.JSON_SCHEMA,
)
question = {
    "model": "ragcache-reader",
    "messages": [{"role": "user", "content": "Where does the key of the pool car hang?"}],
    "response_model": Place,
}

print(client.chat.completions.create(**question))

for place in client.chat.completions.create_partial(**question):
    print(place)
