"""Choosing the next token of each sequence of a batch."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from ragcache.engine.constraint import forbid
from ragcache.engine.draw import draw, keep_likeliest, shares_of
from ragcache.engine.penalties import Tally, penalize
from ragcache.engine.sampling import MAX_LOGPROBS, Sampling
from ragcache.errors import UnusableLogits

# Rows that need copies of their logits are taken this many at a time: on a CPU for its cache, on a
# GPU to bound the memory.
CPU_ROWS, GPU_ROWS = 8, 64


@dataclass(slots=True, eq=False)
class SamplerState:
    """One sequence's settings and its place in its stream of random numbers.

    The n-th number is a hash of (seed, index, n), so a sequence draws the same whatever runs beside
    it and whenever it is interrupted.

    drawn: tokens chosen so far. tally: None unless a penalty needs it.
    """

    sampling: Sampling
    seed: int
    index: int = 0
    drawn: int = 0
    tally: Tally | None = None

    @classmethod
    def start(
        cls, sampling: Sampling, prompt_tokens: Iterable[int], index: int = 0
    ) -> SamplerState:
        """The state of the index-th of a request's n sequences; each has a stream of its own."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        repeats = sampling.repetition_penalty != 1
        tally = Tally(prompt_tokens if repeats else ()) if sampling.penalized else None
        return cls(sampling, seed, index, tally=tally)

    def uniform(self) -> float:
        """The number for the next token, a multiple of 2**-48 in [0, 1)."""
        place = struct.pack(">qQQ", self.seed, self.index, self.drawn)
        return int.from_bytes(blake2b(place, digest_size=6).digest(), "big") / 2**48

    def record(self, token: int) -> None:
        self.drawn += 1
        if self.tally is not None:
            self.tally.add(token)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and log-probabilities if they were asked for.

    They are natural logarithms of the model's own distribution: the softmax of the logits before
    penalties, temperature and filters, as OpenAI and vLLM report them. alternatives: the likeliest
    tokens with theirs, likeliest first, whether or not the chosen one is among them.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def choose(
    logits: Tensor,
    states: Sequence[SamplerState],
    forbidden: Sequence[Collection[int]],
    masks: Sequence[Tensor | None] | None = None,
) -> list[Chosen | UnusableLogits]:
    """Chooses the next token of every row and records it in the row's state.

    logits: [R, V] of any floating type, left as they are; the arithmetic is float32.
    forbidden: for each row the token ids that may not be chosen now. masks: for each row those that
    its constraint allows (see `Constraint.mask`); None: no row has one.

    A row whose largest allowed logit is not finite, or which holds NaN, gives an UnusableLogits
    that was not raised, and its state stays as it was; the other rows are not affected.
    """
    tokens = _tokens(logits, states, forbidden, masks or [None] * len(states))
    asked = [i for i, s in enumerate(states) if s.sampling.logprobs is not None and tokens[i] >= 0]
    reported: dict[int, Chosen] = {}
    for rows in _portions(asked, logits):
        chosen = _with_logprobs(
            logits[rows],
            [tokens[i] for i in rows],
            [states[i].sampling.logprobs or 0 for i in rows],
        )
        reported.update(zip(rows, chosen, strict=True))
    results: list[Chosen | UnusableLogits] = []
    for row, (token, state) in enumerate(zip(tokens, states, strict=True)):
        if token < 0:
            results.append(_unusable(state))
            continue
        state.record(token)
        results.append(reported.get(row) or Chosen(token))
    return results


def _unusable(state: SamplerState) -> UnusableLogits:
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
        simple = free and state.sampling.greedy and state.tally is None
        (plain if simple else others).append(row)
    if not others:
        return _likeliest(logits).tolist()
    tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    if plain:
        tokens[plain] = _likeliest(logits[plain])
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


def _likeliest(logits: Tensor) -> Tensor:
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
    penalized = [(row, s, s.tally) for row, s in enumerate(states) if s.tally is not None]
    if penalized:
        rows = [row for row, _, _ in penalized]
        samplings = [s.sampling for _, s, _ in penalized]
        logits[rows] = penalize(logits[rows], samplings, [tally for _, _, tally in penalized])
    places = [
        (row, token)
        for row, banned in enumerate(forbidden)
        for token in banned
        if 0 <= token < logits.shape[-1]
    ]
    if places:
        where = torch.tensor(places, device=logits.device)
        logits[where[:, 0], where[:, 1]] = -torch.inf
    forbid(logits, masks)
    tokens = _likeliest(logits)
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


def _with_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Chosen]:
    """logits: [R, V]. counts: how many alternatives each row reports."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    # As many for every row, so that among equals none depends on what another row asked for.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    columns = (tokens, counts, own[:, 0].tolist(), top.indices.tolist(), top.values.tolist())
    chosen = []
    for token, count, logprob, ids, values in zip(*columns, strict=True):
        pairs = [pair for pair in zip(ids, values, strict=True) if pair[1] > -torch.inf]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        chosen.append(Chosen(token, logprob, tuple(pairs[:count])))
    return chosen
