"""Requests to the engine, the contexts that they attend to, and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from torch import Tensor

from ragcache.engine.constraint import MakeConstraint
from ragcache.engine.detokenizer import check_stop_strings
from ragcache.engine.sampler import SampledToken
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.models import CausalLM
from ragcache.states.quantization import StoredStates, model_dtype

MAX_CHOICES = 128


class AnswerText(Protocol):
    """The text of one answer as it grows, such as a `TextStream`."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None before."""

    def push(self, token_id: int) -> str:
        """Takes the next token. Returns the text that is now safe to show."""

    def finish(self) -> str:
        """Ends the text. Returns what was held back."""


MakeText = Callable[[Sequence[str]], AnswerText]
"""Makes the text of one answer, given the strings that end it."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """States placed at position `start` of a prompt, without a copy. On a GPU they are there when
    the request is submitted, or have an `arrival`. name: identifies the states for all time, or
    None. Requests over segments of equal names at equal places can share the private states after
    them. token_ids: the tokens of the states, which a repetition penalty counts; None where they
    are not known."""

    states: StoredStates
    start: int
    name: str | None = None
    token_ids: Sequence[int] | None = None

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

    @property
    def seen_token_ids(self) -> Iterator[int]:
        """The tokens of the prompt as far as they are known, those of the segments first."""
        known = (segment.token_ids or () for segment in self.segments)
        return chain(*known, self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A context to continue, and how.

    Args:
        context: Segments and own tokens; at least one of these.
        max_tokens: An answer of so many tokens ends with `length`.
        stop_ids: Tokens that end an answer and do not belong to it, unless `ignore_eos`.
        sampling: How tokens are chosen; by default the likeliest.
        n: How many answers are sampled; they share the prompt's states.
        stop: Strings that end an answer and do not belong to its text; need `text`.
        text: Makes the text of an answer; None where tokens are enough.
        min_tokens: No stop token is chosen before so many.
        ignore_eos: Stop tokens are ordinary; under a constraint they are never chosen.
        tenant: Requests of equal tenants may share private states; None shares with no other.
        priority: Each level counts as `AGING_SECONDS` seconds of waiting; higher comes sooner.
        timeout: Seconds from submission until the request fails with `DeadlineExceeded`.
        suppress_tokens: Tokens that are never chosen.
        prompt_logprobs: The log-probabilities of so many of the prompt's last own tokens are
            reported, computed with the prompt in one pass. Its private states are then its own.
        constraint: Makes the constraint of one answer. A finished constraint ends its answer with
            `stop`, also before `min_tokens`.

    Raises:
        InvalidRequest: An option is out of its range.
    """

    context: Context
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    text: MakeText | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    tenant: Hashable = None
    priority: int = 0
    timeout: float | None = None
    constraint: MakeConstraint | None = None
    suppress_tokens: frozenset[int] = frozenset()
    prompt_logprobs: int = 0

    def __post_init__(self) -> None:
        if not self.context.token_ids:
            raise InvalidRequest("the context has no token of its own for the answer to follow")
        if self.sampling.repetition_penalty != 1:
            _check_known_tokens(self.context)
        if self.stop and self.text is None:
            raise InvalidRequest("stop strings need `text`, which turns tokens into text")
        if not 0 <= self.prompt_logprobs < len(self.context.token_ids):
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs}; the prompt has "
                f"{len(self.context.token_ids)} own tokens, and the first follows none of them"
            )
        check_options(self.max_tokens, self.min_tokens, self.n, self.timeout, stop=self.stop)

    @property
    def root(self) -> Hashable:
        """The root of its private states in the radix cache: the tenant, and the segments with
        their places. None where the states are not shared."""
        names = tuple((segment.name, segment.start) for segment in self.context.segments)
        if self.tenant is None or self.prompt_logprobs or any(name is None for name, _ in names):
            return None
        return (self.tenant, names)


def _check_known_tokens(context: Context) -> None:
    """Raises `InvalidRequest` where a repetition penalty could not count all of the prompt."""
    for number, segment in enumerate(context.segments):
        known = -1 if segment.token_ids is None else len(segment.token_ids)
        if known != segment.states.length:
            found = "none" if known < 0 else str(known)
            raise InvalidRequest(
                "repetition_penalty counts all tokens of the prompt, but segment "
                f"{number} of {segment.states.length} tokens has {found} in `token_ids`; give "
                "the tokens that it was encoded from"
            )


