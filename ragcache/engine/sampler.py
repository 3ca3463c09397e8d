"""Sampling the next token of each sequence of a batch.

Penalties, forbidden tokens and constraints change a row's logits; then a token is drawn in exact
arithmetic. Probabilities become whole numbers of shares. A sum of integers does not depend on the
order of its terms, so neither the rows beside a row nor the device can change what is drawn, and
tokens are kept or dropped by their shares alone.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from ragcache.engine.constraint import forbid
from ragcache.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from ragcache.errors import UnusableLogits

# Rows that need copies of their logits are taken this many at a time: on a CPU for its cache, on a
# GPU to bound the memory.
CPU_ROWS, GPU_ROWS = 8, 64


@dataclass(slots=True, eq=False)
class SamplerState:
    """One sequence's sampling parameters and its place in its stream of random numbers.

    The n-th number is a hash of (seed, index, n), so a sequence draws the same whatever runs beside
    it and whenever it is interrupted.

    drawn: tokens sampled so far. counts: None unless a penalty needs them. first_logprobs: the
    log-probabilities of all tokens at the first place, float32 [V] on the CPU, once it is known,
    where `SamplingParams.first_logprobs` is set.
    """

    sampling: SamplingParams
    seed: int
    index: int = 0
    drawn: int = 0
    counts: TokenCounts | None = None
    first_logprobs: Tensor | None = None

    @classmethod
    def start(
        cls, sampling: SamplingParams, prompt_tokens: Iterable[int], index: int = 0
    ) -> SamplerState:
        """The state of the index-th of a request's n sequences; each has a stream of its own."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        repeats = sampling.repetition_penalty != 1
        counts = TokenCounts(prompt_tokens if repeats else ()) if sampling.penalized else None
        return cls(sampling, seed, index, counts=counts)

    def uniform(self) -> float:
        """The number for the next token, a multiple of 2**-48 in [0, 1)."""
        place = struct.pack(">qQQ", self.seed, self.index, self.drawn)
        return int.from_bytes(blake2b(place, digest_size=6).digest(), "big") / 2**48

    @property
    def lacks_first_logprobs(self) -> bool:
        return self.sampling.first_logprobs and self.first_logprobs is None

    def record(self, token: int) -> None:
        self.drawn += 1
        if self.counts is not None:
            self.counts.add(token)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, with log-probabilities where `SamplingParams.logprobs` says so.

    They are natural logarithms of the model's own distribution: the softmax of the logits before
    penalties, temperature and filters, as OpenAI and vLLM report them. alternatives: the likeliest
    tokens with theirs, likeliest first, whether or not the chosen one is among them. allowed: the
    log-probability of all tokens that the constraint allowed; 0 without one. Among these the chosen
    one has `logprob - allowed`.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    allowed: float = 0.0


class PendingTokens(Protocol):
    """The tokens of a step, which may still be computed.

    inputs: int64 [R], the tokens on the logits' device, for the step that comes after; some valid
    token where none could be sampled.
    """

    @property
    def inputs(self) -> Tensor: ...

    def wait(self) -> list[SampledToken | UnusableLogits]:
        """Waits until the step has been computed; see `sample_tokens`. Called once."""


class Mark(Protocol):
    """A place in the work of a device, at which its time is taken."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to there, once both have been computed."""


