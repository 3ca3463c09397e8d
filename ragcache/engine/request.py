"""Requests to the engine, the contexts that they attend to, and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from torch import Tensor

from ragcache.attention import read_values
from ragcache.engine.constraint import MakeConstraint
from ragcache.engine.kv_cache import PlacedRoot
from ragcache.engine.sampler import SampledToken
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import InvalidRequest, PromptTooLong, UnsupportedModel
from ragcache.models import CausalLM
from ragcache.modes import Compose
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates, model_dtype

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000


class AnswerText(Protocol):
    """The text of one answer as it grows, for example a `TextStream`."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if any."""

    def push(self, token_id: int) -> str:
        """Add the next token. Returns the text that is now safe to show."""

    def finish(self) -> str:
        """End the text. Returns the rest that was held back."""


MakeText = Callable[[Sequence[str]], AnswerText]
"""Creates the text of one answer, given its stop strings."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """States placed at position `start` of a prompt, without a copy.

    On a GPU the states are there when the request is submitted, or have an `arrival`.
    """

    states: StoredStates
    start: int
    name: str | None = None
    """Identifies the states for all time. Requests over segments with equal names at equal places
    can share private states. None shares nothing."""
    token_ids: Sequence[int] | None = None
    """Tokens of the states, if known. A repetition penalty counts them."""

    @property
    def delta(self) -> int:
        """Distance from the position where the states were encoded, in positions."""
        return self.start - self.states.start

    @property
    def end(self) -> int:
        """Position after the segment."""
        return self.start + self.states.length


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The input of a request: segments, and its own tokens in the order of their positions.

    A token attends to the segments that start before it, and to the own tokens before it. The
    answer continues at `next_position`.
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    next_position: int
    compose: Compose = "order"
    """How documents compose in recurrent layers."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens whose states are read instead of computed."""
        return sum([segment.states.length for segment in self.segments])

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt, read and computed."""
        return self.cached_tokens + len(self.token_ids)

    @property
    def seen_token_ids(self) -> Iterator[int]:
        """Known tokens of the prompt: first of the segments, then its own."""
        known = (segment.token_ids or () for segment in self.segments)
        return chain(*known, self.token_ids)


class ComputedTokens(NamedTuple):
    """Tokens of a finished answer and its prompt whose states the engine has computed."""

    token_ids: Sequence[int]
    """The prompt's own tokens, then the answer's."""
    position_ids: Sequence[int]
    """Position of each token."""
    read: Callable[[int, int], KVStates]
    """Copies the states of tokens begin:end: `read(begin, end)`. Works during the call only."""


KeepStates = Callable[[ComputedTokens], None]
"""Takes the states of a finished answer, in the engine's thread."""


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """Ends an answer whose last tokens are one pattern, several times in a row."""

    limit: int
    """Number of times, at least 2."""
    period: int
    """Length of the longest pattern, in tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A context to continue, and how. Raises `InvalidRequest` for an option outside of its
    range."""

    context: Context
    """Segments and own tokens; at least one own token."""
    max_tokens: int
    """Maximum length of an answer."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer. They do not belong to it."""
    sampling: SamplingParams = SamplingParams()
    """How tokens are chosen. Greedy by default."""
    n: int = 1
    """Number of answers. They share the states of the prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer. They do not belong to its text. Requires `text`."""
    text: MakeText | None = None
    """Creates the text of an answer. Without it, answers have tokens only."""
    min_tokens: int = 0
    """Length before which no stop token is chosen."""
    ignore_eos: bool = False
    """Treat stop tokens as ordinary tokens. Under a constraint they are never chosen."""
    tenant: Hashable = None
    """Requests of equal tenants may share private states. None shares with no other request."""
    priority: int = 0
    """Each level counts as `AGING_SECONDS` of waiting."""
    timeout: float | None = None
    """Seconds from submission until the request fails with `DeadlineExceeded`."""
    constraint: MakeConstraint | None = None
    """Creates the constraint of one answer. A finished constraint ends its answer with `stop`, also
    before `min_tokens`."""
    suppress_tokens: frozenset[int] = frozenset()
    """Tokens that are never chosen."""
    repetition: RepetitionRule | None = None
    """Rule by which an answer that repeats itself ends with `repetition`, from `min_tokens` on."""
    prompt_logprobs: int = 0
    """Number of the prompt's last own tokens whose log-probabilities are reported, computed with
    the prompt in one pass, with `sampling.logprobs` alternatives each. The first own token has
    none. Private states are then not shared."""
    keep: KeepStates | None = None
    """Called at the end of each answer with the states that were computed for it. Not called for a
    request that fails or is cancelled."""

    def __post_init__(self) -> None:
        if not self.context.token_ids:
            raise InvalidRequest("the context has no token of its own for the answer to follow")
        if self.sampling.repetition_penalty != 1:
            _check_known_tokens(self.context)
        if self.stop and self.text is None:
            raise InvalidRequest("stop strings need `text`, which turns tokens into text")
        if not 0 <= self.prompt_logprobs <= len(self.context.token_ids):
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs}; the prompt has "
                f"{len(self.context.token_ids)} own tokens"
            )
        check_options(self.max_tokens, self.min_tokens, self.n, self.timeout, stop=self.stop)

    @property
    def root(self) -> PlacedRoot | None:
        """Root of the request's private states in the radix cache: its tenant and placed segments,
        unless the states are not shared."""
        segments = self.context.segments
        placed = [(each.start, each.name) for each in segments if each.name is not None]
        if self.tenant is None or self.prompt_logprobs or len(placed) < len(segments):
            return None
        return PlacedRoot((self.tenant, self.context.compose), tuple(sorted(placed)))


