"""Modules and text that leave gaps: against one pass with explicit positions, masks and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import Context, EncodeJob, Request, Segment, encode
from ragcache.engine.engine import complete
from ragcache.models import CausalLM, wrap_causal
from tests.conftest import random_tokens, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
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


def test_an_answer_after_gaps_equals_explicit_positions_masks_and_biases(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    context = with_gaps(causal)
    [completion] = complete(causal, [Request(context, 4, frozenset())])
    *before, last = PIECES
    answer: list[int] = []
    for _ in range(4):
        question = Piece(last.start, [*last.token_ids, *answer])
        answer.append(int(dense(causal.model, (*before, question)).argmax()))
    assert list(completion.token_ids) == answer


def test_the_reference_without_modules_and_gaps_is_the_ordinary_pass(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(25)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(dense(model, (Piece(0, tokens),)), expected, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon-rw", "mpt", "bloom"])
def test_gaps_matter_to_the_reference(family: str) -> None:
    """So that a greedy answer would differ if a module stood elsewhere."""
    model = tiny_model(family)
    module, text = Piece(0, random_tokens(20), module=True), random_tokens(5, seed=1)
    near = dense(model, (module, Piece(20, text)))
    assert (near - dense(model, (module, Piece(300, text)))).abs().max() > 1e-3
