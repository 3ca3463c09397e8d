"""The table of served model families: what differs between architectures.

A row of `FAMILIES` names what differs from a model with rotary positions whose attention goes
through `transformers.AttentionInterface`. A user adds one, which is tried (`ragcache.models.trial`)
before it serves:

    register(Family(("mymodel",), interleaved=True))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ragcache.attention import backend_for
from ragcache.attention.layout import LayerHeads, StateLayout
from ragcache.errors import UnsupportedModel
from ragcache.models.flat_mixer import is_flat
from ragcache.models.hf_patch import (
    patch_attention,
    patch_bloom,
    patch_falcon,
    patch_latent,
    patch_mpt,
    patch_shared_block,
    patch_shared_states,
)
from ragcache.models.model import CausalLM, Dimensions
from ragcache.models.positions import (
    NO_POSITIONS,
    Absolute,
    Alibi,
    LayeredRotary,
    PositionScheme,
    Rotary,
    geometric_slopes,
    interleaved_slopes,
)
from ragcache.models.properties import (
    FULL,
    SLIDING,
    WITHOUT_FAMILY,
    check_hybrid,
    check_properties,
    layer_types,
    layer_windows,
    refuse,
)
from ragcache.models.recurrent import (
    HybridLM,
    LayerKinds,
    patch_recurrent,
    recurrent_mixers,
)

SOME_LAYERS, LEARNED = "rotary in some layers, none in others", "learned, so that nothing moves"
NORMED_LATER = "rotary before a norm with weights, so that nothing moves"
BLOOM_LENGTH = 2048  # tokens; published configurations say it as `seq_length`, or not at all
# Hugging Face passes over `attn_config.alibi_bias_max` and computes with its default.
MPT_BIAS_MAX = 8.0


def wrap_causal(model: Any) -> CausalLM:
    """Patch a Hugging Face model in place so that it reads segments, without a trial. Raises
    `UnsupportedModel` before anything is changed."""
    config = model.config
    family = family_of(config)
    family.check(config)
    dimensions, kinds = family.dimensions(config), LayerKinds.of(config)
    if kinds.recurrent:
        dimensions = replace(dimensions, num_layers=len(kinds.keys))
    scheme = family.position_scheme(model)
    windows = layer_windows(config, dimensions)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if family.scheme is not None and (windows or softcap is not None):
        refuse(config, "has windows or soft caps, which its family's attention does not know")
    family.patch(model)
    model.eval()
    args = (model, scheme, backend_for(model.device), dimensions, windows, softcap)
    kernels = family.kernels and not (dimensions.latent and (windows or softcap is not None))
    if not kinds.recurrent:
        causal = CausalLM(*args, kernels=kernels)
        causal.whole_layers = family.whole_layers
        return causal
    patch_recurrent(model, kinds)
    kernels = kernels and all(map(is_flat, recurrent_mixers(model)))
    return HybridLM(*args, kinds=kinds, kernels=kernels)


def stack_rotary(model: Any) -> nn.Module:
    """The module that holds the rotary frequencies: the stack's `rotary_emb`."""
    stack = model.base_model
    found = getattr(stack, "rotary_emb", getattr(stack, "pos_emb", None))  # LFM2's mixtures
    buffers = () if not isinstance(found, nn.Module) else dict(found.named_buffers())
    if not any("inv_freq" in name for name in buffers):
        raise UnsupportedModel(
            f"this {model.config.model_type} model has no `rotary_emb` with frequencies (inv_freq) "
            "in its stack; its family has to make its position scheme (`scheme`)"
        )
    assert isinstance(found, nn.Module)
    return found


