"""Models in plain torch, beside transformers over the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragcache.models import LoadedModel, load_model, loader, plain_checkpoint
from ragcache.models.packed import PackedLinear
from ragcache.models.plain import PlainConfig, PlainForCausalLM, PlainLM, unknown_entry
from ragcache.models.quantized import packed_layers
from tests.ragcache.models.reference import Module, last_logits, prompt
from tests.tiny_models import random_tokens, tiny_config, tiny_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.2": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without head_dim": ("llama", {"head_dim": None}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2.5 0.5B": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
PIECES: list[Module | list[int]] = [
    Module(random_tokens(24)),
    Module(random_tokens(31, seed=1)),
    random_tokens(9),
]


def save(folder: Path, reader: LoadedModel, family: str, **changes: Any) -> Path:
    """A tiny checkpoint with the reader's tokenizer. No weight is 0 or 1, as biases begin."""
    changes = {"vocab_size": len(reader.tokenizer), "intermediate_size": 128, **changes}
    model = tiny_model(family, **changes)
    for weight in model.parameters():
        weight.data += 0.1 * torch.rand(weight.shape)
    model.save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, reader: LoadedModel) -> Path:
    return save(tmp_path / "model", reader, "qwen2")


def load_both(folder: Path, **options: Any) -> tuple[LoadedModel, LoadedModel]:
    """A model as it opens, and as it opens by transformers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("find_plain", "keep_plain"):
            patch.setattr(plain_checkpoint, name, lambda *_: None)
        expected = load_model(folder, **options)
    return load_model(folder, **options), expected


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Logits of the last token behind two modules that were moved."""
    for layer in packed_layers(loaded.causal.model):
        layer.few_rows = 0
    return last_logits(loaded.causal, [prompt(loaded.causal, PIECES)])[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_one_of_transformers_to_the_bit(
    name: str, tmp_path: Path, reader: LoadedModel
) -> None:
    family, changes = MODELS[name]
    folder = save(tmp_path, reader, family, **changes)
    for dtype in ("float32", "bfloat16"):
        loaded, expected = load_both(folder, dtype=dtype)
        assert isinstance(loaded.causal, PlainLM)
        assert not isinstance(expected.causal, PlainLM)
        assert torch.equal(logits(loaded), logits(expected))
        assert loaded.causal.fingerprint == expected.causal.fingerprint
        assert loaded.causal.scheme.name == expected.causal.scheme.name
        assert (loaded.dtypes, loaded.stop_ids) == (expected.dtypes, expected.stop_ids)
        for size in ("window", "vocabulary", "logits_width", "hidden_size", "head_dim"):
            assert getattr(loaded.causal, size) == getattr(expected.causal, size), size


@pytest.mark.parametrize("quantization", ["int8", "int4", "auto"])
@pytest.mark.parametrize("name", ["llama 3.2", "qwen2"])
def test_packed_models_are_those_of_transformers_to_the_bit(
    name: str, quantization: str, tmp_path: Path, reader: LoadedModel
) -> None:
    family, changes = MODELS[name]
    folder = save(tmp_path, reader, family, **changes)
    loaded, expected = load_both(folder, dtype="float32", quantization=quantization)
    assert isinstance(loaded.causal, PlainLM)
    kinds = [{type(each.lm_head) for each in (m.causal.model,)} for m in (loaded, expected)]
    assert kinds[0] == kinds[1] <= {PackedLinear, torch.nn.Linear}
    assert torch.equal(logits(loaded), logits(expected))
    assert loaded.causal.fingerprint == expected.causal.fingerprint


def test_a_second_opening_asks_transformers_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(folder)
    monkeypatch.setattr(loader, "_read_by_transformers", None)
    monkeypatch.setattr("ragcache.models.model.content_digest", None)  # weights are not read either
    second = load_model(folder)
    assert second.causal.fingerprint == first.causal.fingerprint
    assert second.tokenizer_fingerprint == first.tokenizer_fingerprint
    assert second.encode("<|end|> a key") == first.encode("<|end|> a key")


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_changed_file_and_another_version_are_read_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(folder)
    assert plain_checkpoint.find_plain(folder) is not None
    monkeypatch.setattr(plain_checkpoint, "version", lambda _: "6.0")
    assert plain_checkpoint.find_plain(folder) is None
    monkeypatch.undo()
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert plain_checkpoint.find_plain(folder) is None
    for _ in range(2):
        assert {5, 7} < load_model(folder).stop_ids
    rewrite(folder, rms_norm_eps=0.5)
    assert load_model(folder).causal.model.config.rms_norm_eps == 0.5


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding_window": ("mistral", {"sliding_window": 7}),
    "use_sliding_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "rope_parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "model_type": ("phi3", {"pad_token_id": 0}),
    "attention_in_moonlight": ("llama", {"attention_in_moonlight": 3}),
}