class TokenSampler(Protocol):
    """Samples the tokens of step after step."""

    def mark(self) -> Mark | None:
        """A mark behind what was launched. None where the host's clock shows what steps take."""

    def launch(
        self, logits: Tensor, states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> PendingTokens:  # fmt: skip
        """Begins `sample_tokens`, and does not wait. The states of the rows are current until it
        has been waited for. What follows from `states` may be kept while the same list comes.
        forbidden, masks: None where no row has any. No rows: waiting waits for the step."""


@dataclass(frozen=True, slots=True, eq=False)
class _SampledTokens:
    """Tokens that were sampled at once."""

    results: list[SampledToken | UnusableLogits]

    @property
    def inputs(self) -> Tensor:
        return torch.tensor([getattr(each, "token", 0) for each in self.results])

    def wait(self) -> list[SampledToken | UnusableLogits]:
        return self.results


class HostSampler:
    """Samples at once."""

    def mark(self) -> None:
        """Nothing runs on."""

    def launch(
        self, logits: Tensor, states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> PendingTokens:  # fmt: skip
        bans = [()] * len(states) if forbidden is None else forbidden
        return _SampledTokens(sample_tokens(logits, states, bans, masks) if states else [])


@torch.inference_mode()
def sample_tokens(
    logits: Tensor,
    states: Sequence[SamplerState],
    forbidden: Sequence[Collection[int]],
    masks: Sequence[Tensor | None] | None = None,
) -> list[SampledToken | UnusableLogits]:
    """Samples the next token of every row and records it in the row's state.

    logits: [R, V] of any floating type, left as they are; the arithmetic is float32.
    forbidden: for each row the token ids that may not be chosen now. masks: for each row those that
    its constraint allows (see `Constraint.mask`); None: no row has one.

    A row whose largest allowed logit is not finite, or which holds NaN, gives an UnusableLogits
    that was not raised, and its state stays as it was; the other rows are not affected.
    """
    masks = masks or [None] * len(states)
    tokens = _tokens(logits, states, forbidden, masks)
    reporting = [
        i for i, s in enumerate(states) if s.sampling.logprobs is not None and tokens[i] >= 0
    ]
    reported: dict[int, SampledToken] = {}
    for rows in _portions(reporting, logits):
        counts = [states[i].sampling.logprobs or 0 for i in rows]
        chosen = _with_logprobs(
            logits[rows], [tokens[i] for i in rows], counts, [masks[i] for i in rows]
        )
        reported.update(zip(rows, chosen, strict=True))
    results: list[SampledToken | UnusableLogits] = []
    for row, (token, state) in enumerate(zip(tokens, states, strict=True)):
        if token < 0:
            results.append(unusable(state))
            continue
        if state.lacks_first_logprobs:
            state.first_logprobs = logits[row].float().log_softmax(dim=-1).cpu()
        state.record(token)
        results.append(reported.get(row) or SampledToken(token))
    return results


def unusable(state: SamplerState) -> UnusableLogits:
    """Why a row of the sequence has no token."""
    return UnusableLogits(
        f"after {state.drawn} tokens every next one is forbidden, or the model's logits are not "
        "finite; check the stop tokens, the model's weights and its dtype"
    )


def _tokens(
    logits: Tensor,
    states: Sequence[SamplerState],
    forbidden: Sequence[Collection[int]],
    masks: Sequence[Tensor | None],
) -> list[int]:
    """The token of each row; -1 where none can be chosen."""
    plain: list[int] = []
    others: list[int] = []
    for row, (state, banned, mask) in enumerate(zip(states, forbidden, masks, strict=True)):
        free = not banned and mask is None
        simple = free and state.sampling.greedy and state.counts is None
        (plain if simple else others).append(row)
    if not others:
        return likeliest_tokens(logits).tolist()
    tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    if plain:
        tokens[plain] = likeliest_tokens(logits[plain])
    for rows in _portions(others, logits):
        tokens[rows] = _adjusted(
            logits[rows].float(),
            [states[i] for i in rows],
            [forbidden[i] for i in rows],
            [masks[i] for i in rows],
        )
    return tokens.tolist()


def _portions(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    size = GPU_ROWS if logits.is_cuda else CPU_ROWS
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The first of each row's largest logits, [R]; -1 where that is infinite or one is NaN."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, -1)


def _adjusted(
    logits: Tensor,
    states: Sequence[SamplerState],
    forbidden: Sequence[Collection[int]],
    masks: Sequence[Tensor | None],
) -> Tensor:
    """The tokens of rows that are not plainly greedy. logits: float32 [R, V], overwritten."""
    penalized = [(row, s, s.counts) for row, s in enumerate(states) if s.counts is not None]
    if penalized:
        rows = [row for row, _, _ in penalized]
        samplings = [s.sampling for _, s, _ in penalized]
        logits[rows] = penalize(logits[rows], samplings, [counts for _, _, counts in penalized])
    size = logits.shape[-1]
    places = [(row, t) for row, banned in enumerate(forbidden) for t in banned if 0 <= t < size]
    if places:
        where = torch.tensor(places, device=logits.device)
        logits[where[:, 0], where[:, 1]] = -torch.inf
    forbid(logits, masks)
    tokens = likeliest_tokens(logits)
    random = [row for row, s in enumerate(states) if not s.sampling.greedy]
    if random:
        drawn = _drawn(logits[random], [states[row] for row in random])
        tokens[random] = torch.where(tokens[random] >= 0, drawn, -1)
    return tokens


def _drawn(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Draws one token a row. logits: float32 [R, V]."""
    shares = shares_of(logits, [s.sampling.temperature for s in states])
    if any(s.sampling.filtered for s in states):
        shares = keep_likeliest(shares, [s.sampling for s in states])
    return draw(shares, [s.uniform() for s in states])


def _with_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], masks: Sequence[Tensor | None]
) -> list[SampledToken]:
    """logits: [R, V]. counts: how many alternatives each row reports."""
    found = [*logprobs_of(logits, torch.tensor(tokens, device=logits.device))]
    if any(mask is not None for mask in masks):
        wide = logits.float()  # a copy: `logits` are rows that were picked
        whole = wide.logsumexp(dim=-1)
        forbid(wide, masks)
        found.append(wide.logsumexp(dim=-1) - whole)
    return report_logprobs(tokens, counts, *found)


def logprobs_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each row's token, [R], and the ids and log-probabilities of the
    likeliest. logits: [R, V]."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    # As many for every row, so that ties do not depend on the other rows.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return own, top.indices, top.values


def report_logprobs(
    tokens: Sequence[int], counts: Sequence[int], own: Tensor, ids: Tensor, values: Tensor,
    allowed: Tensor | None = None,
) -> list[SampledToken]:  # fmt: skip
    """The tokens with what `logprobs_of` found. counts: how many alternatives each row reports.
    allowed: see `SampledToken`, [R]; None where no row has a constraint."""
    chosen = []
    shares = [0.0] * len(tokens) if allowed is None else allowed.tolist()
    columns = (tokens, counts, own.tolist(), ids.tolist(), values.tolist(), shares)
    for token, count, logprob, likeliest, theirs, share in zip(*columns, strict=True):
        pairs = [pair for pair in zip(likeliest, theirs, strict=True) if pair[1] > -torch.inf]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        chosen.append(SampledToken(token, logprob, tuple(pairs[:count]), min(share, 0.0)))
    return chosen


# A float32 probability times a power of two is exact. Below 2**-40 a token is never drawn.
SHARES = 2**40
# A nucleus is mostly this small; sorting 150,000 tokens takes twenty times as long as finding it.
HEAD = 1024


def shares_of(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """softmax(logits / temperature) in units of 2**-40, int64 [R, V]. logits: float32 [R, V], the
    largest of each row finite."""
    return float_shares(logits, _column(temperatures, logits, torch.float32)).to(torch.int64)


def float_shares(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The same before they are cut to whole numbers, float32. temperatures: [R, 1]."""
    # The largest logit becomes 0 first, so that a small temperature cannot make it infinite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    return scaled.softmax(dim=-1).mul_(SHARES)


def keep_likeliest(shares: Tensor, samplings: Sequence[SamplingParams], head: int = HEAD) -> Tensor:
    """Zeroes the shares of the tokens that top-k, top-p or min-p remove. int64 [R, V]."""
    vocabulary = shares.shape[-1]
    width = min(vocabulary, max(head, *(s.top_k for s in samplings)))
    likeliest = shares.topk(width, dim=-1).values  # [R, width], descending
    least = _least_of_top_k(likeliest, [s.top_k for s in samplings])  # [R, 1]
    if any(s.top_p < 1 for s in samplings):
        kept = torch.where(shares >= least, shares, 0)
        top_p = _column([s.top_p for s in samplings], shares)
        nucleus = _least_of_nucleus(kept, torch.where(likeliest >= least, likeliest, 0), top_p)
        least = torch.where(top_p < 1, torch.maximum(least, nucleus), least)
    min_p = _column([s.min_p for s in samplings], shares)
    least = torch.maximum(least, (min_p * likeliest[:, :1]).ceil().to(torch.int64))
    return torch.where(shares >= least, shares, 0)


def draw(shares: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Token ids [R]: each row's distribution function inverted at its uniform number in
    [0, 1 - 2**-48]. shares: int64 [R, V], no row all zero."""
    cumulative = shares.cumsum(dim=-1)
    at = (_column(uniforms, shares) * cumulative[:, -1:]).to(torch.int64)  # [R, 1], below the total
    tokens = torch.searchsorted(cumulative, at, right=True)
    return tokens.clamp(max=shares.shape[-1] - 1).squeeze(-1)  # only rows of NaN need the clamp


def _least_of_top_k(likeliest: Tensor, top_k: Sequence[int]) -> Tensor:
    """The k-th largest share of each row, [R, 1]; 0 where top-k removes nothing."""
    width = likeliest.shape[-1]
    wanted = [k if k <= width else 0 for k in top_k]
    last = torch.tensor([max(k, 1) - 1 for k in wanted], device=likeliest.device)[:, None]
    used = torch.tensor([k > 0 for k in wanted], device=likeliest.device)[:, None]
    return torch.where(used, likeliest.gather(-1, last), 0)


def _least_of_nucleus(shares: Tensor, likeliest: Tensor, top_p: Tensor) -> Tensor:
    """The smallest share in each row's nucleus, [R, 1]. likeliest: the largest, descending."""
    mass = top_p * shares.sum(dim=-1, keepdim=True)
    least = _last_before(likeliest, mass)
    if likeliest.shape[-1] < shares.shape[-1]:
        open_end = (likeliest.sum(dim=-1, keepdim=True) < mass) & (top_p < 1)
        rows = open_end.squeeze(-1).nonzero().squeeze(-1)
        if len(rows):
            ordered = shares[rows].sort(dim=-1, descending=True).values
            least[rows] = _last_before(ordered, mass[rows])
    return least


def _last_before(descending: Tensor, mass: Tensor) -> Tensor:
    """The last share before the mass is reached. [R, 1]."""
    before = descending.cumsum(dim=-1) - descending
    count = (before < mass).sum(dim=-1, keepdim=True)
    return descending.gather(-1, (count - 1).clamp(min=0))


class TokenCounts:
    """The tokens that one sequence has seen, as tables over the vocabulary on the logits' device: a
    step costs the same however long the prompt and the answer are."""

    __slots__ = ("_counts", "_prompt", "_prompt_tokens")

    def __init__(self, prompt_tokens: Iterable[int]) -> None:
        self._prompt_tokens = frozenset(prompt_tokens)
        self._prompt: Tensor | None = None  # bool [V]
        self._counts: Tensor | None = None  # float32 [V]: times generated

    def tables(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a token is in the prompt, bool [V]; how often it was generated, float32 [V]."""
        if self._prompt is None or self._counts is None:
            vocabulary = logits.shape[-1]
            known = [token for token in self._prompt_tokens if 0 <= token < vocabulary]
            self._prompt = torch.zeros(vocabulary, dtype=torch.bool, device=logits.device)
            self._prompt.index_fill_(0, upload(known, torch.int64, logits.device), True)
            self._counts = torch.zeros(vocabulary, device=logits.device)
            self._prompt_tokens = frozenset()
        return self._prompt, self._counts

    def add(self, token: int) -> None:
        """Counts a token that was generated; `tables` has been called before."""
        assert self._counts is not None
        self._counts[token] += 1

    def move(self, prompt: Tensor, counts: Tensor) -> None:
        """Keeps its tables in this memory, which holds them already."""
        self._prompt, self._counts = prompt, counts


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of some rows, as columns [R, 1]."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], logits: Tensor) -> Penalties:
        return cls(
            _column([s.repetition_penalty for s in samplings], logits, logits.dtype),
            _column([s.frequency_penalty for s in samplings], logits, logits.dtype),
            _column([s.presence_penalty for s in samplings], logits, logits.dtype),
        )

    def apply(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        """float32 logits [R, V] as a new tensor: repetition first, then frequency and presence.
        prompt, counts: [R, V], see `TokenCounts.tables`."""
        generated = counts > 0
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        penalized = torch.where(prompt | generated, repeated, logits)
        return penalized - self.frequency * counts - self.presence * generated


def penalize(
    logits: Tensor, samplings: Sequence[SamplingParams], counted: Sequence[TokenCounts]
) -> Tensor:
    """Applies each row's penalties to float32 [R, V], as a new tensor."""
    tables = [each.tables(logits) for each in counted]
    prompt = torch.stack([prompt for prompt, _ in tables])
    counts = torch.stack([counts for _, counts in tables])
    return Penalties.of(samplings, logits).apply(logits, prompt, counts)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values on a device, without waiting for what it computes."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return upload(values, dtype, like.device)[:, None]
