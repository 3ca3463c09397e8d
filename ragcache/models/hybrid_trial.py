"""The trial of models with recurrent layers: texts in portions, and documents that compose.

Two texts are computed together, in portions, as requests of a step are. Then two documents that
were encoded right behind a preamble are composed, the second one first, so that one of them moves.

The comparison shares no equation with the composition: Hugging Face's model reads each document
behind the preamble, and the inputs of every layer's mixer are noted. The model then reads any text
of their length, and every mixer gets the noted inputs in the prompt's order in place of its own.
The model's cache holds the states of the mixers after these inputs, and the question follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    ContiguousWrite,
    SharedKV,
    SharedQueries,
    read_values,
)
from ragcache.attention.recurrent import RecordedMaps, RecurrentBatch, RecurrentRun
from ragcache.models.hf_patch import cache_name
from ragcache.models.model import CausalLM, ForwardBatch
from ragcache.models.recurrent import recurrent_mixers
from ragcache.models.single_pass import forward_text
from ragcache.states import KVStates
from ragcache.states.recurrent import RecurrentSnapshot, RecurrentStates

PORTIONS = (24, 1, 1, 9), (3, 30, 1, 1)
"""Tokens of two texts in each pass that computes both."""
PREAMBLE, DOCUMENTS, QUESTION = 9, (21, 6), 7
"""Tokens of a prompt whose documents compose."""


def hybrid_difference(model: Any, wrap: Callable[[Any], CausalLM], seed: int) -> float:
    """Return the largest difference from Hugging Face's log-probabilities, as a share of their
    spread.

    Compares every token of two texts that are computed together, in portions, and of a question
    behind documents that compose. Documents are left out if a recurrence is not known to be affine.

    Args:
        model: The Hugging Face model, which is patched.
        wrap: Patches the model.
        seed: Seed of the texts.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings

    def draw(count: int) -> Tensor:
        return torch.randint(vocabulary, (count,), generator=generator)

    texts = [draw(sum(portions)) for portions in PORTIONS]
    preamble, *documents, question = map(draw, (PREAMBLE, *DOCUMENTS, QUESTION))
    expected = [model(text[None], use_cache=False).logits[0].log_softmax(-1) for text in texts]
    oracle, composed = MixerOracle(model, preamble), []
    noted = [oracle.note_document(each) for each in documents[::-1]]
    for feed in (oracle.feed, oracle.feed_both):
        cache = oracle.start()
        composed.append(oracle.read(cache, question, feed(cache, noted, PREAMBLE)))
    causal = wrap(model)
    differences = [_difference_in_portions(causal, texts, expected)]
    if causal.composes:
        prompt = _ComposedPrompt.encode(causal, preamble, documents)
        for both, wanted in zip((False, True), composed, strict=True):
            found = prompt.log_probs([1, 0], question, both=both)
            differences.append(_share(found, wanted))
    return max(differences)


def _share(found: Tensor, wanted: Tensor) -> float:
    """Largest difference as a share of the expected spread."""
    return float((found - wanted).abs().max() / wanted.std())


