"""Forward passes of a single text without an engine, for the trials of families."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    ContiguousWrite,
    SharedKV,
    SharedQueries,
    over_heads,
    read_values,
)
from ragcache.attention.recurrent import RecurrentBatch
from ragcache.models.model import CausalLM, ForwardBatch
from ragcache.states import KVStates


def forward_text(
    causal: CausalLM,
    token_ids: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    modules: Sequence[tuple[KVStates, int]] = (),
    recurrent: RecurrentBatch | None = None,
    wanted: int | None = None,
) -> Tensor:
    """Return the logits of the last tokens of a text, [wanted, vocabulary].

    Args:
        causal: The model.
        token_ids: Tokens of the text.
        start: Position of the first token.
        keys: Where the keys of the tokens go.
        values: Where the values of the tokens go.
        modules: States that all tokens read, with the positions to which they are moved.
        recurrent: The rows of the text, for recurrent layers.
        wanted: Number of tokens whose logits are computed. Defaults to all.
    """
    count, rows = len(token_ids), torch.arange(len(token_ids))
    positions = rows + start
    queries: SharedQueries | None = None
    shared = tuple(
        SharedKV(each.keys, read_values(each.keys, each.values), n * count, (n + 1) * count)
        for n, (each, _) in enumerate(modules)
    )
    if modules:
        begin = torch.tensor([at for _, at in modules]).repeat_interleave(count)
        moved = begin - torch.tensor([each.start for each, _ in modules]).repeat_interleave(count)
        repeated = rows.repeat(len(modules))
        turning = causal.scheme.relocation(moved)
        queries = SharedQueries(
            repeated, over_heads(turning), (begin - positions[repeated]).float()
        )
    metadata = AttentionMetadata(
        shared_queries=queries,
        shared_kv=shared,
        causal_blocks=(CausalBlock(0, count),),
        paged_queries=None,
        writes=(ContiguousWrite(keys, values, 0, 0, count),),
        shared_index=torch.arange(len(modules) * count).view(len(modules), count),
        slopes=causal.scheme.slopes,
        positions=positions.float(),
        windows=causal.windows,
        softcap=causal.softcap,
        layout=causal.layout,
    )
    if wanted is not None:
        rows = rows[count - wanted :]
    return causal.forward(ForwardBatch(token_ids, positions, rows, metadata, recurrent))
