from crewai import LLM
from crewai.events import LLMStreamChunkEvent, crewai_event_bus

settings = {
    "model": "openai/ragcache-reader",
    "base_url": "http://127.0.0.1:8000/v1/collections/handbook",
    "api_key": "YOUR_KEY",
}
question = "Where does the key of the pool car hang?"


@crewai_event_bus.on(LLMStreamChunkEvent)
def show(source: object, event: LLMStreamChunkEvent) -> None:
    print(event.chunk, end="")


print(LLM(**settings).call(question))

LLM(**settings, stream=True).call(question)
crewai_event_bus.flush()
