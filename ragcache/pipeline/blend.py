"""Mode `blend:R`: compute the module tokens again that their context changes most.

Modules that were encoded one by one have not seen each other. The tokens to compute again are found
as in CacheBlend (Yao et al., 2024, §4.3): the first layer of all modules is computed in context,
and the values of the second layer are compared with the kept values. Tokens that deviate most on
that layer deviate most on later layers, too. The request computes these tokens at their places and
reads all others from kept states.

Tokens are chosen in runs of `RUN`, because each gap between two chosen runs is a segment that every
decoding step reads separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ragcache.attention import rotate
from ragcache.engine import EncodeJob, Segment
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM
from ragcache.pipeline.prompt import CachedSpan, TokenPrompt
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates, layer_of, wait_for_arrival

RUN = 8
"""Tokens that are chosen together."""


class Encoder(Protocol):
    """Computes states, as `LLMEngine` does."""

    def encode(self, jobs: Sequence[EncodeJob], /) -> Iterable[KVStates]:
        """Return the states of each job, in order."""


def most_blended(prompt: TokenPrompt, percent: int) -> int:
    """Return the most tokens that `blend_prompt` computes again."""
    tokens = sum(span.length for span in _module_spans(prompt))
    return min(tokens, _wanted(tokens, percent) + RUN - 1)


def blend_prompt(
    prompt: TokenPrompt,
    percent: int,
    states: Sequence[StoredStates],
    token_ids: Sequence[Sequence[int]],
    model: CausalLM,
    encoder: Encoder,
) -> TokenPrompt:
    """Return a prompt in which the module tokens that deviate most are computed.

    Args:
        prompt: A prompt without gaps. Its spans of group 0 are the preamble.
        percent: Percentage of the module tokens to compute, rounded up to whole runs.
        states: States of the prompt, in the order that `CachedSpan.group` counts.
        token_ids: Tokens of each of these states.
        model: The model of these states.
        encoder: Computes the first two layers in context. Its errors are raised unchanged.
    """
    spans = _module_spans(prompt)
    if not spans:
        return prompt
    if model.copies is not None:
        raise UnsupportedModel(
            f"tensor_parallel={model.ranks}: mode blend compares states of all heads, which "
            "several GPUs do not do; ask in another mode"
        )
    end = spans[-1].start + spans[-1].length
    root, tokens = _in_context(prompt, states, token_ids, end)
    layers = min(2, model.num_layers)
    job = EncodeJob(tokens, end - len(tokens), root, layers=layers)
    [computed] = encoder.encode([job])
    wait_for_arrival(computed)
    deviations = [
        _deviations(model, computed, states[span.group], span, layers - 1) for span in spans
    ]
    wanted = _wanted(sum(span.length for span in spans), percent)
    chosen = choose_runs(deviations, wanted)
    return _with_own(prompt, dict(zip(spans, chosen, strict=True)), token_ids)


def choose_runs(deviations: Sequence[Tensor], tokens: int) -> list[list[tuple[int, int]]]:
    """Choose the runs with the largest mean deviation, enough for `tokens` tokens.

    Args:
        deviations: Deviation of each token, as a tensor [S] for each span.
        tokens: Number of tokens to choose.

    Returns:
        The chosen runs begin:end of each span, in order. Adjacent runs are joined.
    """
    runs = [
        (mean, number, at * RUN, min((at + 1) * RUN, len(span)))
        for number, span in enumerate(deviations)
        for at, mean in enumerate(_means(span))
    ]
    chosen: list[list[tuple[int, int]]] = [[] for _ in deviations]
    for _, number, begin, end in sorted(runs, key=lambda run: (-run[0], *run[1:])):
        if tokens <= 0:
            break
        chosen[number].append((begin, end))
        tokens -= end - begin
    return [list(_joined(sorted(each))) for each in chosen]


def _means(deviations: Tensor) -> list[float]:
    """Return the mean deviation of each run. The last run may be shorter."""
    sums = functional.pad(deviations, (0, -len(deviations) % RUN)).view(-1, RUN).sum(1)
    *full, last = sums.tolist()
    return [*(total / RUN for total in full), last / (len(deviations) - RUN * len(full))]


def _wanted(tokens: int, percent: int) -> int:
    return -(-tokens * percent // 100)


def _joined(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield sorted runs with adjacent ones joined."""
    begin, end = None, 0
    for first, until in runs:
        if begin is not None and first > end:
            yield begin, end
            begin = None
        begin, end = first if begin is None else begin, until
    if begin is not None:
        yield begin, end


