"""Every family of the table answers as Hugging Face; one that does not is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, Family, LayeredRotary, register, trial, wrap
from ragcache.models.checkpoint import text_class
from ragcache.models.families import FAMILIES, family_of
from ragcache.models.properties import layer_types
from ragcache.models.trial import (
    TOLERANCE,
    expected_logits,
    tiny_config,
    tiny_model,
    trial_difference,
    try_family,
)
from tests.tiny_hybrids import tiny_hybrid

FULL, SLIDING = "full_attention", "sliding_attention"
AXES = {"rope_type": "default", "rope_theta": 1e6}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 48, "moe_intermediate_size": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 32},
    "bamba": {"attn_layer_indices": [9, 18]},
    "lfm2": {"layer_types": ["conv", FULL] * 16},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 16},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1"), LATENT),
    "qwen2_vl_text": {"rope_parameters": {**AXES, "mrope_section": [16, 24, 24]}},
    "qwen2_5_vl_text": {"rope_parameters": {**AXES, "mrope_section": [16, 24, 24]}},
}  # fmt: skip
"""Values for configurations whose defaults make no model that is served."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "without a window": ("mistral", {"sliding_window": None}),
    "a window in some layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "no windows, positions everywhere": (
        "exaone4", {"sliding_window": None, "layer_types": [FULL] * 32},
    ),
    "state spaces beside attention": (
        "granitemoehybrid", {"layer_types": ["linear_attention", FULL] * 16},
    ),
    "rotary in a hybrid without state spaces": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 32, "position_embedding_type": "rope"},
    ),
    "latents, queries as they are": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "latents, halves turn": ("deepseek_v3", {**LATENT, "rope_interleave": False}),
    "latents, yarn": ("deepseek_v2", {
        **LATENT, "num_experts_per_tok": 2, "max_position_embeddings": 640, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7,
            "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}},
    ),
    "one key head a query head": ("gpt_bigcode", {"multi_query": False}),
    "ALiBi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}),
    "groups of key heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    "dynamic NTK": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4, "rope_theta": 1e4}},
    ),
    "yarn": (
        "qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
    ),
    "half of a head turns": (
        "glm", {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "heads of two sizes, states shared": (
        "gemma4_text", {
            "num_hidden_layers": 35, "num_kv_shared_layers": 20, "num_key_value_heads": 1,
            "use_double_wide_mlp": True, "head_dim": 32, "global_head_dim": 64}),
    "heads of two sizes, keys as values": (
        "gemma4_text", {
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 8,
            "top_k_experts": 2, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0,
            "head_dim": 32, "global_head_dim": 64}),
    "normalized queries": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "normalized after the rotation": ("hunyuan_v1_dense", {}),
    "normalized queries, interleaved": ("cohere", {"use_qk_norm": True}),
}  # fmt: skip
BRIEF = (
    "heads of two sizes, keys as values",
    "normalized after the rotation",
    "a window in some layers",
    "latents, yarn",
    "ALiBi",
    "yarn",
    "half of a head turns",
    "state spaces beside attention",
)
VARIANT_PARAMS = [pytest.param(v, marks=() if v in BRIEF else pytest.mark.slow) for v in VARIANTS]


HYBRIDS = {name for name, each in FAMILIES.items() if each.recurrent} - {"granitemoehybrid"}
"""Families whose models of the trial have recurrent layers."""


def make_config(model_type: str, **changes: Any) -> Any:
    """A configuration by its name; skips where transformers has no such model."""
    try:
        return AutoConfig.for_model(model_type, **{**CHANGES.get(model_type, {}), **changes})
    except ValueError as error:
        if "Unrecognized model" not in str(error):
            raise
        pytest.skip(f"this version of transformers has no {model_type}")


def tiny(config: Any) -> Any:
    """Return the tiny model of the configuration's family."""
    kind, family = text_class(config), family_of(config)
    family.check(config)
    return tiny_model(kind, tiny_config(config, family), 7)


def difference(config: Any) -> float:
    """Return the difference of the family's tiny model from Hugging Face."""
    return trial_difference(tiny(config))


@torch.inference_mode()
def dense_logits(model: Any, modules: list[Tensor], own: Tensor, behind: Tensor) -> Tensor:
    """Return the own tokens' logits from one forward pass of the whole text, with a mask and
    positions.

    The mask hides each module from the other. Tokens behind which the last module was encoded stand
    right before it, at positions of the first, and only that module sees them.
    """
    config, token_ids = model.config, torch.cat([*modules[:-1], behind, modules[-1], own])
    first, last = map(len, modules)
    rows = torch.arange(len(token_ids))
    positions = torch.where(rows < first, rows, rows - len(behind))
    other = (rows >= first) & (rows < first + len(behind))
    block = (rows >= first).long() + (rows >= first + len(behind) + last)
    sees = (block[:, None] == block) | ((block[:, None] == 2) & ~other)
    sees &= rows[:, None] >= rows
    masks = {}
    for layer_type in set(layer_types(config)):
        window = config.sliding_window if layer_type == SLIDING else len(rows)
        hidden = ~(sees & (positions[:, None] - positions < window))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        masks[layer_type] = mask[None, None]
    listed = getattr(config, "layer_types", None) is not None
    logits: Tensor = model(
        token_ids[None],
        position_ids=positions[None],
        attention_mask=masks if listed else masks.popitem()[1],
        use_cache=False,
    ).logits
    return logits[0, -len(own) :]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_two_moved_modules_answer_as_the_whole_text(model_type: str) -> None:
    assert difference(make_config(model_type)) < TOLERANCE / 10


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.nightly), 9])
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"bloom"} - HYBRIDS))
def test_what_is_expected_is_a_dense_masked_forward(model_type: str, count: int) -> None:
    """BLOOM has no dense mask of this shape: it makes ALiBi of a mask for padding. MPT makes it of
    the number of tokens."""
    if count and model_type == "mpt":
        pytest.skip("positions in a pass of MPT are numbers of tokens")
    model, behind = tiny(make_config(model_type)), torch.arange(200, 200 + count)
    modules, own = [torch.arange(3, 27), torch.arange(90, 95)], torch.arange(40, 55)
    with torch.inference_mode():
        expected = expected_logits(model, modules, own, [behind[:0], behind]).log_softmax(-1)
    dense = dense_logits(model, modules, own, behind).log_softmax(-1)
    assert (dense - expected).abs().max() < TOLERANCE / 10 * expected.std()