def _difference_in_portions(
    causal: CausalLM, texts: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    lengths = [len(text) for text in texts]
    states = [causal.new_states(count) for count in lengths]
    snapshots: list[RecurrentSnapshot | None] = [None] * len(texts)
    done, differences = [0] * len(texts), []
    for counts in zip(*PORTIONS, strict=True):
        parts = [
            _Portion(text[begin : begin + count], begin, *kept, before)
            for text, begin, count, kept, before in zip(
                texts, done, counts, states, snapshots, strict=True
            )
        ]
        logits = torch.split(_forward_portions(causal, parts).log_softmax(-1), list(counts))
        for number, found in enumerate(logits):
            begin, done[number] = done[number], done[number] + counts[number]
            differences.append(_share(found, expected[number][begin : done[number]]))
            snapshots[number] = parts[number].after
    return max(differences)


@dataclass(frozen=True, eq=False)
class _Portion:
    """The next tokens of a text, whose states so far are kept."""

    token_ids: Tensor
    begin: int
    keys: Tensor
    values: Tensor
    before: RecurrentSnapshot | None
    after: RecurrentSnapshot = field(default_factory=RecurrentSnapshot)


def _forward_portions(causal: CausalLM, portions: Sequence[_Portion]) -> Tensor:
    """Logits of all tokens of several texts, which one flat pass continues: [T, vocabulary]."""
    row, seen, shared, blocks, writes, runs = 0, list[int](), [], [], [], []
    for each in portions:
        rows = range(row, row + len(each.token_ids))
        if each.begin:
            keys, values = each.keys[:, :, : each.begin], each.values[:, :, : each.begin]
            values = read_values(keys, values)
            shared.append(SharedKV(keys, values, len(seen), len(seen) + len(rows)))
            seen += rows
        row = rows.stop
        blocks.append(CausalBlock(rows.start, row))
        writes.append(ContiguousWrite(each.keys, each.values, each.begin, rows.start, row))
        runs.append(RecurrentRun(rows.start, row, each.before, each.after))
    index = torch.full((1 if seen else 0, row), len(seen))
    index[:, seen] = torch.arange(len(seen))
    positions = torch.cat([each.begin + torch.arange(len(each.token_ids)) for each in portions])
    queries = None
    if seen:  # their first key is the text's first
        read = torch.tensor(seen)
        queries = SharedQueries(read, distance=-positions[read].float())
    metadata = AttentionMetadata(
        shared_queries=queries,
        shared_kv=tuple(shared),
        causal_blocks=tuple(blocks),
        paged_queries=None,
        writes=tuple(writes),
        shared_index=index,
        slopes=causal.scheme.slopes,
        positions=positions.float(),
        windows=causal.windows,
        softcap=causal.softcap,
    )
    token_ids = torch.cat([each.token_ids for each in portions])
    batch = RecurrentBatch(runs, causal.device)
    return causal.forward(ForwardBatch(token_ids, positions, torch.arange(row), metadata, batch))


@dataclass(frozen=True, eq=False)
class _ComposedPrompt:
    """A preamble and documents that were encoded behind it."""

    causal: CausalLM
    preamble: KVStates
    documents: list[KVStates]

    @classmethod
    def encode(
        cls, causal: CausalLM, preamble: Tensor, documents: Sequence[Tensor]
    ) -> _ComposedPrompt:
        root = _encoded(causal, preamble, None)
        return cls(causal, root, [_encoded(causal, each, root) for each in documents])

    def log_probs(self, order: Sequence[int], question: Tensor, *, both: bool) -> Tensor:
        """Log-probabilities behind every token of the question, [T, vocabulary]."""
        placed, at = [(self.preamble, 0)], self.preamble.length
        for number in order:
            placed.append((self.documents[number], at))
            at += self.documents[number].length
        keys, values = self.causal.new_states(len(question))
        maps = tuple(each.recurrent for each, _ in placed if each.recurrent is not None)
        run = RecurrentRun(0, len(question), None, RecurrentSnapshot(), maps, both)
        batch = RecurrentBatch([run], self.causal.device)
        logits = forward_text(self.causal, question, at, keys, values, placed, batch)
        return logits.log_softmax(-1)


def _encoded(causal: CausalLM, token_ids: Tensor, root: KVStates | None) -> KVStates:
    """The states of a text behind another."""
    keys, values = causal.new_states(len(token_ids))
    seen = [] if root is None else [(root, 0)]
    start = 0 if root is None else root.length
    before = () if root is None or root.recurrent is None else (root.recurrent,)
    maps = RecordedMaps()
    run = RecurrentRun(0, len(token_ids), None, RecurrentSnapshot(), before, maps=maps)
    batch = RecurrentBatch([run], causal.device)
    forward_text(causal, token_ids, start, keys, values, seen, batch)
    layers = [each for _, each in sorted(maps.after.items())]
    recurrent = RecurrentStates.of(layers, keys.dtype)
    return KVStates(keys, values, start, recurrent=recurrent)


MixerInputs = dict[nn.Module, Tensor]
"""Inputs of the mixers of a model for the tokens of a text, [1, T, hidden size] each."""


def call_behind(model: Any, token_ids: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """Hugging Face's logits of tokens [T] at positions [1, T] behind a cache: [T, vocabulary]."""
    name = cache_name(type(model.base_model).forward)
    out = model(token_ids[None], position_ids=positions, use_cache=True, **{name: cache})
    logits: Tensor = out.logits[0]
    return logits


@dataclass(eq=False)
class MixerOracle:
    """Gives Hugging Face's mixers the inputs of several texts, one text after the other."""

    model: Any
    """The Hugging Face model."""
    preamble: Tensor
    """Tokens before each document, [T]."""

    def note_document(self, token_ids: Tensor) -> MixerInputs:
        """Return the inputs of a document that is read right behind the preamble."""
        inputs = self._note_text(torch.cat([self.preamble, token_ids]))
        return {mixer: rows[:, len(self.preamble) :] for mixer, rows in inputs.items()}

    def start(self) -> DynamicCache:
        """Return the cache behind the preamble."""
        cache = DynamicCache(config=self.model.config)
        self.read(cache, self.preamble, 0)
        return cache

    def feed(self, cache: DynamicCache, documents: Sequence[MixerInputs], at: int) -> int:
        """Give the inputs of documents to the mixers, one document after the other.

        Args:
            cache: The cache of the text before.
            documents: Inputs of each document.
            at: Position of the first one.

        Returns:
            The position behind them.
        """
        length = sum(next(iter(each.values())).shape[1] for each in documents)
        with _mixers_get(self.model, lambda m, _: torch.cat([each[m] for each in documents], 1)):
            self.read(cache, torch.zeros(length, dtype=torch.int64), at)
        return at + length

    def feed_both(self, cache: DynamicCache, documents: Sequence[MixerInputs], at: int) -> int:
        """Feed documents; recurrent states become the mean over their order and its reverse."""
        reverse = copy.deepcopy(cache)
        self.feed(reverse, documents[::-1], at)
        end = self.feed(cache, documents, at)
        for layer, other in zip(cache.layers, reverse.layers, strict=True):
            states = getattr(layer, "recurrent_states", None) or {}
            for index, state in states.items():
                if state is not None:
                    states[index] = (state + other.recurrent_states[index]) / 2
        return end

    def read(self, cache: DynamicCache, token_ids: Tensor, at: int) -> Tensor:
        """Return log-probabilities behind every token of a text, [T, vocabulary]."""
        positions = torch.arange(at, at + len(token_ids))[None]
        return call_behind(self.model, token_ids, positions, cache).log_softmax(-1)

    def _note_text(self, token_ids: Tensor) -> MixerInputs:
        noted: MixerInputs = {}

        def note(mixer: nn.Module, hidden_states: Tensor) -> Tensor:
            noted[mixer] = hidden_states.clone()
            return hidden_states

        with _mixers_get(self.model, note):
            self.read(DynamicCache(config=self.model.config), token_ids, 0)
        return noted


@contextmanager
def _mixers_get(model: Any, inputs: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
    """Give the mixers of all layers other inputs: `inputs(mixer, its own)`."""

    def change(mixer: nn.Module, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": inputs(mixer, kwargs["hidden_states"])}
        return (inputs(mixer, args[0]), *args[1:]), kwargs

    attention = [each for each in model.modules() if hasattr(each, "is_causal")]
    hooks = [
        each.register_forward_pre_hook(change, with_kwargs=True)
        for each in (*attention, *recurrent_mixers(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
