"""What an answer tells: its text, where it comes from, what was reused, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ragcache.engine import Choice, RequestOutput


@dataclass(frozen=True, slots=True)
class Source:
    """A module that stood in the prompt. tier: where its states came from: `host`, `disk`,
    `encoded` (computed for this request and kept) or `computed` (mode `exact`). scaffold: the
    modules that it was encoded together with, itself included; "" if alone."""

    document: str
    module: str
    uri: str
    score: float
    tier: str
    scaffold: str = ""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of the prompt, counted: cached + shared + computed = prompt.

    cached: their states were in the store. shared: tokens of the question itself whose states an
    earlier or concurrent request over the same documents had left in the engine. bytes_moved: by
    tier, the bytes that were read from below the host tier. created: those of the computed whose
    states were encoded for this request and kept.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    shared_tokens: int = 0
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    created_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, measured. first_token and total run from the call, with retrieval, copies, encoding
    of what was missing and waiting; queued is the wait for the engine alone. Requests of one batch
    share retrieve."""

    retrieve: float
    assemble: float
    first_token: float
    total: float
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """text, finish_reason: of the first choice, the text without outer whitespace. finish_reason:
    `stop`, `length`, or `no_documents` where retrieval found nothing. choices: all `n` answers as
    they were generated, with tokens and, if asked for, log-probabilities."""

    question: str
    text: str
    sources: tuple[Source, ...]
    mode: str
    finish_reason: str
    reuse: Reuse
    timings: Timings
    choices: tuple[Choice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Marks:
    """`time.perf_counter` readings, in seconds: when the call came, when it was known which modules
    the prompt reads, and when their states were at hand."""

    called: float
    retrieved: float
    assembled: float


@dataclass(frozen=True, slots=True)
class Ready:
    """All that an answer tells besides what is generated; known when its request is submitted.

    kind: `question`, `prompt` or `chat`; collection: or the schema. tokens: of the prompt, by the
    tier that their states came from, or `encoded`.
    """

    question: str
    sources: tuple[Source, ...]
    mode: str
    prompt_tokens: int
    cached_tokens: int
    bytes_moved: Mapping[str, int]
    marks: Marks
    created_tokens: int = 0
    kind: str = "question"
    collection: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)

    def answer(self, completion: RequestOutput) -> Answer:
        marks = self.marks
        kept = self.cached_tokens + completion.shared_tokens
        return Answer(
            question=self.question,
            text=completion.choices[0].text.strip(),
            sources=self.sources,
            mode=self.mode,
            finish_reason=completion.finish_reason,
            reuse=Reuse(
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                computed_tokens=self.prompt_tokens - kept,
                shared_tokens=completion.shared_tokens,
                bytes_moved=self.bytes_moved,
                created_tokens=self.created_tokens,
            ),
            timings=Timings(
                retrieve=marks.retrieved - marks.called,
                assemble=marks.assembled - marks.retrieved,
                first_token=completion.first_token_at - marks.called,
                total=completion.finished_at - marks.called,
                queued=completion.admitted_at - completion.submitted_at,
            ),
            choices=completion.choices,
        )