def _module_spans(prompt: TokenPrompt) -> list[CachedSpan]:
    return [span for span in prompt.spans if span.group]


def _in_context(
    prompt: TokenPrompt,
    states: Sequence[StoredStates],
    token_ids: Sequence[Sequence[int]],
    end: int,
) -> tuple[Segment | None, list[int]]:
    """Return the preamble, if its states are read, and all tokens between it and `end`."""
    placed = dict(prompt.computed_tokens)
    for span in _module_spans(prompt):
        placed |= enumerate(token_ids[span.group][span.begin : span.end], span.start)
    begin = next((span.length for span in prompt.spans if not span.group), 0)
    root = Segment(states[0], 0) if begin else None
    return root, [placed[position] for position in range(begin, end)]


def _deviations(
    model: CausalLM, computed: KVStates, kept: StoredStates, span: CachedSpan, layer: int
) -> Tensor:
    """Return the squared distance [S] between computed and kept values of a span's tokens.

    For models whose keys serve as values, the keys are compared at the positions of the kept ones.

    Args:
        model: The model.
        computed: States from the preamble to the end of the last module, computed in context.
        kept: The states that the span reads.
        span: The span.
        layer: The layer to compare.
    """
    wait_for_arrival(kept)
    part = kept.part(span.begin, span.end, kept.start + span.offset)
    own = layer_of(part, layer).restore()
    at = span.start - computed.start
    here = slice(at, at + span.length)
    if model.value_dim:
        one, other = computed.values[layer][:, here], own.values[0]
    else:
        one, other = computed.keys[layer][:, here], own.keys[0]
        one = _turned(model, one, own.start - span.start, layer)
    return (one.float() - other.float()).square().sum((0, 2))


def _turned(model: CausalLM, keys: Tensor, delta: int, layer: int) -> Tensor:
    """Return keys [Hkv, S, D] of a layer rotated to positions `delta` further on.

    `relocation` gives the rotation of a query, which is the inverse: hence the minus sign.
    """
    turning = model.scheme.relocation(torch.tensor([-delta], device=keys.device))
    if isinstance(turning, tuple):
        turning = turning[layer]
    return keys if turning is None else rotate(keys, turning)


def _with_own(
    prompt: TokenPrompt,
    chosen: dict[CachedSpan, list[tuple[int, int]]],
    token_ids: Sequence[Sequence[int]],
) -> TokenPrompt:
    """Return the prompt with chosen runs computed. Runs count from the begin of their span."""
    spans: list[CachedSpan] = []
    own: list[tuple[int, int]] = []
    for span in prompt.spans:
        runs = chosen.get(span, [])
        edges = [0, *chain(*runs), span.length]
        spans += (_cut(span, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
        for begin, end in runs:
            first = span.begin + begin
            tokens = token_ids[span.group][first : span.begin + end]
            own += enumerate(tokens, span.start + begin)
    return replace(
        prompt,
        spans=tuple(spans),
        computed_tokens=tuple(sorted((*prompt.computed_tokens, *own))),
        recomputed=prompt.recomputed + len(own),
    )


def _cut(span: CachedSpan, begin: int, end: int) -> CachedSpan:
    """Return tokens begin:end of a span, counted from its begin."""
    return replace(
        span,
        begin=span.begin + begin,
        end=span.begin + end,
        start=span.start + begin,
        offset=span.offset + begin,
    )
