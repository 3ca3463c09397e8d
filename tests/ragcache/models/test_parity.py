"""Segments give the logits that Hugging Face gives: two-layer random models of every family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ragcache.engine import Context, EncodeJob, Request, Segment, assemble_context, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.engine import complete
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference
from tests.tiny_models import random_tokens, tiny_model


def place(states: list[KVStates], question: list[int]) -> Context:
    return assemble_context(states, question, window=512, max_tokens=4)


@torch.no_grad()
def ordinary(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


def test_a_patched_model_called_ordinarily_is_unchanged(family: str) -> None:
    """Without padding, and with it."""
    model = tiny_model(family)
    tokens = torch.tensor([[0] * 5 + random_tokens(12), random_tokens(17, seed=1)])
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0

    @torch.no_grad()
    def calls() -> list[Tensor]:
        padded = model(tokens, attention_mask=mask).logits[0, -1]
        return [ordinary(model, random_tokens(40)), padded]

    before = calls()
    wrap_causal(model)
    torch.testing.assert_close(calls(), before, rtol=0, atol=0)


def test_prefixes_and_rooted_modules_equal_ordinary_prefill(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(90)
    expected = ordinary(model, tokens)
    causal = wrap_causal(model)
    [states] = encode(causal, [EncodeJob(tokens[:70])])
    [root] = encode(causal, [EncodeJob(tokens[:20])])
    [module] = encode(causal, [EncodeJob(tokens[20:70], 20, Segment(root, 0))])
    for prefix in ([states], [root, module]):
        [logits] = last_logits(causal, [place(prefix, tokens[70:])])
        torch.testing.assert_close(logits, expected, **CLOSE)


ONE, OTHER, THIRD = (Module(random_tokens(n, seed=n)) for n in (24, 31, 17))
END = random_tokens(9, seed=5)
PROMPTS: dict[str, list[Module | list[int]]] = {
    "in order": [ONE, OTHER, THIRD, END],
    "the first one last": [OTHER, THIRD, ONE, END],
    "the last one first": [THIRD, ONE, OTHER, END],
    "text between": [random_tokens(5, seed=1), OTHER, random_tokens(7, seed=3), ONE, END],
    "one twice": [THIRD, THIRD, END],
}
SLOW_PROMPTS = ("in order", "the first one last")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_PROMPTS)) for n in PROMPTS]
)
def test_segments_equal_modules_run_where_they_stand(family: str, name: str) -> None:
    causal = wrap_causal(tiny_model(family))
    [logits] = last_logits(causal, [prompt(causal, PROMPTS[name])])
    torch.testing.assert_close(logits, reference(causal.model, PROMPTS[name]), **CLOSE)


def test_an_answer_over_segments_continues_the_reference(family: str) -> None:
    """Decoding reads segments, shared pages and new tokens at once."""
    causal = wrap_causal(tiny_model(family))
    modules = [Module(random_tokens(n, seed=n)) for n in (24, 31)]
    question = random_tokens(9, seed=5)
    context = prompt(causal, [*modules, question])
    [completion] = complete(causal, [Request(context, 6, frozenset())])
    answer: list[int] = []
    for _ in range(6):
        logits = reference(causal.model, [*modules, question + answer])
        answer.append(int(logits.argmax()))
    assert list(completion.token_ids) == answer


def test_three_requests_in_one_ragged_batch_equal_one_by_one(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    a, b, c = (Module(random_tokens(n, seed=n)) for n in (40, 25, 33))
    contexts = [
        prompt(causal, [a, b, random_tokens(5, seed=1)]),
        prompt(causal, [b, c, a, random_tokens(11, seed=2)]),
        prompt(causal, [random_tokens(8, seed=3)]),
    ]
    together = last_logits(causal, contexts)
    alone = torch.cat([last_logits(causal, [context]) for context in contexts])
    torch.testing.assert_close(together, alone, **CLOSE)


def test_a_step_builds_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size of all new tokens squared, whatever the model's mask function."""
    causal = wrap_causal(tiny_model(family))
    step = BatchBuilder(causal).build_batch(
        [ScheduledChunk((), ContiguousKV.allocate(causal, 20), range(20), range(20))]
    )
    for name in list(ALL_MASK_ATTENTION_FUNCTIONS.keys()):
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, name, None)
    assert causal.forward(step).shape == (1, 320)


def test_bfloat16_stays_close(family: str) -> None:
    model = tiny_model(family, torch.bfloat16)
    tokens = random_tokens(60)
    expected = ordinary(model, tokens).float()
    causal = wrap_causal(model)
    [states] = encode(causal, [EncodeJob(tokens[:40])])
    [logits] = last_logits(causal, [place([states], tokens[40:])])
    relative = (logits.float() - expected).norm() / expected.norm()
    assert relative < 0.03


