"""What an answer tells: its text, where it comes from, what was reused, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ragcache.config import Mode


@dataclass(frozen=True, slots=True)
class Source:
    """A module that stood in the prompt. tier: where its states came from: `host`, `disk`,
    `encoded` (computed for this request and kept) or `computed` (mode `exact`)."""

    document: str
    module: str
    uri: str
    score: float
    tier: str


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of the prompt, counted: cached + computed = prompt. bytes_moved: by tier, the bytes
    that were read from below the host tier."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    bytes_moved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, measured. first_token and total run from the call, retrieval and copies included;
    requests of one batch share retrieve and assemble."""

    retrieve: float
    assemble: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class Answer:
    """finish_reason: `stop`, `length`, or `no_documents` where retrieval found nothing."""

    question: str
    text: str
    sources: tuple[Source, ...]
    mode: Mode
    finish_reason: str
    reuse: Reuse
    timings: Timings

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
