"""Questions to documents, PML prompts, and their answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ragcache import Answer, Generation
from ragcache.config import DEFAULT_K
from ragcache_api.http.wire.common import CollectionName, Told, Wire

Stops = str | list[str] | None


class Choosing(Wire):
    """How an answer is generated. The default is greedy."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = None
    stream: bool = False

    def generation(self, deadline: float) -> Generation:
        """Raises `InvalidRequest`."""
        return Generation.of(
            max_new_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p,
            seed=self.seed, stop=self.stop, timeout=deadline,
        )  # fmt: skip


class AnswerRequest(Choosing):
    """A question to a collection."""

    question: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    collection: CollectionName
    k: Annotated[int, Field(ge=1, le=1000)] | None = Field(None, description=f"{DEFAULT_K}.")
    mode: Annotated[str, Field(max_length=20)] | None = Field(None, description="`rooted`.")
    filters: dict[str, Any] | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None

    def retrieval(self) -> dict[str, Any]:
        """How documents are found and read, as far as the request says."""
        given = {
            "k": self.k, "mode": self.mode, "filters": self.filters, "threshold": self.threshold,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


class PromptRequest(Choosing):
    """A PML prompt."""

    prompt: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    mode: Annotated[str, Field(max_length=20)] = "isolated"


class SourceTold(Told):
    document: str
    module: str
    uri: str
    score: float
    tier: str
    scaffold: str


class ReuseTold(Told):
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    shared_tokens: int
    created_tokens: int
    bytes_moved: dict[str, int]


class TimingsTold(Told):
    """Seconds."""

    retrieve: float
    assemble: float
    first_token: float
    total: float
    queued: float


class AnswerTold(Told):
    """finish_reason: `stop`, `length`, or `no_documents` where retrieval found nothing."""

    id: str
    question: str
    text: str
    finish_reason: str
    mode: str
    sources: list[SourceTold]
    reuse: ReuseTold
    timings: TimingsTold


def told_answer(number: str, answer: Answer) -> dict[str, Any]:
    """An answer, to be written as JSON."""
    return {
        "id": number,
        "question": answer.question,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "mode": answer.mode,
        "sources": answer.sources,
        "reuse": answer.reuse,
        "timings": answer.timings,
    }