def check_options(
    max_tokens: int, min_tokens: int, n: int, timeout: float | None, *, stop: Sequence[str]
) -> None:
    """Raises `InvalidRequest` for options of a `Request` that are out of their range."""
    check_stop_strings(stop)
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1")
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}; it must be from 0 to max_tokens, {max_tokens}"
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
    with log-probabilities, where `SamplingParams.logprobs` is set. first_logprobs: the model's own
    log-probabilities of all tokens at the first place, a stop token's too, float32 [V] on the CPU,
    where `SamplingParams.first_logprobs` is set. ending: the stop token, where one ended it and
    `logprobs` is set.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stopped_by: int | str | None = None
    chosen: tuple[SampledToken, ...] = ()
    first_logprobs: Tensor | None = field(default=None, compare=False, repr=False)
    ending: SampledToken | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished answers to a request.

    shared_tokens: private tokens of the prompt whose states were found in the radix cache. Times
    are `time.perf_counter` readings, in seconds; admitted_at is when the request left the queue.
    prompt_logprobs: see `Request`.
    """

    choices: tuple[Choice, ...]
    shared_tokens: int
    submitted_at: float
    admitted_at: float
    first_token_at: float
    finished_at: float
    prompt_logprobs: tuple[float, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Those of the first answer."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """That of the first answer."""
        return self.choices[0].finish_reason


def assemble_context(
    states: Sequence[StoredStates], token_ids: Sequence[int], *, window: int, max_tokens: int
) -> Context:
    """Places states one after another without gaps, then a prompt's own tokens. Raises
    `PromptTooLong` where prompt and answer, of at most `max_tokens`, exceed `window`
    positions."""
    position, segments = 0, []
    for each in states:
        segments.append(Segment(each, position))
        position += each.length
    check_window(position, len(token_ids), window=window, max_tokens=max_tokens)
    if not token_ids:
        raise ValueError("a prompt needs at least one token of its own")
    end = position + len(token_ids)
    return Context(tuple(segments), tuple(token_ids), tuple(range(position, end)), end)


def check_tokens(
    token_ids: Sequence[int], position_ids: Sequence[int], *, vocabulary: int, window: int
) -> None:
    """Raises `InvalidRequest` or `PromptTooLong` for tokens that a model cannot compute at these
    positions: they would break the step of all requests, or change the frequencies of all (LongRoPE
    beyond its first window). vocabulary: how many tokens the model has."""
    if len(token_ids) != len(position_ids):
        raise InvalidRequest(
            f"there are {len(token_ids)} tokens at {len(position_ids)} positions; give each token "
            "one position"
        )
    if not token_ids:
        return
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocabulary:
            raise InvalidRequest(
                f"token {token} is none of the model's, which are 0 to {vocabulary - 1}; check "
                "that the tokenizer belongs to the model"
            )
    first, last = min(position_ids), max(position_ids)
    if first < 0:
        raise InvalidRequest(f"a token is at position {first}; positions begin with 0")
    if last >= window:
        raise PromptTooLong(
            f"a token is at position {last}, but the model's window holds {window} positions"
        )


def check_states(states: StoredStates, model: CausalLM, *, by_address: bool) -> None:
    """Raises `InvalidRequest` for states that are not the model's. by_address: a GPU reads them by
    their address, as numbers of the model's dtype or int8."""
    keys = states.keys
    layers, heads, _, dim = keys.shape
    found = (layers, heads, dim, keys.device)
    sizes = (model.num_layers, model.num_kv_heads, model.head_dim)
    known = model_dtype(states) in (model.states_dtype, model.dtype)
    if found != (*sizes, model.device) or not known:
        raise InvalidRequest(
            f"states [{layers}, {heads}, S, {dim}] of {model_dtype(states)} on {keys.device} "
            "are not those of this model, which are [{}, {}, S, {}] of ".format(*sizes)
            + f"{model.states_dtype} on {model.device}"
        )
    packed = keys.stride() == states.values.stride() and keys.stride()[2:] == (dim, 1)
    if by_address and not packed:
        raise InvalidRequest(
            "a GPU reads the tokens of a head one after another; make these states contiguous"
        )


def check_place(segment: Segment, window: int) -> None:
    """Raises `PromptTooLong` for a segment outside of the model's window, where a GPU has no
    angles."""
    if segment.start < 0 or segment.end > window or abs(segment.delta) >= window:
        raise PromptTooLong(
            f"states that were encoded at position {segment.states.start} are placed at "
            f"{segment.start} to {segment.end}, outside of the model's window of {window}"
        )


def check_window(document_tokens: int, own_tokens: int, *, window: int, max_tokens: int) -> None:
    """Raises `PromptTooLong` where prompt and answer would not fit the model's window."""
    if document_tokens + own_tokens + max_tokens > window:
        raise PromptTooLong(
            f"the prompt needs {document_tokens + own_tokens} tokens ({document_tokens} of "
            f"documents, {own_tokens} of question and template) and the answer up to "
            f"{max_tokens}, but the model's window holds {window}; ask with a smaller k or a "
            "shorter question"
        )
