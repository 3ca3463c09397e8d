"""GGUF files, written here with eight-bit weights, and their conversion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ragcache import RagCache
from ragcache.errors import ConfigurationError, MissingExtra, ModelNotFound, UnsupportedModel
from ragcache.models import LoadedModel, load_model, loader
from ragcache.models import gguf as conversion
from ragcache.models.native import load_kernels
from tests.forks import ForkedPython
from tests.ragcache.models.reference import last_logits, prompt
from tests.tiny_models import tiny_model

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

CONVERT = """
import logging, sys
from pathlib import Path
from ragcache.models import gguf

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
if "killed" in sys.argv:
    import os, signal
    gguf.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
gguf.cache_folder = lambda: Path(sys.argv[2])
gguf.convert_gguf(Path(sys.argv[1]))
"""

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, here and in the processes that a test starts."""
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "ragcache" / "models" / "gguf"
    folder.mkdir(parents=True)
    monkeypatch.setattr(conversion, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def file(tmp_path: Path, reader: LoadedModel) -> Path:
    write(tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=len(reader.tokenizer)), reader)
    return tmp_path / "tiny.gguf"


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
    tmp_path: Path, file: Path, reader: LoadedModel
) -> None:
    model = tiny_model("llama", vocab_size=len(reader.tokenizer))
    loaded = load_model(str(file))
    assert loaded.causal.states_dtype == torch.bfloat16
    text = "The spare key of the boathouse hangs here."
    assert loaded.encode(text) == reader.encode(text)
    ids, causal = loaded.encode(text), load_model(str(file), dtype="float32").causal
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0, -1]
    [read] = last_logits(causal, [prompt(causal, [ids])])
    assert torch.allclose(read, exact, atol=0.05 * float(exact.abs().max()))
    with RagCache.open(tmp_path / "state", loaded, embedding="none", max_tokens=2) as rag:
        (tmp_path / "key.md").write_text(text, encoding="utf-8")
        rag.ingest("notes", [tmp_path / "key.md"])
        assert rag.ask("Where is the spare key?", collection="notes").reuse.cached_tokens > 0


def test_the_quick_reader_reads_what_the_library_reads(file: Path) -> None:
    quick, expected = conversion._quick_reader()(file), gguf.GGUFReader(file)
    assert quick.fields.keys() == expected.fields.keys()
    for name, field in expected.fields.items():
        read = quick.fields[name]
        assert (read.types, read.data) == (field.types, field.data)
        assert read.contents() == field.contents()
    for read, tensor in zip(quick.tensors, expected.tensors, strict=True):
        assert read.name == tensor.name
        np.testing.assert_array_equal(read.data, tensor.data)


HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82]}  # fmt: skip
"""Places of the numbers in float16 in a block of each type."""


