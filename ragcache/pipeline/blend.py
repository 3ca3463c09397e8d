"""Mode `blend:R`: the module tokens that their context changes most are computed again in it.

Modules that were encoded apart have not seen each other. The states of a token that this matters to
are found as in CacheBlend (Yao et al., 2024, §4.3): the first layer of all modules is computed in
context, and the second layer's values are compared with those that are kept. What deviates most
there does so on later layers, too. These tokens become the request's own, at their places; all
others are read as ever, shared with whoever reads them.

They are chosen in runs: every gap between two of them is a segment of its own, which each step
reads apart.
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
from ragcache.models import CausalLM
from ragcache.pipeline.prompt import CachedSpan, TokenPrompt
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates, restored, wait_for_arrival

RUN = 8
"""Tokens that are chosen together."""


class Encoder(Protocol):
    """Computes states: an `LLMEngine`."""

    def encode(self, jobs: Sequence[EncodeJob], /) -> Iterable[KVStates]:
        """The states of each job, in order."""


def most_blended(prompt: TokenPrompt, percent: int) -> int:
    """The most tokens that `blend_prompt` computes again; none with 0 percent."""
    tokens = sum(span.length for span in _module_spans(prompt))
    return min(tokens, _wanted(tokens, percent) + RUN - 1) if percent else 0


def blend_prompt(
    prompt: TokenPrompt, percent: int, states: Sequence[StoredStates],
    token_ids: Sequence[Sequence[int]], model: CausalLM, encoder: Encoder,
) -> TokenPrompt:  # fmt: skip
    """The prompt with the module tokens computed that deviate most.

    Args:
        prompt: Laid out without gaps; its spans of group 0 are the preamble.
        percent: Of all module tokens that are read; whole runs, at least one.
        states: What is read, in the order that `CachedSpan.group` counts.
        token_ids: Of each of these states.
        model: The model of these states.
        encoder: Computes the first two layers in context. Raises what it raises.
    """
    spans = _module_spans(prompt)
    if not spans:
        return prompt
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
    """The runs begin:end of each span that deviate most, by their mean: so many that they hold at
    least `tokens`. In order, neighbors joined. deviations: [S] of each span's tokens."""
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
    """Mean deviation of each run. The last run may be shorter."""
    sums = functional.pad(deviations, (0, -len(deviations) % RUN)).view(-1, RUN).sum(1)
    *full, last = sums.tolist()
    return [*(total / RUN for total in full), last / (len(deviations) - RUN * len(full))]


def _wanted(tokens: int, percent: int) -> int:
    return -(-tokens * percent // 100)


def _joined(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs in order, those that touch as one."""
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
    prompt: TokenPrompt, states: Sequence[StoredStates], token_ids: Sequence[Sequence[int]],
    end: int,
) -> tuple[Segment | None, list[int]]:  # fmt: skip
    """The preamble, where the prompt begins with it, and all tokens between it and `end`."""
    placed = dict(prompt.computed_tokens)
    for span in _module_spans(prompt):
        placed |= enumerate(token_ids[span.group][span.begin : span.end], span.start)
    begin = next((span.length for span in prompt.spans if not span.group), 0)
    root = Segment(states[0], 0) if begin else None
    return root, [placed[position] for position in range(begin, end)]


def _deviations(
    model: CausalLM, computed: KVStates, kept: StoredStates, span: CachedSpan, layer: int
) -> Tensor:
    """How far the values [S] of a span's tokens in a layer are from the kept ones, squared; where
    keys serve as values, the keys, turned to where the kept ones are. computed: in context, with
    all that stands between the preamble and the end of the last module."""
    wait_for_arrival(kept)
    part = kept.part(span.begin, span.end, kept.start + span.offset)
    own = restored(part.layer(layer))
    at = span.start - computed.start
    here = slice(at, at + span.length)
    if model.value_dim:
        one, other = computed.values[layer][:, here], own.values[0]
    else:
        one, other = computed.keys[layer][:, here], own.keys[0]
        one = _turned(model, one, own.start - span.start, layer)
    return (one.float() - other.float()).square().sum((0, 2))


def _turned(model: CausalLM, keys: Tensor, delta: int, layer: int) -> Tensor:
    """Keys [Hkv, S, D] of a layer as they are `delta` positions further on: a query turns towards
    what was moved as far the other way."""
    turning = model.scheme.relocation(torch.tensor([-delta], device=keys.device))
    if isinstance(turning, tuple):
        turning = turning[layer]
    return keys if turning is None else rotate(keys, turning)


def _with_own(
    prompt: TokenPrompt, chosen: dict[CachedSpan, list[tuple[int, int]]],
    token_ids: Sequence[Sequence[int]],
) -> TokenPrompt:  # fmt: skip
    """The prompt with runs of its spans, from the span's begin on, computed instead of read."""
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
        prompt, spans=tuple(spans), computed_tokens=tuple(sorted((*prompt.computed_tokens, *own))),
        recomputed=prompt.recomputed + len(own),
    )  # fmt: skip


def _cut(span: CachedSpan, begin: int, end: int) -> CachedSpan:
    """Tokens begin:end of a span."""
    return replace(
        span, begin=span.begin + begin, end=span.begin + end, start=span.start + begin,
        offset=span.offset + begin,
    )  # fmt: skip