@dataclass(frozen=True, slots=True)
class Family:
    """Models that are served alike.

    Example:
        >>> from ragcache.models import Family, register
        >>> register(Family(("cohere",), interleaved=True))
    """

    model_types: tuple[str, ...]
    """The `model_type`s of the configurations."""
    interleaved: bool = False
    """Whether rotary dimensions 2i and 2i+1 turn as a pair, not i and i + R/2."""
    backward: bool = False
    """Whether keys turn by minus the angle of their position."""
    silent_layers: Callable[[Any], tuple[bool, ...]] | None = None
    """Returns, for each layer of a configuration, whether it has no positions."""
    scheme: Callable[[Any], PositionScheme] | None = None
    """Creates the position scheme of a model that is not plainly rotary. Such a family has no
    windows, caps or frequencies by layer."""
    dimensions: Callable[[Any], Dimensions] = Dimensions.of
    """Reads the sizes of a model from its configuration."""
    patch: Callable[[Any], None] = patch_attention
    """Makes a model attend to a step's metadata if one is given, in place. Raises
    `UnsupportedModel` before it changes anything."""
    check: Callable[[Any], None] = check_properties
    """Raises `UnsupportedModel` and names the property of a configuration that is not served."""
    kernels: bool = True
    """Whether the kernels of a GPU compute its attention. They do not know heads of two sizes, or
    windows over latents."""
    positions: str = "rotary"
    """Name of the positions in docs/models.md."""
    recurrent: str = ""
    """Name of the recurrent layers that its models may have beside attention."""
    whole_layers: bool = False
    """Whether the last layer must compute all rows too, because the code around it counts them
    (docs/internals/adr/0116)."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Configuration values of the tiny model of the trial, if the values derived from the model do
    not fit. A function gets the tiny configuration."""

    def position_scheme(self, model: Any) -> PositionScheme:
        """How the model knows the positions of its tokens."""
        if self.scheme is not None:
            return self.scheme(model)
        config, embedding = model.config, stack_rotary(model)
        parameters = getattr(config, "rope_parameters", None) or {}
        layered = any(isinstance(each, dict) for each in parameters.values())
        numbers = LayerKinds.of(config).keys[: self.dimensions(config).num_layers]
        types = {n: layer_types(config)[n] if layered else None for n in numbers}
        rotaries = {each: self._rotary(config, embedding, each) for each in set(types.values())}
        layers = tuple(rotaries[each] for each in types.values())
        if self.silent_layers is not None:
            none, silent = layers[0].silent(), self.silent_layers(config)
            layers = tuple(
                none if silent[n] else each for n, each in zip(numbers, layers, strict=True)
            )
        if not layered and len(set(layers)) == 1:
            return layers[0]
        return LayeredRotary(layers)

    def _rotary(self, config: Any, embedding: nn.Module, layer_type: str | None) -> Rotary:
        return Rotary.of(
            config,
            embedding,
            interleaved=self.interleaved,
            backward=self.backward,
            layer_type=layer_type,
        )


FAMILIES: dict[str, Family] = {}
"""The family of each `model_type` that is served."""


def register(family: Family) -> None:
    """Serve models of the family's types, in place of their present family.

    Before the first model of an architecture serves, the family is tried on a tiny one
    (`ragcache.models.trial`).
    """
    for model_type in family.model_types:
        FAMILIES[model_type] = family


def family_of(config: Any) -> Family:
    """The family of a configuration. Raises `UnsupportedModel` where none is registered."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        if config.model_type in WITHOUT_FAMILY:
            refuse(config, WITHOUT_FAMILY[config.model_type])
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
        refuse(config, "has no ALiBi (attn_config.alibi is false)")
    if config.attn_config.prefix_lm:
        refuse(config, "attends in both directions within a prefix (attn_config.prefix_lm)")


def _mpt_scheme(model: Any) -> PositionScheme:
    return Alibi(interleaved_slopes(model.config.n_heads, MPT_BIAS_MAX).to(model.device))


def _bloom_scheme(model: Any) -> PositionScheme:
    return Alibi(geometric_slopes(model.config.n_head).to(model.device))


def _unturned(config: Any) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` is 1 where a layer has positions."""
    return tuple(not turns for turns in config.no_rope_layers)


def _full_layers(config: Any) -> tuple[bool, ...]:
    """Only layers with a sliding window have positions."""
    return tuple(each != SLIDING for each in config.layer_types)


def _full_layers_beside_windows(config: Any) -> tuple[bool, ...]:
    """EXAONE 4: where there are windows, only layers with one have positions."""
    if config.sliding_window is None:
        return (False,) * len(config.layer_types)
    return _full_layers(config)


def _own_layers(config: Any) -> Dimensions:
    """Gemma 3n: the last layers have no states of their own."""
    return replace(
        Dimensions.of(config),
        num_layers=config.num_hidden_layers - config.num_kv_shared_layers,
    )


