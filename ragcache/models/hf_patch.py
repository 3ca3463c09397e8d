"""The patch: Hugging Face's own hooks, no copied modeling code.

`AttentionInterface` lets a model call `ragged_attention` instead of its attention kernel, and a
`Cache` subclass receives each layer's new keys and values. Models that know no attention interface
(Falcon, MPT, BLOOM) get two other forwards, in place: their stack's, which builds neither a mask
nor an ALiBi tensor over all tokens, and their attention's, over the module's own projections. Both
call the class's own where the cache is not a `SegmentCache`.

Families that drop keyword arguments before their attention (StableLM, Nemotron) get the step's
metadata from a context variable (`step_in_context`).

Without attention metadata (an ordinary call of the patched model) the model behaves as before. With
`OperatorMetadata` each layer attends through the operator `ragcache::attend`, and can be compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ragcache.attention import AttentionBackend, AttentionMetadata, Rotation, rotate
from ragcache.attention.triton.operator import OperatorMetadata, attend
from ragcache.errors import UnsupportedModel

IMPLEMENTATION = "ragcache"
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
"""Names under which modules of transformers take their cache, most of them `cache` since 5.24."""
Step = tuple[AttentionMetadata | OperatorMetadata, AttentionBackend]
_STEP: ContextVar[Step | None] = ContextVar("ragcache_step", default=None)


@contextmanager
def step_in_context(
    metadata: AttentionMetadata | OperatorMetadata, backend: AttentionBackend
) -> Iterator[None]:
    """Provide the metadata of a step to models that drop keyword arguments, within this thread."""
    token = _STEP.set((metadata, backend))
    try:
        yield
    finally:
        _STEP.reset(token)


class SegmentCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Writes each layer's new states where the step's metadata wants them."""

    rows: Tensor | None = None
    """Rows for which the last layer computes its output, int64 [R]. Unset if for all."""

    def __init__(
        self, metadata: AttentionMetadata | OperatorMetadata, backend: AttentionBackend
    ) -> None:
        super().__init__(layers=[])
        self.metadata = metadata
        self.backend = backend

    @property
    def through_operators(self) -> bool:
        """Whether the layers of the step go through operators, and can be compiled."""
        return isinstance(self.metadata, OperatorMetadata)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, Hkv, T, D]; returned as they are."""
        self.metadata.write_states(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """Write a layer's new states, then attend to everything in the metadata.

        Args:
            module: The attention module.
            query: [Hq, T, D].
            key: [Hkv, T, D].
            value: [Hkv, T, D].
            scale: Factor of the scores.

        Returns:
            [1, T, Hq * D].
        """
        query, key, value = query[None], key[None], value[None]
        self.update(key, value, module.layer_idx)
        out = attend_layer(module, query, key, value, scale, self.metadata, self.backend)
        return out.flatten(2)

    def attend_latents(
        self, module: Any, query: Tensor, states: Tensor, width: int, *, scale: float
    ) -> Tensor:
        """Write a layer's new states, whose ends serve as values, and attend as `attend` does.

        Args:
            module: The attention module.
            query: [Hq, T, D].
            states: [1, T, D]. Kept once, as keys.
            width: C, the width of the latent at the end of each state.
            scale: Factor of the scores.

        Returns:
            Sums of latents [T, Hq, C].
        """
        query, key = query[None], states[None]
        self.update(key, key[..., :0], module.layer_idx)
        # by definition, whole keys are the values, as segments hold them
        value = key[..., -width:] if self.through_operators else key
        out = attend_layer(module, query, key, value, scale, self.metadata, self.backend)
        return out[0, ..., -width:]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0


def attend_layer(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    metadata: AttentionMetadata | OperatorMetadata,
    backend: AttentionBackend,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one layer. query: [1, Hq, T, D]; returns [1, T, Hq, D], as wide as the value.
    Windows and soft caps are the step's own, which the operator finds."""
    if isinstance(metadata, OperatorMetadata):
        handle = metadata.handle
        out: Tensor = attend(query, key, value, module.ragcache_layer, scale, handle, sinks)
        return out
    metadata, layer = metadata.of_layer(states_layer(module))
    out = backend.attend(metadata, layer, query[0], key[0], value[0], scale=scale, sinks=sinks)
    return out[None].contiguous()  # some models take a view