GAPS_CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])  # of four heads (Press et al., §3)
NEVER = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Piece:
    """Tokens from position `start` on. A module sees itself alone; text sees what starts before."""

    start: int
    token_ids: list[int]
    module: bool = False

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.token_ids))


PIECES = (
    Piece(3, random_tokens(5, seed=1)),
    Piece(12, random_tokens(20, seed=2), module=True),
    Piece(40, random_tokens(7, seed=3)),
    Piece(60, random_tokens(15, seed=4), module=True),
    Piece(90, random_tokens(6, seed=5)),
)


@torch.no_grad()
def dense(model: Any, pieces: tuple[Piece, ...]) -> Tensor:
    """Logits of the last token, from one pass over all of them without a cache."""
    tokens = torch.tensor([[t for piece in pieces for t in piece.token_ids]])
    positions = torch.tensor([p for piece in pieces for p in piece.positions])
    owner = torch.tensor([i for i, piece in enumerate(pieces) for _ in piece.token_ids])
    is_text = torch.tensor([not piece.module for piece in pieces])
    starts = torch.tensor([piece.start for piece in pieces])
    before = positions[None, :] <= positions[:, None]  # [T, T], row sees column
    same = owner[:, None] == owner[None, :]
    from_text = is_text[owner][:, None] & (starts[owner][None, :] <= positions[:, None])
    hidden = torch.zeros(before.shape).masked_fill(~(before & (same | from_text)), NEVER)
    if model.config.model_type in ("mpt", "bloom") or getattr(model.config, "alibi", False):
        away = (positions[None, :] - positions[:, None]).float()
        biased = by_blocks(model, tokens, SLOPES[:, None, None] * away, hidden)
        return biased[0, -1]
    out = model(tokens, attention_mask=hidden[None, None], position_ids=positions[None])
    return out.logits[0, -1]


def by_blocks(model: Any, tokens: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    """An ALiBi model, block by block. bias: [Hq, T, T]; hidden: [T, T]. Returns [1, T, V]."""
    trunk = model.transformer
    if model.config.model_type == "mpt":
        states = trunk.wte(tokens)
        for block in trunk.blocks:
            states = block(states, position_bias=bias + hidden, attention_mask=None)[0]
        return model.lm_head(trunk.norm_f(states))
    states = trunk.word_embeddings(tokens)
    if model.config.model_type == "bloom":
        states = trunk.word_embeddings_layernorm(states)
        for block in trunk.h:
            states = block(states, alibi=bias + hidden, attention_mask=None)[0]
    else:  # Falcon scales the bias as it scales the scores
        mask = (bias / 4 + hidden)[None]
        for block in trunk.h:
            states = block(states, alibi=bias, attention_mask=mask)[0]
    return model.lm_head(trunk.ln_f(states))


def with_gaps(causal: CausalLM) -> Context:
    """The pieces, with modules that were encoded elsewhere where they can move."""
    segments = []
    for piece in PIECES:
        if piece.module:
            start = 33 if causal.scheme.movable else piece.start
            [states] = encode(causal, [EncodeJob(piece.token_ids, start)])
            segments.append(Segment(states, piece.start))
    text = [piece for piece in PIECES if not piece.module]
    tokens = tuple(token for piece in text for token in piece.token_ids)
    positions = tuple(position for piece in text for position in piece.positions)
    return Context(tuple(segments), tokens, positions, positions[-1] + 1)


def test_an_answer_after_gaps_equals_explicit_positions(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    context = with_gaps(causal)
    [completion] = complete(causal, [Request(context, 4, frozenset())])
    *before, last = PIECES
    answer: list[int] = []
    for _ in range(4):
        question = Piece(last.start, [*last.token_ids, *answer])
        answer.append(int(dense(causal.model, (*before, question)).argmax()))
    assert list(completion.token_ids) == answer


def test_the_reference_without_gaps_is_the_ordinary_pass(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(25)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(dense(model, (Piece(0, tokens),)), expected, **GAPS_CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon-rw", "mpt", "bloom"])
def test_gaps_matter_to_the_reference(family: str) -> None:
    """So that a greedy answer would differ if a module stood elsewhere."""
    model = tiny_model(family)
    module, text = Piece(0, random_tokens(20), module=True), random_tokens(5, seed=1)
    near = dense(model, (module, Piece(20, text)))
    assert (near - dense(model, (module, Piece(300, text)))).abs().max() > 1e-3