def _heads_by_layer(config: Any) -> Dimensions:
    """Gemma 4: the number and size of key heads differ by layer, and the last layers may have no
    states of their own."""
    count = config.num_hidden_layers - config.num_kv_shared_layers
    layout = StateLayout.of(
        [
            LayerHeads(int(each.num_key_value_heads), int(each.head_dim))
            for each in config.per_layer_config[:count]
        ]
    )
    return Dimensions(
        num_layers=count,
        num_heads=int(config.num_attention_heads),
        num_kv_heads=layout.num_heads,
        head_dim=layout.head_dim,
        window=int(config.max_position_embeddings),
        layout=layout,
    )


def _granite_hybrid_scheme(model: Any) -> PositionScheme:
    """Rotary, or no positions at all (`position_embedding_type`)."""
    if model.config.position_embedding_type == "rope":
        return Rotary.of(model.config, stack_rotary(model))
    return _no_positions(model)


def _zamba2_scheme(model: Any) -> PositionScheme:
    """Rotary, or no positions at all (`use_mem_rope`)."""
    if model.config.use_mem_rope:
        return Rotary.of(model.config, stack_rotary(model))
    return _no_positions(model)


def _no_positions(model: Any) -> PositionScheme:
    """Attention without positions: a recurrent layer knows the order of tokens."""
    half = Dimensions.of(model.config).head_dim // 2
    return Rotary(torch.zeros(half, device=model.device), NO_POSITIONS)


def _latent(config: Any) -> Dimensions:
    """One key head, the rotary key and the latent, which serves as values, too."""
    width = config.qk_rope_head_dim + config.kv_lora_rank
    return replace(
        Dimensions.of(config), num_kv_heads=1, head_dim=width, latent=config.kv_lora_rank
    )


def _one_key_head(config: Any) -> Dimensions:
    """GPT BigCode: one key head for all, or one each."""
    return Dimensions.of(config, num_kv_heads=1 if config.multi_query else config.n_head)


_LATENT = Family(
    ("deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1"),
    dimensions=_latent,
    patch=patch_latent,
    check=lambda config: check_properties(config, served=("kv_lora_rank",)),
    positions="rotary beside a latent",
)

_TINY_DELTA: Mapping[str, Any] = {
    "linear_num_value_heads": lambda c: 2 * c.linear_num_value_heads // c.linear_num_key_heads,
    "linear_num_key_heads": 2,
}
_TINY_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": lambda config: min(2, config.mamba_n_groups),
    "mamba_d_head": lambda config: config.mamba_expand * config.hidden_size // 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
"""The heads of these layers divide a multiple of the residual stream."""
_TINY_ZAMBA: Mapping[str, Any] = {
    "layers_block_type": ["hybrid", "hybrid"],
    "hybrid_layer_ids": [0, 1],
    "n_mamba_heads": 8,
    "mamba_headdim": lambda config: config.mamba_expand * config.hidden_size // 8,
    "mamba_ngroups": lambda config: min(2, config.mamba_ngroups),
    "mamba_d_state": 16,
    "chunk_size": 16,
    "attention_hidden_size": lambda config: 2 * config.hidden_size,
    "attention_head_dim": lambda config: 2 * config.hidden_size // config.num_attention_heads,
    "time_step_min": 1e-30,  # clamps the time steps of a text, not those of one token
}

