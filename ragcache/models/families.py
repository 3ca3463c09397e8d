"""The table of served model families: what differs between architectures.

`wrap` prepares a loaded Hugging Face model for the engine: as a `CausalLM` where its attention can
read segments on its device, else as a `ContiguousLM`. A row of `FAMILIES` names what differs from a
model with rotary positions whose attention goes through `transformers.AttentionInterface`. A user
adds one:

    register(Family(("cohere",), interleaved=True))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ragcache.attention import backend_for, has_kernels
from ragcache.errors import UnsupportedModel
from ragcache.models.hf_patch import patch_attention, patch_bloom, patch_falcon, patch_mpt
from ragcache.models.model import SLIDING, CausalLM, ContiguousLM, Dimensions, LanguageModel
from ragcache.models.positions import (
    Alibi,
    LayeredRotary,
    Learned,
    PositionScheme,
    Rotary,
    check_scaling,
    geometric_slopes,
    interleaved_slopes,
    rotary_scaling,
)

FULL = "full_attention"
STATE_SPACES = ("mamba_d_state", "ssm_cfg", "state_size", "ssm_state_size")
BLOOM_LENGTH = 2048  # tokens; published configurations say it as `seq_length`, or not at all
_UNSERVED = {
    "is_encoder_decoder": "has an encoder and a decoder; only models that decode are served",
    "add_cross_attention": "attends to another sequence (cross attention), which is not served",
    "use_bidirectional_attention": "attends in both directions, so it continues no prompt",
    "attention_chunk_size": "attends within chunks (attention_chunk_size), which is not served",
    "kv_lora_rank": "keeps compressed states (kv_lora_rank), which is not served",
}
# Hugging Face passes over `attn_config.alibi_bias_max` and computes with its default.
MPT_BIAS_MAX = 8.0


def wrap(model: Any) -> LanguageModel:
    """Prepares a loaded Hugging Face model for the engine, in place: it reads segments if it can,
    else one buffer. Raises `UnsupportedModel` before anything is changed."""
    family = family_of(model.config)  # a model that no family serves is refused for that
    if whole_context(model.config) is None or (family.scheme is None and has_kernels(model.device)):
        return wrap_causal(model)
    return wrap_contiguous(model)


def wrap_causal(model: Any, *, kernels: bool | None = None) -> CausalLM:
    """Patches a Hugging Face model in place so that it reads segments. Raises `UnsupportedModel`
    before anything is changed.

    kernels: whether `DeviceModelRunner` computes its attention, with windows, caps and frequencies
    by layer; None where the device has such kernels.
    """
    config = model.config
    family = family_of(config)
    family.check(config)
    obstacle = whole_context(config)
    if kernels is None:
        kernels = has_kernels(model.device)
    if obstacle is not None and (family.scheme is not None or not kernels):
        _refuse(config, f"{obstacle}, so it cannot read segments here")
    scheme, dimensions = family.position_scheme(model), family.dimensions(config)
    windows = layer_windows(config, dimensions)
    softcap = getattr(config, "attn_logit_softcapping", None)
    family.patch(model)
    model.eval()
    return CausalLM(model, scheme, backend_for(model.device), dimensions, windows, softcap)


def wrap_contiguous(model: Any) -> ContiguousLM:
    """Prepares a Hugging Face model in place to read one buffer, for families that can. Raises
    `UnsupportedModel` before anything is changed."""
    config = model.config
    family = family_of(config)
    family.check(config)
    if family.scheme is not None:
        why = whole_context(config) or "reads segments"
        _refuse(config, f"{why}; its family is not served from one buffer")
    types, embedding = layer_types(config), family.rotary_embedding(model)
    scheme = LayeredRotary.of(config, embedding, types, interleaved=family.interleaved)
    # PyTorch's fused attention would silently leave the cap out
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("eager" if capped or not model._supports_sdpa else "sdpa")
    model.eval()
    return ContiguousLM(model, scheme, family.dimensions(config), types, sliding_window(config))


def stack_rotary(model: Any) -> nn.Module:
    """The module that holds the rotary frequencies: the stack's `rotary_emb`."""
    found = getattr(model.base_model, "rotary_emb", None)
    if not isinstance(found, nn.Module):
        raise UnsupportedModel(
            f"this {model.config.model_type} model has no `rotary_emb` in its stack; its "
            "family has to say where its frequencies are (`rotary_embedding`)"
        )
    return found


def check_properties(config: Any) -> None:
    """Raises `UnsupportedModel` and names the property that is not served."""
    for name, reason in _UNSERVED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            _refuse(config, reason)
    if config.model_type == "gpt_oss":
        _refuse(config, "has attention sinks, which no segment holds and which are not served")
    _check_layers(config)
    check_scaling(rotary_scaling(config))


def whole_context(config: Any) -> str | None:
    """Why the attention cannot be split over segments, except by the kernels of a GPU, though it
    can read one buffer. None where it can anywhere."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        return f"caps its attention scores at {cap} (attn_logit_softcapping)"
    window = sliding_window(config)
    context = getattr(config, "max_position_embeddings", None)
    if window is not None and (context is None or window < context):
        return (
            f"attends through a sliding window of {window} tokens, shorter than its context of "
            f"{context}; a cached module could stand outside the window"
        )
    if has_layered_frequencies(config):
        return "turns queries and keys by other frequencies in some layers than in others"
    return None


def sliding_window(config: Any) -> int | None:
    """The window in tokens, None where every layer sees the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and SLIDING not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def layer_types(config: Any) -> tuple[str, ...]:
    """Whether each layer sees everything or through the sliding window."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    every = FULL if sliding_window(config) is None else SLIDING
    return (every,) * int(config.num_hidden_layers)


def layer_windows(config: Any, dimensions: Dimensions) -> tuple[int | None, ...]:
    """See `CausalLM.windows`."""
    window = sliding_window(config)
    if window is None or window >= dimensions.window:
        return ()
    return tuple(window if each == SLIDING else None for each in layer_types(config))


def has_layered_frequencies(config: Any) -> bool:
    """Whether the rotary frequencies of some layers may be others than those of the rest."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(each, dict) for each in parameters.values())