def blocks(name: str) -> tuple[np.ndarray, Any]:
    """Random weights [6, 512] of a type, with the smallest and largest scales."""
    kind = gguf.GGMLQuantizationType[name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    made = np.random.default_rng(5).integers(0, 256, (6, 512 // weights, size), dtype=np.uint8)
    scales = np.array([0, 6e-8, -1e-6, 0.0123, -0.5, 60_000], np.float16).view(np.uint8)
    for place in HALVES[name]:
        made[:, :, place : place + 2] = scales.reshape(6, 1, 2)
    return made.reshape(6, -1), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in HALVES if name != "Q2_K"])
def test_weights_are_multiplied_out_as_the_library_does(name: str, dtype: torch.dtype) -> None:
    kernels, (data, kind) = load_kernels(), blocks(name)
    assert kernels is not None
    expected = torch.from_numpy(gguf.dequantize(data, kind)).to(dtype)
    out = torch.full((6, 512), torch.nan, dtype=dtype)
    assert kernels.dequantize(data, int(kind), 6 * 512 // gguf.GGML_QUANT_SIZES[kind][0], out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["Q2_K", "Q6_K"])
def test_other_types_are_left_to_the_library(
    name: str, compiled: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(conversion, "load_kernels", lambda: None)
    data, kind = blocks(name)
    monkeypatch.setattr(conversion, "_WEIGHTS", 1024)  # two rows at once
    expected = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(conversion._Source(file).dequantize(data, kind), expected)


def test_large_models_are_written_as_several_files(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = conversion.convert_gguf(file)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(conversion, "cache_folder", lambda: other)
    monkeypatch.setattr(conversion, "_SHARD", 100_000)
    parts = conversion.convert_gguf(file)
    assert len([*parts.glob("model-*-of-*.safetensors")]) > 2
    for dtype in ("bfloat16", "float32"):
        one, several = (load_model(each, dtype=dtype).causal for each in (whole, parts))
        assert one.fingerprint == several.fingerprint


def test_plain_models_are_written_as_transformers_writes_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_write_model", lambda *_: pytest.fail("by transformers"))
    plain = conversion.convert_gguf(file)
    monkeypatch.undo()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(conversion, "cache_folder", lambda: other)
    monkeypatch.setattr(conversion, "_write_plain", lambda *_: False)
    expected = conversion.convert_gguf(file)
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in plain.iterdir()} == names
    weights, others = (load_file(each / "model.safetensors") for each in (plain, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, others[name]), name
    for name in names - {"model.safetensors"}:
        assert (plain / name).read_text() == (expected / name).read_text(), name


def test_a_moved_file_is_known_and_a_changed_one_is_converted(
    file: Path, cache: Path, reader: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gguf.GGUFReader, gguf.dequantize
    first = conversion.convert_gguf(file)
    assert (gguf.GGUFReader, gguf.dequantize) == plain
    assert {path.name for path in cache.iterdir()} == {first.name, f"{first.name}.lock"}
    moved = file.rename(file.with_name("moved.gguf"))
    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_write_checkpoint", lambda *_: pytest.fail("again"))
        assert conversion.convert_gguf(moved) == first
    changed = tiny_model("llama", vocab_size=len(reader.tokenizer), rope_theta=500.0)
    write(moved, changed, reader)
    second = conversion.convert_gguf(moved)
    assert second != first
    assert json.loads((second / "config.json").read_text())["rope_parameters"]["rope_theta"] == 500


@pytest.mark.slow
def test_processes_share_a_conversion_after_one_was_killed(file: Path, cache: Path) -> None:
    killed = _convert(file, cache, "killed")
    assert "converting" in killed.communicate()[0]
    assert killed.poll() == -signal.SIGKILL
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".part"]
    both = [_convert(file, cache) for _ in range(2)]
    said = [each.communicate()[0] for each in both]
    assert [each.poll() for each in both] == [0, 0], said
    assert sum("to a checkpoint, once" in each for each in said) == 1
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    assert load_model(folder).causal.fingerprint == load_model(file).causal.fingerprint


def _convert(file: Path, cache: Path, *options: str) -> ForkedPython:
    """Start a process that converts a file."""
    command = [sys.executable, "-c", CONVERT, str(file), str(cache), *options]
    return ForkedPython(command, stdout=subprocess.PIPE)


def test_a_failed_conversion_leaves_no_files(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(conversion, "sync", fail)
    with pytest.raises(ModelNotFound, match="no space left"):
        load_model(file)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_a_folder_that_cannot_be_written_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr(conversion, "FileLock", refuse)
    with pytest.raises(ConfigurationError, match=r"permission denied.*HF_ASSETS_CACHE"):
        load_model(file)


def test_an_architecture_without_a_family_is_refused_early(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache.models import families

    monkeypatch.delitem(families.FAMILIES, "llama")
    with pytest.raises(UnsupportedModel, match="llama"):
        load_model(file)
    assert not any(path.is_dir() for path in cache.iterdir())


def write(file: Path, model: Any, reader: LoadedModel) -> None:
    """A Llama with the tokenizer of the reader."""
    tokenizer = reader.tokenizer
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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
        _write_weight(writer, name.removesuffix(".weight"), weight.float().numpy(), heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_weight(writer: Any, name: str, weight: np.ndarray, heads: dict[str, int]) -> None:
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


def test_a_digest_holds_one_piece_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file would count as memory of this process."""
    import xxhash

    file, content = tmp_path / "model.gguf", os.urandom(1000)
    file.write_bytes(content)
    monkeypatch.setattr(conversion, "_PIECE", 64)
    pieces: list[int] = []
    original = xxhash.xxh3_128

    class Counting:
        def __init__(self) -> None:
            self.digest = original()

        def update(self, piece: memoryview) -> None:
            pieces.append(len(piece))
            self.digest.update(piece)

        def hexdigest(self) -> str:
            return str(self.digest.hexdigest())

    monkeypatch.setattr(xxhash, "xxh3_128", Counting)
    found = conversion._digest(file)
    assert sum(pieces) == len(content)
    assert max(pieces) == 64
    assert found == xxhash.xxh3_128_hexdigest(content)
