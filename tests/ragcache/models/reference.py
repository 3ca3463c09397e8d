"""Prompts of modules and text as Hugging Face computes them; tiny Gemmas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from ragcache.engine import Context, EncodeJob, Segment, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.models import CausalLM
from tests.tiny_models import DEVICE, VOCABULARY, random_tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ENCODED_AT = 33  # where states are encoded that can move


@dataclass(frozen=True)
class Module:
    """Tokens that see only themselves, in a prompt among tokens that see all before them."""

    token_ids: list[int]


@torch.no_grad()
def reference(model: Any, pieces: Sequence[Module | list[int]]) -> Tensor:
    """Logits of the last token, by Hugging Face alone: every module is run by itself at the
    positions where it stands, and its keys and values are put behind those before it."""
    cache, position = DynamicCache(), 0
    logits = torch.empty(0)
    for piece in pieces:
        tokens = piece.token_ids if isinstance(piece, Module) else piece
        ids = torch.tensor([tokens])
        positions = torch.arange(position, position + len(tokens))[None]
        own = DynamicCache() if isinstance(piece, Module) else cache
        out = model(ids, position_ids=positions, past_key_values=own, use_cache=True)
        if isinstance(piece, Module):
            for number, layer in enumerate(own.layers):
                cache.update(layer.keys, layer.values, number)
        logits, position = out.logits[0, -1], position + len(tokens)
    return logits


def prompt(causal: CausalLM, pieces: Sequence[Module | list[int]]) -> Context:
    """The same prompt of segments. Those that can move are encoded elsewhere, all at one place."""
    segments, tokens, positions, at = [], [], [], 0
    for piece in pieces:
        if isinstance(piece, Module):
            start = ENCODED_AT if causal.scheme.movable else at
            [states] = encode(causal, [EncodeJob(piece.token_ids, start)])
            segments.append(Segment(states, at))
            at += states.length
            continue
        tokens += piece
        positions += range(at, at + len(piece))
        at += len(piece)
    return Context(tuple(segments), tuple(tokens), tuple(positions), at)


def last_logits(causal: CausalLM, contexts: list[Context]) -> Tensor:
    """Logits of each context's last token, all in one ragged pass: [R, vocabulary]."""
    chunks = [
        ScheduledChunk(
            c.segments, ContiguousKV.allocate(causal, len(c.token_ids)), c.token_ids, c.position_ids
        )
        for c in contexts
    ]
    return causal.forward(BatchBuilder(causal).build_batch(chunks))


def assert_moved_modules_are_exact(causal: CausalLM, plain: Any = None) -> None:
    """Two modules and a text have the logits of the plain model (default: the patched one)."""
    pieces = [*(Module(random_tokens(n, seed=n)) for n in (30, 20)), random_tokens(6)]
    [logits] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(logits, reference(plain or causal.model, pieces), **CLOSE)


WINDOW = 7
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING],
    "initializer_range": 0.3,  # so large that attention and caps matter
    "tie_word_embeddings": False,  # so that a greedy answer does not repeat one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e3},
}

TWO_SIZES: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,  # the last two read the states of the second and third
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
}
"""Gemma 4: heads of two sizes."""

Tokens = tuple[Sequence[int], int]
"""Tokens, and the position where they start."""


def tiny_gemma(family: str, **changes: Any) -> Any:
    """Three layers of gemma2 or gemma3, or five of gemma4, through a window of seven tokens but for
    one layer, or two."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        if family == "gemma2":
            model = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **CAPS, **changes}))
            model.set_attn_implementation("eager")  # transformers 5.10 prefers one without caps
        elif family == "gemma3":
            config = Gemma3TextConfig(**{**SIZES, "rope_parameters": ROPE, **changes})
            model = Gemma3ForCausalLM(config)
        else:
            model = Gemma4ForCausalLM(Gemma4TextConfig(**{**SIZES, **TWO_SIZES, **changes}))
    return model.to(DEVICE).eval()


def reference_logits(model: Any, modules: Sequence[Tokens], own: Tokens | list[Tokens]) -> Tensor:
    """Logits of the last own token, from one pass without a cache: the modules where they are
    placed, each seeing itself alone, then the own runs. [vocabulary]"""
    runs = own if isinstance(own, list) else [own]
    blocks = [*modules, *runs]
    tokens = [token for ids, _ in blocks for token in ids]
    positions = [start + n for ids, start in blocks for n in range(len(ids))]
    block = [min(i, len(modules)) for i, (ids, _) in enumerate(blocks) for _ in ids]
    full = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    sliding = full.clone()
    for q in range(len(tokens)):
        for k in range(len(tokens)):
            if block[q] == block[k]:
                full[q, k] = k <= q
            elif block[q] == len(modules):
                full[q, k] = modules[block[k]][1] <= positions[q]
            sliding[q, k] = full[q, k] and positions[q] - positions[k] < WINDOW
    masks = {
        name: torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None]
        for name, mask in ((FULL, full), (SLIDING, sliding))
    }
    with torch.inference_mode():
        logits: Tensor = model(
            torch.tensor([tokens]),
            attention_mask=masks,
            position_ids=torch.tensor([positions]),
            use_cache=False,
        ).logits
    return logits[0, -1]