def _check_known_tokens(context: Context) -> None:
    """Raise `InvalidRequest` if a repetition penalty cannot count every prompt token."""
    for number, segment in enumerate(context.segments):
        known = -1 if segment.token_ids is None else len(segment.token_ids)
        if known != segment.states.length:
            found = "none" if known < 0 else str(known)
            raise InvalidRequest(
                "repetition_penalty counts all tokens of the prompt, but segment "
                f"{number} of {segment.states.length} tokens has {found} in `token_ids`; give "
                "the tokens that it was encoded from"
            )


def check_stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Raise `InvalidRequest` unless `stop` is at most 16 strings of 1 to 1,000 characters."""
    if isinstance(stop, str) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequest(f"stop is {stop!r:.80}; it must be a list of strings")
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stop)} strings; at most {MAX_STOPS} are allowed")
    for each in stop:
        if not 1 <= len(each) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop holds a string of {len(each)} characters; 1 to {MAX_STOP_LENGTH} are allowed"
            )
    return tuple(dict.fromkeys(stop))


def check_options(
    max_tokens: int, min_tokens: int, n: int, timeout: float | None, *, stop: Sequence[str]
) -> None:
    """Raise `InvalidRequest` if an option of a `Request` is out of its range."""
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


@dataclass(slots=True)  # not frozen: every sequence has a new one in every step
class TokenDelta:
    """A new token of an answer, and the text that is now safe to show."""

    choice: int
    """Index of the answer."""
    chosen: SampledToken | None
    """The token, unless the delta only has text that was held back."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    token_ids: tuple[int, ...]
    """Tokens without the stop token. Includes the tokens that spelled a stop string."""
    text: str
    """Text before the stop string. Empty if the request has no `text`."""
    finish_reason: str
    """`stop`, `length` or `repetition`."""
    stopped_by: int | str | None = None
    """The token id or string that ended the answer, unless a limit or a constraint did."""
    chosen: tuple[SampledToken, ...] = ()
    """Tokens with log-probabilities, if `SamplingParams.logprobs` is set."""
    first_logprobs: Tensor | None = field(default=None, compare=False, repr=False)
    """The model's log-probabilities of all tokens at the first place, float32 [V] on the CPU, if
    `SamplingParams.first_logprobs` is set."""
    ending: SampledToken | None = None
    """The stop token with its log-probability, if `SamplingParams.logprobs` is set."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished answers to a request. Times are `time.perf_counter` readings, in seconds."""

    choices: tuple[Choice, ...]
    shared_tokens: int
    """Own tokens of the prompt whose states were found in the radix cache."""
    submitted_at: float
    admitted_at: float
    """Time at which the request left the queue."""
    first_token_at: float
    finished_at: float
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """See `Request.prompt_logprobs`."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason


def assemble_context(
    states: Sequence[StoredStates], token_ids: Sequence[int], *, window: int, max_tokens: int
) -> Context:
    """Place states one after another without gaps, followed by the prompt's own tokens.

    Raises:
        PromptTooLong: Prompt and answer, of up to `max_tokens`, exceed `window` positions.
    """
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
    """Check that a model with this vocabulary and window can compute tokens at some positions.

    Invalid ones would break the step of all requests, or change the frequencies of all (LongRoPE
    beyond its first window). Raises `InvalidRequest` or `PromptTooLong`.
    """
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


def check_composes(model: CausalLM) -> None:
    """Raise `UnsupportedModel` if a model cannot read states of modules."""
    if not model.composes:
        raise UnsupportedModel(
            "this model has recurrent layers that are not known to be affine in their states: "
            "states of single documents are neither encoded nor read; ask in mode exact"
        )


def check_states(states: StoredStates, model: CausalLM, *, by_address: bool) -> None:
    """Raise `InvalidRequest` unless states have the model's shape, dtype and device. `by_address`:
    kernels of a GPU read them in place, so the tokens of a head must be contiguous."""
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
    if (states.recurrent is None) == bool(model.recurrent_bytes):
        kept = "none are kept" if states.recurrent is None else "the model has none"
        raise InvalidRequest(f"states of recurrent layers do not fit this model: {kept}")
    values = read_values(keys, states.values)
    packed = keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1)
    if by_address and not packed:
        raise InvalidRequest(
            "a GPU reads the tokens of a head one after another; make these states contiguous"
        )


def check_place(segment: Segment, window: int) -> None:
    """Raise `PromptTooLong` if a segment or its distance exceeds the model's window."""
    start, states = segment.start, segment.states
    if start < 0 or start + states.length > window or abs(start - states.start) >= window:
        raise PromptTooLong(
            f"states that were encoded at position {segment.states.start} are placed at "
            f"{segment.start} to {segment.end}, outside of the model's window of {window}"
        )


def check_window(document_tokens: int, own_tokens: int, *, window: int, max_tokens: int) -> None:
    """Raise `PromptTooLong` if a prompt and `max_tokens` of an answer exceed the model's window."""
    if document_tokens + own_tokens + max_tokens > window:
        raise PromptTooLong(
            f"{context_length(window)}, the prompt needs {document_tokens + own_tokens} tokens "
            f"({document_tokens} of documents, {own_tokens} of question and template) and the "
            f"answer {max_tokens}; ask with a smaller k or a shorter question"
        )


def context_length(tokens: int, limit: str = "") -> str:
    """Begin an error in OpenAI's words, by which clients know that a shorter prompt would do.

    Args:
        tokens: The most tokens of a prompt with its answer.
        limit: Name of the limit, if it is not the model's window.
    """
    return f"This model's maximum context length is {tokens} tokens{limit}. However"
