"""GGUF files, written here with eight-bit weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragcache import RagCache
from ragcache.errors import MissingExtra, ModelNotFound
from ragcache.models import LoadedModel, load_model, loader
from tests.tiny_models import tiny_model

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[gguf\]'"):
        load_model("model.gguf")


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda _: True)
    with pytest.raises(ModelNotFound, match=r"no such file.*ORGANIZATION/REPOSITORY/FILE\.gguf"):
        load_model("nowhere.gguf")


@pytest.mark.slow
def test_a_file_in_eight_bits_answers_as_its_weights_do(
    tmp_path: Path, reader: LoadedModel
) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
    model = tiny_model("llama", vocab_size=len(reader.tokenizer))
    file = tmp_path / "tiny.gguf"
    write(gguf, file, model, reader.tokenizer)
    loaded = load_model(str(file))
    assert loaded.causal.states_dtype == torch.bfloat16
    text = "The spare key of the boathouse hangs here."
    assert loaded.encode(text) == reader.encode(text)
    ids = torch.tensor([loaded.encode(text)])
    with torch.inference_mode():
        exact = model(ids).logits
        read = load_model(str(file), dtype="float32").causal.model(ids).logits
    assert torch.allclose(read, exact, atol=0.05 * float(exact.abs().max()))
    with RagCache.open(tmp_path / "state", loaded, embedding="none", max_tokens=2) as rag:
        (tmp_path / "key.md").write_text(text, encoding="utf-8")
        rag.ingest("notes", [tmp_path / "key.md"])
        assert rag.ask("Where is the spare key?", collection="notes").reuse.cached_tokens > 0


def write(gguf: Any, file: Path, model: Any, tokenizer: Any) -> None:
    """A Llama with the tokenizer of the reader."""
    config, spelled = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = ["" for _ in range(len(tokenizer))]
    kinds = [int(gguf.TokenType.NORMAL)] * len(tokens)
    for token, number in spelled["model"]["vocab"].items():
        tokens[number] = token
    for added in spelled["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in spelled["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)  # the converter requires one
    writer.add_eos_token_id(tokenizer.eos_token_id)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        _write_weight(gguf, writer, name.removesuffix(".weight"), weight.float().numpy(), heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_weight(
    gguf: Any, writer: Any, name: str, weight: np.ndarray, heads: dict[str, int]
) -> None:
    """Rows of queries and keys are interleaved there, as llama.cpp turns them."""
    for projection, count in heads.items():
        if name.endswith(projection):
            halves = weight.reshape(count, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
    if name in NAMES:
        place = NAMES[name]
    else:
        _, _, layer, part = name.split(".", 3)
        place = f"blk.{layer}.{NAMES[part]}"
    if weight.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        weight = gguf.quants.quantize(weight, kind)
        writer.add_tensor(f"{place}.weight", weight, raw_dtype=kind)
    else:
        writer.add_tensor(f"{place}.weight", weight)