def test_every_parameter_of_a_tiny_model_is_random() -> None:
    model = tiny(make_config("qwen3"))
    constant = [name for name, each in model.named_parameters() if each.unique().numel() < 2]
    assert constant == []


@pytest.mark.parametrize("variant", VARIANT_PARAMS)
def test_a_variant_answers_as_the_whole_text(variant: str) -> None:
    model_type, changes = VARIANTS[variant]
    assert difference(make_config(model_type, **changes)) < TOLERANCE / 10


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        ("llama", {"interleaved": True}),
        ("cohere", {"interleaved": False}),
        ("nanochat", {"backward": False}),
        ("smollm3", {"silent_layers": None}),
        ("cohere2", {"silent_layers": None}),
        ("exaone4", {"silent_layers": None}),
        ("afmoe", {"silent_layers": None}),
        ("deepseek_v2", {"interleaved": False}),
        ("minicpm3", {"interleaved": True}),
        ("hunyuan_v1_dense", {"scheme": None}),
        ("hunyuan_v1_moe", {"scheme": None}),
    ],
)
def test_a_wrong_recipe_differs(
    model_type: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_type)
    monkeypatch.setitem(FAMILIES, model_type, replace(FAMILIES[model_type], **wrong))
    assert difference(config) > 10 * TOLERANCE


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial has passed yet."""
    monkeypatch.setattr(trial, "_passed", set())


@pytest.fixture
def gptj() -> Iterator[Any]:
    """A model of a type that the table lacks: interleaved, without `rotary_emb`."""
    yield AutoConfig.for_model("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=16)
    FAMILIES.pop("gptj", None)


def small(model_type: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | changes))


def test_a_wrong_recipe_is_refused_before_it_serves(
    no_trials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("cohere")
    before = model.config._attn_implementation
    monkeypatch.setitem(FAMILIES, "cohere", Family(("cohere",)))
    with pytest.raises(UnsupportedModel) as caught:
        wrap(model)
    assert "the family of 'cohere' models answers otherwise than Hugging Face" in str(caught.value)
    assert "(interleaved, backward)" in str(caught.value)
    assert model.config._attn_implementation == before
    register(Family(("cohere",), interleaved=True))
    assert isinstance(wrap(model), CausalLM)


def test_a_family_that_cannot_be_tried_is_refused(no_trials: None, gptj: Any) -> None:
    register(Family(("gptj",), interleaved=True))
    with pytest.raises(UnsupportedModel) as caught:
        wrap(AutoModelForCausalLM.from_config(gptj))
    assert "the family of 'gptj' models could not be tried" in str(caught.value)
    assert "has no `rotary_emb` with frequencies" in str(caught.value)
    assert "`Family.tiny`" in str(caught.value)


def test_a_trial_that_has_passed_is_not_repeated(
    no_trials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = []
    really = trial.trial_difference

    def counted(model: Any, *wrapped: Any) -> float:
        trials.append(model.config.model_type)
        return really(model, *wrapped)

    monkeypatch.setattr(trial, "trial_difference", counted)
    wrap(small("llama"))
    wrap(small("llama"))
    assert trials == ["llama"]
    config = small("llama").config
    config.attention_bias = True
    try_family(type(small("llama")), config)
    assert len(trials) == 2


def test_a_trial_leaves_the_random_numbers_alone(no_trials: None) -> None:
    model = small("llama")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    wrap(model)
    assert torch.equal(torch.rand(4), expected)


def test_a_patched_hybrid_called_ordinarily_is_unchanged() -> None:
    model, tokens = tiny_hybrid("bamba"), torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(tokens).logits
        wrap(model)
        assert torch.equal(model(tokens).logits, before)


def test_layers_without_positions_turn_nothing() -> None:
    causal = wrap(small("smollm3"))
    scheme = causal.scheme
    assert not isinstance(scheme, LayeredRotary), "two layers, both with positions"
    scheme = wrap(small("smollm3", num_hidden_layers=4)).scheme
    assert isinstance(scheme, LayeredRotary)
    assert [bool(layer.inverse_frequency.any()) for layer in scheme.layers] == [True] * 3 + [False]
    assert scheme.name == "rotary:default:8+rotary:none:8"


@pytest.mark.slow
def test_layers_that_share_states_keep_none_of_their_own() -> None:
    config = tiny_config(make_config("gemma3n_text"), FAMILIES["gemma3n_text"])
    kind = text_class(config)
    causal = wrap(tiny_model(kind, config, 7))
    assert (causal.num_layers, causal.model.config.num_hidden_layers) == (2, 4)
    assert causal.new_states(3)[0].shape[0] == 2


def test_sinks_are_refused_where_nothing_counts_them() -> None:
    config = tiny_config(make_config("gpt_oss"), FAMILIES["gpt_oss"])
    causal = wrap(tiny_model(text_class(config), config, 7))
    assert causal.kernels
    with pytest.raises(UnsupportedModel, match="attention sinks, which an ordinary call"):
        causal.model(torch.tensor([[1, 2, 3]]))