@dataclass(frozen=True, slots=True)
class Family:
    """Models that are served alike.

    Args:
        model_types: The `model_type`s of the configurations.
        interleaved: Whether rotary dimensions 2i and 2i+1 turn as a pair, not i and i + R/2.
        rotary_embedding: Finds the module that holds the rotary frequencies of a model.
        scheme: Makes the position scheme of a model that is not plainly rotary. Such a family reads
            segments only, never one buffer, and has no windows, caps or frequencies by layer.
        dimensions: Reads the sizes of a model from its configuration.
        patch: Makes a model attend to a step's metadata where it is given one, in place. Raises
            `UnsupportedModel` before it changes anything.
        check: Raises `UnsupportedModel` and names the property of a configuration that is served in
            no way.

    Example:
        >>> from ragcache.models import Family, register
        >>> register(Family(("cohere",), interleaved=True))
    """

    model_types: tuple[str, ...]
    interleaved: bool = False
    rotary_embedding: Callable[[Any], nn.Module] = stack_rotary
    scheme: Callable[[Any], PositionScheme] | None = None
    dimensions: Callable[[Any], Dimensions] = Dimensions.of
    patch: Callable[[Any], None] = patch_attention
    check: Callable[[Any], None] = check_properties

    def position_scheme(self, model: Any) -> PositionScheme:
        """How the model knows the positions of its tokens."""
        if self.scheme is not None:
            return self.scheme(model)
        config, embedding = model.config, self.rotary_embedding(model)
        if has_layered_frequencies(config):
            types = layer_types(config)
            return LayeredRotary.of(config, embedding, types, interleaved=self.interleaved)
        return Rotary.of(config, embedding, interleaved=self.interleaved)


FAMILIES: dict[str, Family] = {}
"""The family of each `model_type` that is served."""


def register(family: Family) -> None:
    """Serves models of the family's types from now on, in place of what served them before."""
    for model_type in family.model_types:
        FAMILIES[model_type] = family


def family_of(config: Any) -> Family:
    """The family of a configuration. Raises `UnsupportedModel` where none is registered."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        check_properties(config)  # names the obstacle, where there is one beyond the name
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not served; served types: "
            f"{', '.join(sorted(FAMILIES))}. If its attention is causal and over plain keys and "
            "values, serve it with a row of its own: ragcache.models.families.register"
        )
    return family


def _falcon_scheme(model: Any) -> PositionScheme:
    """Rotary for 7B (one key head) and 40B (grouped key heads); ALiBi for RW (a head each)."""
    config = model.config
    if not config.alibi:
        return Rotary.of(config, stack_rotary(model))
    # Falcon keeps its slopes in bfloat16, and adds the bias before it scales the scores
    slopes = geometric_slopes(config.num_attention_heads).to(torch.bfloat16).float()
    return Alibi((slopes * config.head_dim**-0.5).to(model.device))


def _falcon_dimensions(config: Any) -> Dimensions:
    one = config.multi_query and not config.new_decoder_architecture
    return Dimensions.of(config, num_kv_heads=1 if one else config.num_kv_heads)


def _check_mpt(config: Any) -> None:
    check_properties(config)
    if not config.attn_config.alibi:
        _refuse(config, "has no ALiBi (attn_config.alibi is false)")
    if config.attn_config.prefix_lm:
        _refuse(config, "attends in both directions within a prefix (attn_config.prefix_lm)")


def _mpt_scheme(model: Any) -> PositionScheme:
    return Alibi(interleaved_slopes(model.config.n_heads, MPT_BIAS_MAX).to(model.device))


def _bloom_scheme(model: Any) -> PositionScheme:
    return Alibi(geometric_slopes(model.config.n_head).to(model.device))


def _check_layers(config: Any) -> None:
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted(set(listed or ()) - {FULL, SLIDING})
    if others:
        _refuse(config, f"has layers of type {', '.join(others)}; served are {FULL} and {SLIDING}")
    if any(hasattr(config, name) for name in STATE_SPACES):
        _refuse(config, "has state space layers, whose states are not keys and values")
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        _refuse(config, "has layers without positions (no_rope_layers), which is not served")


def _refuse(config: Any, reason: str) -> None:
    raise UnsupportedModel(f"this {config.model_type} model {reason}")


for _family in (
    Family(("llama", "mistral", "qwen2", "qwen3")),
    Family(("phi", "phi3")),  # all of a head turns, or a part of it
    Family(("gpt_neox",)),  # a quarter of a head turns
    Family(("gemma2", "gemma3_text")),  # soft caps, windows, frequencies by layer type
    # Falcon's own attention repeats grouped keys before it keeps them, so no buffer serves it
    Family(("falcon",), scheme=_falcon_scheme, dimensions=_falcon_dimensions, patch=patch_falcon),
    Family(
        ("mpt",),
        scheme=_mpt_scheme,
        dimensions=lambda config: Dimensions.of(config, window=config.max_seq_len),
        patch=patch_mpt,
        check=_check_mpt,
    ),
    Family(
        ("bloom",),
        scheme=_bloom_scheme,
        dimensions=lambda c: Dimensions.of(c, window=getattr(c, "seq_length", BLOOM_LENGTH)),
        patch=patch_bloom,
    ),
    Family(("gpt2", "opt"), scheme=lambda _: Learned()),
):
    register(_family)
