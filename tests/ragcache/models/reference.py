"""Prompts of modules and text, as Hugging Face computes them and as segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ragcache.engine import Context, EncodeJob, Segment, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.models import CausalLM

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
            c.segments,
            ContiguousKV.allocate(causal, len(c.token_ids)),
            c.token_ids,
            c.position_ids,
        )
        for c in contexts
    ]
    return causal.forward(BatchBuilder(causal).build_batch(chunks))