@pytest.mark.parametrize("entry", UNKNOWN)
def test_unknown_entries_are_computed_by_transformers(
    entry: str, tmp_path: Path, reader: LoadedModel
) -> None:
    family, changes = UNKNOWN[entry]
    config = PlainConfig(**tiny_config(family, **changes).to_dict())
    assert unknown_entry(config) == entry
    folder = save(tmp_path, reader, family, **changes)
    for _ in range(2):
        assert not isinstance(load_model(folder).causal, PlainLM)
    assert plain_checkpoint.find_plain(folder) is None


def lose_a_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.norm.weight"))


def add_a_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update(bias=torch.ones(3)))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def quantize(folder: Path) -> None:
    entry = {"quant_method": "fp8"}
    rewrite(folder, quantization_config=entry)


def forget_the_dtype(folder: Path) -> None:
    rewrite(folder, dtype=None)


def split_texts(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["split_special_tokens"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def mark_the_answer(folder: Path) -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize(
    "change",
    [lose_a_weight, add_a_weight, quantize, forget_the_dtype, split_texts, mark_the_answer],
)
def test_files_that_are_not_plain_are_read_by_transformers(
    change: Callable[[Path], None], folder: Path
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    change(folder)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert plain_checkpoint.keep_plain(folder, tokenizer, config) is None


def test_weights_in_several_files_are_read(folder: Path) -> None:
    [whole] = folder.glob("*.safetensors")
    model = load_both(folder)[1].causal.model
    expected = load_model(folder).causal.fingerprint
    whole.unlink()
    model.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = load_model(folder)
    assert isinstance(loaded.causal, PlainLM)
    assert loaded.causal.fingerprint == expected


def test_without_a_cache_folder_transformers_reads_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("no folder")
    monkeypatch.setattr(plain_checkpoint, "kept_folder", lambda: tmp_path / "kept")
    assert not isinstance(load_model(folder).causal, PlainLM)
    assert "opened by transformers each time" in caplog.text


def test_damaged_files_are_kept_again(folder: Path) -> None:
    load_model(folder)
    known = plain_checkpoint.find_plain(folder)
    assert known is not None
    expected = load_model(folder).causal.fingerprint
    (known.kept / "model.json").write_text("{")
    assert plain_checkpoint.find_plain(folder) is None
    load_model(folder)
    (known.kept / "digests.json").write_text("{")
    for _ in range(2):
        assert load_model(folder).causal.fingerprint == expected


def test_a_wrong_model_fails_its_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def backwards(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * cosines - torch.cat((-second, first), -1) * sines

    monkeypatch.setattr("ragcache.models.plain._turned", backwards)
    monkeypatch.setattr("ragcache.models.trial._passed", set())
    assert not isinstance(load_model(folder).causal, PlainLM)
    assert "answers otherwise than Hugging Face" in caplog.text


def test_weights_of_another_model_are_refused() -> None:
    model = PlainForCausalLM(PlainConfig(**tiny_config("llama").to_dict()))
    with pytest.raises(RuntimeError, match=r"are unknown: lm_head\.bias"):
        model.load_weights({"lm_head.bias": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r"are missing: model\.embed_tokens\.weight, "):
        model.load_weights({})


@pytest.mark.slow
def test_a_question_needs_no_transformers(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ragcache import RagCache, SourceDocument\n"
        "model, state, first = sys.argv[1:]\n"
        "with RagCache.open(state, model, embedding='none', max_tokens=4) as rag:\n"
        "    if first == 'first':\n"
        "        rag.ingest('notes', [SourceDocument('a.md', 'The key hangs in the shed.')])\n"
        "    answer = rag.ask('Where is the key?', collection='notes')\n"
        "    messages = [{'role': 'user', 'content': 'And the boat?'}]\n"
        "    rag.chat(messages, collection='notes')\n"
        "slow = ('transformers', 'torch._dynamo', 'torch.distributed.tensor')\n"
        "print(answer.reuse.cached_tokens, [name for name in slow if name in sys.modules])\n"
    )
    environment = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path / "cache")}
    said = []
    for each in ("first", "second"):
        command = [sys.executable, "-c", code, str(folder), str(tmp_path / "state"), each]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        said.append(done.stdout.splitlines()[-1].split(" ", 1))
    assert said[0][1] != "[]"
    assert said[1][1] == "[]"
    assert int(said[1][0]) > 0