def states_layer(module: Any) -> int:
    """The layer whose states an attention module reads: its own, or the one before it that shares
    its states with later ones (Gemma 3n and 4)."""
    layer = getattr(module, "ragcache_states_layer", module.layer_idx)
    assert isinstance(layer, int)
    return layer


def number_layers(model: nn.Module) -> None:
    """Gives every attention module its layer's number as a tensor, which compiled code takes as an
    input: one graph then serves all layers."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.ragcache_layer = torch.tensor(states_layer(module), device="cpu")


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_metadata: AttentionMetadata | OperatorMetadata | None = None,
    backend: AttentionBackend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: [1, Hq, T, D]; returns [1, T, Hq, D]; s_aux: [Hq], attention sinks. See
    `AttentionInterface`. Raises `UnsupportedModel` where scores would not be capped, or sinks not
    be counted, as the layer wants."""
    if attention_metadata is None and (step := _STEP.get()) is not None:
        attention_metadata, backend = step
    cap = None if attention_metadata is None else attention_metadata.softcap
    if softcap != cap:
        raise UnsupportedModel(
            f"this layer caps its scores at {softcap}, and its attention at {cap}; a model with "
            "capped scores is called by the engine only, once it is patched"
        )
    if attention_metadata is None or backend is None:
        if s_aux is not None:
            raise UnsupportedModel(
                "this layer has attention sinks, which an ordinary call of the patched model does "
                "not count; a model with sinks is called by the engine only, once it is patched"
            )
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = attend_layer(module, query, key, value, scale, attention_metadata, backend, s_aux)
    return attended, None


