"""Forwards for models that know no attention interface: Falcon, MPT and BLOOM.

Each model gets two, in place: its stack's, which builds neither a mask nor an ALiBi tensor over all
tokens, and its attention's, over the module's own projections. Both are the class's own where the
cache is not a `StepCache`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ragcache.attention import Rotation, rotate
from ragcache.models.patch import StepCache


def falcon_stack(module: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
    """`FalconModel.forward`."""
    if not isinstance(past_key_values, StepCache):
        return type(module).forward(module, *args, past_key_values=past_key_values, **kwargs)
    (token_ids,) = args
    hidden = module.word_embeddings(token_ids)
    turning = None
    if not module.use_alibi:
        turning = module.rotary_emb(hidden, position_ids=kwargs["position_ids"])
    for block in module.h:
        states = {"layer_past": past_key_values, "position_embeddings": turning}
        hidden = block(hidden, None, None, **states)[0]  # no ALiBi, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.ln_f(hidden))


def falcon_attention(
    module: Any,
    hidden: Tensor,
    *args: Any,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """`FalconAttention.forward`. hidden: [1, T, hidden size].

    In every form of Falcon the heads stand in groups: G queries, then their key and value.
    """
    if not isinstance(layer_past, StepCache):
        kwargs.update(layer_past=layer_past, position_embeddings=position_embeddings)
        return type(module).forward(module, hidden, *args, **kwargs)
    tokens, groups, dim = hidden.shape[1], module.num_kv_heads, module.head_dim
    fused = module.query_key_value(hidden).view(tokens, groups, -1, dim).permute(1, 2, 0, 3)
    query = fused[:, :-2].reshape(-1, tokens, dim)  # [Hq, T, D]
    key, value = fused[:, -2], fused[:, -1]  # [Hkv, T, D]
    if position_embeddings is not None:
        cos, sin = (each[0, :, : dim // 2] for each in position_embeddings)  # halves are equal
        query, key = rotate(query, Rotation(cos, sin)), rotate(key, Rotation(cos, sin))
    context = layer_past.attend(module.layer_idx, query, key, value, scale=dim**-0.5)
    return module.dense(context), None


def mpt_stack(module: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
    """`MptModel.forward`."""
    if not isinstance(past_key_values, StepCache):
        return type(module).forward(module, *args, past_key_values=past_key_values, **kwargs)
    (token_ids,) = args
    hidden = module.wte(token_ids)
    for block in module.blocks:
        hidden = block(hidden, None, None, layer_past=past_key_values)[0]  # no bias, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.norm_f(hidden))


def mpt_attention(
    module: Any, hidden: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
) -> Any:
    """`MptAttention.forward`. hidden: [1, T, hidden size]."""
    if not isinstance(past_key_values, StepCache):
        kwargs["past_key_values"] = past_key_values
        return type(module).forward(module, hidden, *args, **kwargs)
    fused = module.Wqkv(hidden)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    fused = fused.view(hidden.shape[1], 3, module.n_heads, module.head_dim)
    query, key, value = fused.permute(1, 2, 0, 3)  # [Hq, T, D] each
    scale = module.softmax_scale
    context = past_key_values.attend(module.layer_idx, query, key, value, scale=scale)
    return module.out_proj(context), None


def bloom_stack(module: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
    """`BloomModel.forward`."""
    if not isinstance(past_key_values, StepCache):
        return type(module).forward(module, *args, past_key_values=past_key_values, **kwargs)
    (token_ids,) = args
    hidden = module.word_embeddings_layernorm(module.word_embeddings(token_ids))
    for block in module.h:
        hidden = block(hidden, None, None, layer_past=past_key_values)[0]  # no ALiBi, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.ln_f(hidden))


def bloom_attention(
    module: Any, hidden: Tensor, residual: Tensor, *args: Any, layer_past: Any = None, **kwargs: Any
) -> Any:
    """`BloomAttention.forward`. hidden, residual: [1, T, hidden size]."""
    if not isinstance(layer_past, StepCache):
        kwargs["layer_past"] = layer_past
        return type(module).forward(module, hidden, residual, *args, **kwargs)
    fused = module.query_key_value(hidden)
    fused = fused.view(hidden.shape[1], module.num_heads, 3, module.head_dim)
    query, key, value = fused.permute(2, 1, 0, 3)  # [Hq, T, D] each
    scale = module.inv_norm_factor
    context = layer_past.attend(module.layer_idx, query, key, value, scale=scale)
    return module.dense(context) + residual, None
