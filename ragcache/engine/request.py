"""Requests to the engine, the contexts that they attend to, and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ragcache.engine.constraint import MakeConstraint
from ragcache.engine.detokenizer import TextStream, check_stop_strings
from ragcache.engine.sampler import SampledToken
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.states.quantization import StoredStates

MAX_CHOICES = 128

MakeText = Callable[[Sequence[str]], TextStream]
"""Makes the text of one answer, given the strings that end it."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """States placed at position `start` of a prompt, without a copy. On a GPU they are there when
    the request is submitted, or have an `arrival`. name: identifies the states for all time, or
    None. Requests over segments of equal names at equal places can share the private states after
    them."""

    states: StoredStates
    start: int
    name: str | None = None

    @property
    def delta(self) -> int:
        """How far the segment was moved from where it was encoded, in positions."""
        return self.start - self.states.start

    @property
    def end(self) -> int:
        """The first position after the segment."""
        return self.start + self.states.length


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What a request attends to: segments, and its own tokens in the order of their positions.

    A token sees the segments that start before it, and the own tokens before it. The answer
    continues at `next_position`.
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    next_position: int

    @property
    def cached_tokens(self) -> int:
        """Tokens whose states are read, not computed."""
        return sum(segment.states.length for segment in self.segments)

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A context to continue, and how.

    Args:
        context: Segments and own tokens; at least one of these.
        max_new_tokens: An answer of so many tokens ends with `length`.
        stop_ids: Tokens that end an answer and do not belong to it, unless `ignore_eos`.
        sampling: How tokens are chosen; by default the likeliest.
        n: How many answers are sampled; they share the prompt's states.
        stop: Strings that end an answer and do not belong to its text; need `text`.
        text: Makes the text of an answer; None where tokens are enough.
        min_new_tokens: No stop token is chosen before so many.
        ignore_eos: Stop tokens are ordinary; under a constraint they are never chosen.
        tenant: Requests of equal tenants may share private states; None shares with no other.
        priority: Each level counts as `AGEING` seconds of waiting; higher comes sooner.
        timeout: Seconds from submission until the request fails with `DeadlineExceeded`.
        constraint: Makes the constraint of one answer. A finished constraint ends its answer with
            `stop`, also before `min_new_tokens`.

    Raises:
        InvalidRequest: An option is out of its range.
    """

    context: Context
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    text: MakeText | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    tenant: Hashable = None
    priority: int = 0
    timeout: float | None = None
    constraint: MakeConstraint | None = None

    def __post_init__(self) -> None:
        if not self.context.token_ids:
            raise InvalidRequest("the context has no token of its own for the answer to follow")
        if self.stop and self.text is None:
            raise InvalidRequest("stop strings need `text`, which turns tokens into text")
        check_options(
            self.max_new_tokens, self.min_new_tokens, self.n, self.timeout, stop=self.stop
        )

    @property
    def root(self) -> Hashable:
        """The root of its private states in the radix cache: the tenant, and the segments with
        their places. None where the states cannot be shared."""
        names = tuple((segment.name, segment.start) for segment in self.context.segments)
        if self.tenant is None or any(name is None for name, _ in names):
            return None
        return (self.tenant, names)


def check_options(
    max_new_tokens: int, min_new_tokens: int, n: int, timeout: float | None, *, stop: Sequence[str]
) -> None:
    """Raises `InvalidRequest` for options of a `Request` that are out of their range."""
    check_stop_strings(stop)
    if max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {min_new_tokens}; it must be from 0 to max_new_tokens, "
            f"{max_new_tokens}"
        )
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n}; it must be from 1 to {MAX_CHOICES}")
    if timeout is not None and not timeout > 0:
        raise InvalidRequest(f"timeout is {timeout}; it must be a positive time in s")


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """A new token of an answer, and the text that is now safe to show. choice: index of the answer,
    below `n`. chosen: None where the last delta has only text that was held back."""

    choice: int
    chosen: SampledToken | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    token_ids: without the stop token; where a string stopped it, with the tokens that spelled it.
    text: "" where the request has no `text`. finish_reason: `stop` or `length`. stopped_by: the
    token id or string that ended it; None where a limit or its constraint did. chosen: the tokens
    with log-probabilities, where `SamplingParams.logprobs` is set.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stopped_by: int | str | None = None
    chosen: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished answers to a request.

    shared_tokens: private tokens of the prompt whose states were found in the radix cache. Times
    are `time.perf_counter` readings, in seconds; admitted_at is when the request left the queue.
    """

    choices: tuple[Choice, ...]
    shared_tokens: int
    submitted_at: float
    admitted_at: float
    first_token_at: float
    finished_at: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Those of the first answer."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """That of the first answer."""
        return self.choices[0].finish_reason


def assemble_context(
    states: Sequence[StoredStates], token_ids: Sequence[int], *, window: int, max_new_tokens: int,
    names: Sequence[str | None] | None = None,
) -> Context:  # fmt: skip
    """Places states one after another without gaps, then a prompt's own tokens. names: of the
    segments, where they have any. Raises `PromptTooLong` where prompt and answer, of at most
    `max_new_tokens`, exceed `window` positions."""
    position, segments = 0, []
    for each, name in zip(states, names or [None] * len(states), strict=True):
        segments.append(Segment(each, position, name))
        position += each.length
    check_window(position, len(token_ids), window=window, max_new_tokens=max_new_tokens)
    if not token_ids:
        raise ValueError("a prompt needs at least one token of its own")
    end = position + len(token_ids)
    return Context(tuple(segments), tuple(token_ids), tuple(range(position, end)), end)


def check_window(
    document_tokens: int, own_tokens: int, *, window: int, max_new_tokens: int
) -> None:
    """Raises `PromptTooLong` where prompt and answer would not fit the model's window."""
    if document_tokens + own_tokens + max_new_tokens > window:
        raise PromptTooLong(
            f"the prompt needs {document_tokens + own_tokens} tokens ({document_tokens} of "
            f"documents, {own_tokens} of question and template) and the answer up to "
            f"{max_new_tokens}, but the model's window holds {window}; ask with a smaller k or a "
            "shorter question"
        )
