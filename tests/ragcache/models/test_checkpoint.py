"""Text models of composite checkpoints, and LongRoPE with one set of factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from ragcache.engine import assemble_context, encode
from ragcache.engine.encoding import EncodeJob
from ragcache.errors import ConfigurationError, UnsupportedModel
from ragcache.models import CausalLM, LoadedModel, load_model, wrap_causal
from ragcache.models.checkpoint import load_checkpoint, use_long_factors
from tests.ragcache.models.reference import CLOSE, last_logits
from tests.tiny_models import random_tokens, tiny_model

TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "depth": 1, "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def axes(*sizes: int) -> dict[str, Any]:
    """Rotary positions in three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}
    return {"rope_parameters": rope}


COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 7},
    "gemma4": {
        "sliding_window": 7,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
    },
    "mistral3": {},
    "llava": {},
    "internvl": {},
    "qwen2_vl": axes(2, 3, 3),
    "qwen2_5_vl": axes(2, 3, 3),
    "qwen3_vl": axes(4, 2, 2),
    "qwen3_vl_moe": {**axes(4, 2, 2), **EXPERTS},
}


def seen(usual: Any) -> dict[str, Any] | None:
    """The configuration of a tiny model of images, unless the usual one has none."""
    vision = usual.vision_config
    return None if vision is None else {"model_type": vision.model_type, **VISION}


def composite(model_type: str) -> Any:
    """A tiny model that also sees."""
    usual = AutoConfig.for_model(model_type)
    text = {"model_type": usual.text_config.model_type, **TEXT, **COMPOSITES[model_type]}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=seen(usual))
    torch.manual_seed(7)
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in ("gemma3", "qwen2_5_vl") else pytest.mark.slow)
        for name in COMPOSITES
    ],
)
def test_the_text_model_of_a_composite_checkpoint(model_type: str, tmp_path: Path) -> None:
    whole = composite(model_type)
    whole.save_pretrained(tmp_path)
    tokens = random_tokens(40)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        expected = whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    causal = wrap_causal(load_checkpoint(str(tmp_path), None))
    [states] = encode(causal, [EncodeJob(tokens[:25], 33)])
    context = assemble_context([states], tokens[25:], window=512, max_tokens=4)
    [logits] = last_logits(causal, [context])
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert not any("vision" in name or "visual" in name for name in causal.model.state_dict())


def test_a_composite_checkpoint_is_loaded(tmp_path: Path, reader: LoadedModel) -> None:
    composite("qwen2_5_vl").save_pretrained(tmp_path)
    reader.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert isinstance(loaded.causal, CausalLM)
    assert loaded.causal.model.config.model_type == "qwen2_5_vl_text"
    assert loaded.causal.fingerprint == load_model(tmp_path).causal.fingerprint


def test_a_composite_of_an_unserved_model_is_refused_unread(tmp_path: Path) -> None:
    AutoConfig.for_model("llama4").save_pretrained(tmp_path)  # no weights
    with pytest.raises(UnsupportedModel, match="within chunks"):
        load_checkpoint(str(tmp_path), None)


SWITCH = 64
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)],
}  # fmt: skip


def test_long_factors_serve_the_whole_context(tmp_path: Path, reader: LoadedModel) -> None:
    size = {"vocab_size": len(reader.tokenizer), "original_max_position_embeddings": SWITCH}
    model = tiny_model("phi3", rope_parameters=dict(ROPE), **size)
    model.save_pretrained(tmp_path)
    reader.tokenizer.save_pretrained(tmp_path)
    tokens = random_tokens(3 * SWITCH)
    with torch.no_grad():  # transformers takes the long factors for a text of this length
        expected = model(torch.tensor([tokens])).logits[0, -1]
    short, long = load_model(tmp_path).causal, load_model(tmp_path, long_context=True).causal
    assert (short.window, long.window) == (SWITCH, 512)
    assert short.fingerprint != long.fingerprint, "their states are kept apart"
    [states] = encode(long, [EncodeJob(tokens[:SWITCH], 200)])
    context = assemble_context([states], tokens[SWITCH:], window=512, max_tokens=4)
    [logits] = last_logits(long, [context])
    torch.testing.assert_close(logits, expected, **CLOSE)
    [fewer] = last_logits(long, [assemble_context([], tokens[:9], window=512, max_tokens=4)])
    with torch.no_grad():
        other = model(torch.tensor([tokens[:9]])).logits[0, -1]
    assert not torch.allclose(fewer, other, **CLOSE), "short texts are computed as long ones"


def test_only_longrope_has_long_factors() -> None:
    with pytest.raises(ConfigurationError, match="long_context is for models with LongRoPE"):
        load_model(long_context=True)
    with pytest.raises(ConfigurationError, match="this llama model has the rotary scaling"):
        use_long_factors(tiny_model("llama").config)
