from agno.agent import Agent
from agno.models.openai.like import OpenAILike

agent = Agent(
    model=OpenAILike(
        id="ragcache-reader",
        base_url="http://127.0.0.1:8000/v1/collections/handbook",
        api_key="YOUR_KEY",
    ),
    telemetry=False,
)
question = "Where does the key of the pool car hang?"

print(agent.run(question).content)

for event in agent.run(question, stream=True):
    print(event.content or "", end="")