for _family in (
    Family(
        (
            *("llama", "mistral", "qwen2", "qwen3"),
            *("phi", "phi3", "gpt_neox", "persimmon"),  # a part of a head may turn
            *("gemma", "gemma2", "gemma3_text", "vaultgemma"),  # caps, windows, two frequencies
            *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "granitemoeshared"),
            *("glm4_moe", "phimoe", "minimax_m2", "dots1", "flex_olmo"),
            *("solar_open", "mellum", "granitemoe_swa", "granite_swa", "hyperclovax"),
            *("internlm3", "iquestcoder"),
            *("ministral", "ministral3", "granite", "olmo", "olmo2", "olmo3", "starcoder2"),
            *("seed_oss", "arcee", "apertus", "bitnet", "cwm", "jais2"),
            *("stablelm", "nemotron"),  # they drop keyword arguments
            "gpt_oss",  # sinks
        )
    ),
    Family(
        ("cohere", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"),
        interleaved=True,
        positions="rotary, interleaved",
    ),
    # text models of composite checkpoints: the positions in their three axes are equal for text
    Family(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")),
    Family(("nanochat",), backward=True, positions="rotary, backward"),
    Family(("smollm3",), silent_layers=_unturned, positions=SOME_LAYERS),
    Family(
        ("cohere2",),
        interleaved=True,
        silent_layers=_full_layers,
        positions=f"{SOME_LAYERS}, interleaved",
    ),
    Family(("afmoe",), silent_layers=_full_layers, positions=SOME_LAYERS),
    Family(("exaone4",), silent_layers=_full_layers_beside_windows, positions=SOME_LAYERS),
    _LATENT,
    replace(
        _LATENT,
        model_types=("deepseek_v2",),
        interleaved=True,
        positions=f"{_LATENT.positions}, interleaved",
    ),
    Family(
        ("gemma3n_text",),
        dimensions=_own_layers,
        patch=patch_shared_states,
        tiny={
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    Family(
        ("gemma4_text", "gemma4_unified_text"),
        dimensions=_heads_by_layer,
        patch=patch_shared_states,
        check=lambda config: check_properties(config, served=("head_dim", "num_key_value_heads")),
        kernels=False,
    ),
    Family(
        ("granitemoehybrid",),
        scheme=_granite_hybrid_scheme,
        check=check_hybrid,
        positions="rotary or none",
        recurrent="Mamba 2",
        tiny=_TINY_MAMBA,
    ),
    Family(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
        check=check_hybrid,
        recurrent="Gated DeltaNet",
        tiny=_TINY_DELTA,
    ),
    Family(
        ("bamba",),
        check=check_hybrid,
        recurrent="Mamba 2",
        tiny={**_TINY_MAMBA, "attn_layer_indices": [1]},
    ),
    Family(
        ("falcon_h1",),
        check=check_hybrid,
        recurrent="Mamba 2",
        tiny={**_TINY_MAMBA, "mamba_d_ssm": None},
    ),
    Family(("lfm2", "lfm2_moe", "lfm3"), check=check_hybrid, recurrent="short convolutions"),
    Family(
        ("nemotron_h",),
        scheme=_no_positions,
        check=check_hybrid,
        positions="none",
        recurrent="Mamba 2",
        tiny={
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            # transformers clamps the time steps of a text at this value, not those of one token
            "time_step_min": 1e-30,
        },
    ),
    Family(
        ("kimi_linear",),
        scheme=_no_positions,
        dimensions=_latent,
        patch=patch_latent,
        check=lambda config: check_hybrid(config, served=("kv_lora_rank",)),
        positions="none, over a latent",
        recurrent="Kimi Delta Attention",
        tiny={"linear_num_heads": 2},
    ),
    Family(
        ("bailing_hybrid",),
        dimensions=_latent,
        patch=patch_latent,
        check=lambda config: check_hybrid(config, served=("kv_lora_rank",)),
        positions=_LATENT.positions,
        recurrent="Kimi Delta Attention",
        tiny={"linear_num_heads": 2, "n_group": 2, "topk_group": 1},
    ),
    Family(
        ("zamba2",),
        scheme=_zamba2_scheme,
        patch=patch_shared_block,
        check=check_hybrid,
        positions="rotary or none",
        recurrent="Mamba 2",
        tiny=_TINY_ZAMBA,
    ),
    Family(
        ("falcon",),
        scheme=_falcon_scheme,
        dimensions=_falcon_dimensions,
        patch=patch_falcon,
        positions="rotary or ALiBi",
    ),
    Family(
        ("mpt",),
        scheme=_mpt_scheme,
        dimensions=lambda config: Dimensions.of(config, window=config.max_seq_len),
        patch=patch_mpt,
        positions="ALiBi",
        check=_check_mpt,
    ),
    Family(
        ("bloom",),
        scheme=_bloom_scheme,
        dimensions=lambda c: Dimensions.of(c, window=getattr(c, "seq_length", BLOOM_LENGTH)),
        patch=patch_bloom,
        positions="ALiBi",
    ),
    Family(("opt",), scheme=lambda _: Absolute("learned"), positions=LEARNED),
    Family(("gpt2",), scheme=lambda _: Absolute("learned"), positions=LEARNED, whole_layers=True),
    Family(
        ("gpt_bigcode",),
        scheme=lambda _: Absolute("learned"),
        dimensions=_one_key_head,
        positions=LEARNED,
        whole_layers=True,
    ),
    Family(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        scheme=lambda _: Absolute("rotary:normed"),
        positions=NORMED_LATER,
    ),
):
    register(_family)