def patch_attention(model: Any) -> None:
    """Makes a Hugging Face model attend through `ragged_attention`, in place. Raises
    `UnsupportedModel` where it does not call the attention interface."""
    AttentionInterface.register(IMPLEMENTATION, ragged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:  # transformers only warned
        raise UnsupportedModel(
            f"this {model.config.model_type} model does not call transformers' attention "
            "interface; its family has to replace its attention (`Family.patch`)"
        )


def patch_shared_states(model: Any) -> None:
    """`patch_attention` where the last layers may read the states of earlier ones (Gemma 3n and 4):
    of the last layer of their type that has states of its own."""
    patch_attention(model)
    source: dict[str, int] = {}
    for layer in model.base_model.layers:
        attention = layer.self_attn
        if attention.is_kv_shared_layer:
            attention.ragcache_states_layer = source[attention.layer_type]
        else:
            source[attention.layer_type] = attention.layer_idx


def patch_latent(model: Any) -> None:
    """Replaces the attention of DeepSeek V3's kind (multi-head latent attention), in place."""
    patch_attention(model)
    for layer in model.base_model.layers:
        attention = getattr(layer, "self_attn", None)  # Kimi's recurrent layers have none
        if attention is not None:
            attention.forward = MethodType(_where_segments(latent_attention), attention)


def patch_shared_block(model: Any) -> None:
    """Tells each of Zamba 2's attentions the layer whose states it reads, in place.

    The layers with attention share its weights, and transformers passes the number of the layer
    as an argument.
    """
    patch_attention(model)
    for number, layer in enumerate(model.base_model.layers):
        shared = getattr(layer, "shared_transformer", None)
        if shared is not None:
            shared.self_attn.layer_idx = number


def patch_falcon(model: Any) -> None:
    """Replaces the forwards of Falcon, in place."""
    attentions = [block.self_attention for block in model.transformer.h]
    _replace_forwards(model.transformer, falcon_stack, attentions, falcon_attention)


def patch_mpt(model: Any) -> None:
    """Replaces the forwards of MPT, in place."""
    attentions = [block.attn for block in model.transformer.blocks]
    _replace_forwards(model.transformer, mpt_stack, attentions, mpt_attention)


def patch_bloom(model: Any) -> None:
    """Replaces the forwards of BLOOM, in place."""
    attentions = [block.self_attention for block in model.transformer.h]
    _replace_forwards(model.transformer, bloom_stack, attentions, bloom_attention)


def _replace_forwards(
    stack: Any, forward: Callable[..., Any], attentions: list[Any], attend: Callable[..., Any]
) -> None:
    """Gives a stack and its attentions other forwards for calls with a `SegmentCache`; any other
    call goes to the class's own."""
    for module, new in [(stack, forward), *((each, attend) for each in attentions)]:
        module.forward = MethodType(_where_segments(new), module)


def _where_segments(forward: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(module: Any, *args: Any, **kwargs: Any) -> Any:
        name, cache = given_cache(kwargs)
        if not isinstance(cache, SegmentCache):
            return type(module).forward(module, *args, **kwargs)
        others = {each: value for each, value in kwargs.items() if each != name}
        return forward(module, *args, cache=cache, **others)

    return chosen


def given_cache(kwargs: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return the cache among the arguments of a call, and its name, or None for both."""
    name = next((each for each in CACHE_NAMES if each in kwargs), None)
    return name, None if name is None else kwargs[name]


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name under which a function of transformers takes its cache."""
    parameters = inspect.signature(forward).parameters
    return next(each for each in CACHE_NAMES if each in parameters)


def latent_attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,
    *_args: Any,
    cache: SegmentCache,
    **_: Any,
) -> Any:
    """The forward of DeepSeek's attentions over latents (DeepSeek-V2 §2.1.2, absorbed projections).

    A state is the rotary key, R, and the latent, C, behind it: one key head of width R + C for all
    query heads. A query is carried into the latent's space, q W_k. Attention returns a sum of
    latents, from which W_v makes the values. The rotary part comes first, where moving a segment
    turns it.
    """
    tokens, turned, width = hidden_states.shape[1], module.qk_rope_head_dim, module.kv_lora_rank
    if getattr(module, "q_lora_rank", None) is None:
        query = module.q_proj(hidden_states)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    query = query.view(1, tokens, -1, module.qk_head_dim).transpose(1, 2)  # [1, Hq, T, N + R]
    plain, rotary = query.split([module.qk_nope_head_dim, turned], -1)
    latent, key = module.kv_a_proj_with_mqa(hidden_states).split([width, turned], -1)
    latent = module.kv_a_layernorm(latent)  # [1, T, C]
    key = key[:, None]
    if position_embeddings is not None:  # Kimi's attention has no positions
        rotary, key = _turn(module, rotary, key, position_embeddings)
    weight = module.kv_b_proj.weight.view(module.num_heads, -1, width)  # [Hq, N + V, C]
    to_latent, to_value = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    query = torch.cat([rotary[0], plain[0] @ to_latent], -1)  # [Hq, T, R + C]
    states = torch.cat([key[0], latent], -1)  # [1, T, R + C]
    latents = cache.attend_latents(module, query, states, width, scale=module.scaling)
    values = (latents.transpose(0, 1) @ to_value.transpose(1, 2)).transpose(0, 1)  # [T, Hq, V]
    if hasattr(module, "g_proj"):  # Bailing's gate, one number a head
        gate = module.g_proj(hidden_states[0]).float().sigmoid().to(values.dtype)
        values = values * gate[..., None]
    return module.o_proj(values.flatten(1)[None]), None


def _turn(
    module: Any, query: Tensor, key: Tensor, by: tuple[Tensor, Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """Rotary queries and keys, [1, H, T, R], by the function of the module's own code. by: cos and
    sin, or complex numbers (DeepSeek V2), under which pairs stay interleaved. Compilers know no
    complex numbers."""
    if isinstance(by, Tensor):
        rotation = Rotation(by.real, by.imag, interleaved=True)
        return rotate(query, rotation), rotate(key, rotation)
    code = sys.modules[type(module).__module__]
    if getattr(module.config, "rope_interleave", not hasattr(code, "apply_rotary_pos_emb")):
        turned = code.apply_rotary_pos_emb_interleave(query, key, *by)
    else:
        turned = code.apply_rotary_pos_emb(query, key, *by)
    return turned  # type: ignore[no-any-return]  # transformers is not typed


def falcon_stack(
    module: Any, token_ids: Tensor, *, cache: SegmentCache, position_ids: Tensor, **_: Any
) -> Any:
    """`FalconModel.forward`."""
    hidden = module.word_embeddings(token_ids)
    turning = None if module.use_alibi else module.rotary_emb(hidden, position_ids=position_ids)
    for block in module.h:
        states = {"layer_past": cache, "position_embeddings": turning}
        hidden = block(hidden, None, None, **states)[0]  # no ALiBi, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.ln_f(hidden))


def falcon_attention(
    module: Any,
    hidden: Tensor,
    *_args: Any,
    cache: SegmentCache,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> Any:
    """`FalconAttention.forward`. hidden: [1, T, hidden size]. In every form of Falcon the heads are
    in groups: G queries, then their key and value."""
    tokens, groups, dim = hidden.shape[1], module.num_kv_heads, module.head_dim
    fused = module.query_key_value(hidden).view(tokens, groups, -1, dim).permute(1, 2, 0, 3)
    query = fused[:, :-2].reshape(-1, tokens, dim)  # [Hq, T, D]
    key, value = fused[:, -2], fused[:, -1]  # [Hkv, T, D]
    if position_embeddings is not None:
        cos, sin = (each[0, :, : dim // 2] for each in position_embeddings)  # halves are equal
        query, key = rotate(query, Rotation(cos, sin)), rotate(key, Rotation(cos, sin))
    context = cache.attend(module, query, key, value, scale=dim**-0.5)
    return module.dense(context), None


def mpt_stack(module: Any, token_ids: Tensor, *, cache: SegmentCache, **_: Any) -> Any:
    """`MptModel.forward`."""
    hidden = module.wte(token_ids)
    for block in module.blocks:
        hidden = block(hidden, None, None, layer_past=cache)[0]  # no bias, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.norm_f(hidden))


def mpt_attention(module: Any, hidden: Tensor, *, cache: SegmentCache, **_: Any) -> Any:
    """`MptAttention.forward`. hidden: [1, T, hidden size]."""
    fused = module.Wqkv(hidden)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    fused = fused.view(hidden.shape[1], 3, module.n_heads, module.head_dim)
    query, key, value = fused.permute(1, 2, 0, 3)  # [Hq, T, D] each
    scale = module.softmax_scale
    context = cache.attend(module, query, key, value, scale=scale)
    return module.out_proj(context), None


def bloom_stack(module: Any, token_ids: Tensor, *, cache: SegmentCache, **_: Any) -> Any:
    """`BloomModel.forward`."""
    hidden = module.word_embeddings_layernorm(module.word_embeddings(token_ids))
    for block in module.h:
        hidden = block(hidden, None, None, layer_past=cache)[0]  # no ALiBi, no mask
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.ln_f(hidden))


def bloom_attention(
    module: Any, hidden: Tensor, residual: Tensor, *, cache: SegmentCache, **_: Any
) -> Any:
    """`BloomAttention.forward`. hidden, residual: [1, T, hidden size]."""
    fused = module.query_key_value(hidden)
    fused = fused.view(hidden.shape[1], module.num_heads, 3, module.head_dim)
    query, key, value = fused.permute(2, 1, 0, 3)  # [Hq, T, D] each
    scale = module.inv_norm_factor
    context = cache.attend(module, query, key, value, scale=scale)
    return module.dense(context) + residual, None
