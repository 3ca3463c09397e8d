"""Options of one request: how its answer is generated, and how modules are found for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, Field, GetPydanticSchema, model_validator
from pydantic_core import core_schema

from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.params.base import Params

SearchKind = Literal["hybrid", "sparse", "dense"]

MOST_FUSED = 2 / 61
"""Highest score of reciprocal rank fusion over two rankings."""
REFUSAL = "The documents do not answer this question."
"""The default text of a refused answer."""


class AnswerGrammar(Protocol):
    """A grammar as a value, such as `ragcache.structured.Grammar`."""

    @property
    def kind(self) -> str:
        """The language that the text is written in."""

    @property
    def text(self) -> str:
        """The grammar."""


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _choices(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    if texts is not None and not (texts and all(texts)):
        raise ValueError("it must be a list of texts, none of them empty")
    return None if texts is None else tuple(texts)


_DURATIONS: Mapping[object, float | None] = {
    "in_memory": None,
    "in-memory": None,
    "5m": 300.0,
    "1h": 3600.0,
    "24h": 86_400.0,
}


def _seconds(given: float | str | None) -> float | None:
    if given is None or given in _DURATIONS:
        return _DURATIONS.get(given)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 30 * 86_400:
        known = ", ".join(str(name) for name in _DURATIONS)
        raise ValueError(f"it must be seconds, at most 30 days, or one of {known}")
    return seconds


Unchecked = GetPydanticSchema(lambda *_: core_schema.any_schema())
StopStrings = Annotated[str | Sequence[str], AfterValidator(_stop_strings)]


class GenerationParams(Params):
    """Options of generation. The default is one greedy answer.

    Sampling follows the order of Hugging Face's `generate`: penalties, temperature, `top_k`,
    `top_p` over the renormalized probabilities, `min_p`.

    Raises:
        InvalidRequest: An option is unknown or out of its range, or two contradict each other.

    Example:
        >>> GenerationParams(temperature=0.7, n=3, stop="\\n")
        GenerationParams(temperature=0.7, stop=('\\n',), n=3)
    """

    max_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    """Most tokens of an answer, or fewer if the prompt leaves less room. Defaults to
    `OpenConfig.max_tokens`."""
    max_new_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    """Name of `max_tokens` in transformers. It becomes `max_tokens`."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Fewest tokens of an answer. Earlier stop tokens are not chosen."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Divisor of the logits. Higher values vary answers more. 0 takes the likeliest token."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Draw from the k likeliest tokens only. 0 draws from all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of likeliest tokens with at least this total probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw only tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Make tokens of the prompt and the answer so far less likely. 1 changes nothing."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtract this from a token's logit each time that the token is generated."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtract this once from the logit of every token that has been generated."""
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    """Seed of the random numbers. Defaults to a new seed for every answer."""
    stop: StopStrings = ()
    """Strings that end an answer and are cut off from it: at most 16."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of answers (choices) to one prompt."""
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Report the log-probability of each token and of this many alternatives."""
    prompt_logprobs: bool = False
    """Report the log-probability of each token of the prompt, with as many alternatives as
    `logprobs` (`Answer.prompt_logprobs`). The whole prompt is then computed: it reads no states."""
    first_logprobs: bool = False
    """Report the log-probabilities of the whole vocabulary for the first token
    (`Choice.first_logprobs`)."""
    ignore_eos: bool = False
    """Continue after a token that ends an answer."""
    repetition_limit: Annotated[int | None, Field(ge=0, le=10_000)] = None
    """End an answer whose last tokens are one pattern this many times in a row, with the finish
    reason `repetition`. 0 ends none. Defaults to 8 for the embedded reader and to 0 for other
    models."""
    repetition_period: Annotated[int, Field(ge=1, le=256)] = 32
    """Longest pattern, in tokens, that `repetition_limit` counts."""
    json_schema: Mapping[str, Any] | str | None = None
    """Answer with JSON that is valid under this JSON schema."""
    json_object: bool = False
    """Answer with any JSON object."""
    regex: str | None = None
    """Answer with a text that this regular expression matches as a whole."""
    choice: Annotated[Sequence[str] | None, AfterValidator(_choices)] = None
    """Answer with one of these texts."""
    ebnf: str | None = None
    """Answer with a text of the rule `root` of this GBNF grammar."""
    grammar: Annotated[AnswerGrammar | None, Unchecked] = None
    """Answer with a text of this grammar (`ragcache.structured.Grammar`)."""
    extractive: bool | None = None
    """Answer with a quotation from the documents. Defaults to True for the embedded reader and to
    False for other models."""
    citations: bool = False
    """Mark each sentence of a free answer with its sources, as `[1]`. `Answer.spans` has the
    place of each mark in the documents. A sentence that no document says has no mark."""
    confidence: bool | None = None
    """Estimate the probability that the answer is right. On by default for calibrated answers."""
    min_confidence: Annotated[float | None, Field(ge=0, le=1)] = None
    """Refuse answers below this confidence. Defaults to the limit of the calibration. 0 refuses no
    answer."""
    refusal: Annotated[str, Field(min_length=1, max_length=2000)] = REFUSAL
    """Text of a refused answer."""
    timeout: Annotated[float | None, Field(gt=0)] = None
    """Most seconds from the call to the end of the answer. Unlimited by default."""
    priority: int = 0
    """Priority in the queue. Each level counts as 10 seconds of waiting."""
    share: bool = True
    """Share the states of the question's own tokens with other requests of the namespace."""
    store: bool = True
    """Keep the states of a chat for its next turn, as `OpenConfig.conversation_storage` says."""
    prompt_cache_key: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """Name of the conversation, under which it can be deleted and a gateway finds its states. It
    changes no answer."""
    prompt_cache_retention: Annotated[float | str | None, AfterValidator(_seconds)] = None
    """Time for which a chat that pauses should find its states again: seconds, `5m`, `1h` or `24h`,
    or `in_memory` for no wish. They are evicted after all others, as far as the caller's budget
    allows, and a conversation ends no sooner."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""

    @model_validator(mode="before")
    @classmethod
    def _rename_max_new_tokens(cls, options: Any) -> Any:
        given = options if isinstance(options, Mapping) else {}
        if (most := given.get("max_new_tokens")) is None:
            return options
        if given.get("max_tokens") not in (None, most):
            raise ValueError(
                f"max_tokens is {given['max_tokens']} and max_new_tokens is {most}; they mean the "
                "same, so give one of them"
            )
        rest = {name: value for name, value in given.items() if name != "max_new_tokens"}
        return rest | {"max_tokens": most}

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        forms = self.forms
        if len(forms) > 1:
            raise ValueError(f"an answer keeps to one grammar; {' and '.join(forms)} were given")
        if self.citations and (forms or self.extractive):
            raise ValueError(
                "citations are marks in a free answer; leave out either citations or "
                f"{forms[0] if forms else 'extractive'}"
            )
        if self.min_confidence and self.confidence is False:
            raise ValueError(
                f"min_confidence is {self.min_confidence}, which takes the confidence that "
                "confidence=False leaves out; leave out either"
            )
        if self.min_confidence and forms:
            raise ValueError(
                "a refused answer keeps to no grammar; leave out either min_confidence or "
                f"{forms[0]}"
            )
        if self.repetition_limit == 1:
            raise ValueError("repetition_limit is 1; a pattern repeats at least 2 times")
        if not self.refusal.strip():
            raise ValueError("the refusal is blank; give the text of answers that are refused")
        return self

    @property
    def forms(self) -> tuple[str, ...]:
        """Names of the options that were given and constrain the form of the answer."""
        names = ("json_schema", "regex", "choice", "ebnf", "grammar")
        given = tuple(name for name in names if getattr(self, name) is not None)
        return (*given, "json_object") if self.json_object else given

    @property
    def retention_seconds(self) -> float | None:
        """Seconds of `prompt_cache_retention`."""
        given = self.prompt_cache_retention
        return None if given is None else float(given)

    def token_limit(self, default: int) -> int:
        """Return the most tokens of an answer: `max_tokens`, or the default of the folder."""
        return default if self.max_tokens is None else self.max_tokens


class SearchParams(Params):
    """Options of the search for the modules that a question is answered from.

    Raises:
        InvalidRequest: An option is unknown or out of its range.

    Example:
        >>> SearchParams(k=2, search="sparse")
        SearchParams(k=2, search='sparse')
    """

    k: Annotated[int, Field(ge=1, le=10_000)] = DEFAULT_K
    """Most modules to retrieve."""
    search: SearchKind = "hybrid"
    """`sparse` searches by words (BM25), `dense` by meaning (cosine), `hybrid` by both, fused by
    rank."""
    filters: Mapping[str, Any] | None = None
    """Conditions on the documents' metadata, such as `{"year": {"$gte": 2020}}`."""
    threshold: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """Lowest score of a module, on the scale of `search`. Scores of a hybrid search are at most
    2/61."""
    relative_threshold: Annotated[float, Field(ge=0, le=1)] = DEFAULT_RELATIVE_THRESHOLD
    """Share of the best BM25 score or cosine that a module must have. 0 keeps all modules."""
    rerank: Annotated[int, Field(ge=0, le=1000)] = 20
    """Number of candidates that the reranker orders, if the folder has one. 0 skips it."""
    mmr: Annotated[float | None, Field(ge=0, le=1)] = None
    """Weight of diversity in the selection (maximal marginal relevance). Off by default."""
    candidates: Annotated[int, Field(ge=1, le=100_000)] = 50
    """Number of modules that each ranking contributes to a hybrid search."""

    @property
    def depth(self) -> int:
        """Length of each ranking: `k` or `candidates`, whichever is larger."""
        return max(self.k, self.candidates)

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.search == "hybrid" and (self.threshold or 0) > MOST_FUSED:
            raise ValueError(
                f"threshold is {self.threshold}; a hybrid search fuses ranks, and its scores are "
                f"at most {MOST_FUSED:.4f}. Give relative_threshold, a share of the best BM25 "
                "score or cosine, or retrieve with search 'sparse' or 'dense'"
            )
        return self
