"""The embedded reader's files without transformers, beside transformers over the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ragcache.attention import AttentionMetadata, CausalBlock, ContiguousWrite
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, Rotary, load_model, prompt_frame, wrap_causal
from ragcache.models.checkpoint import load_checkpoint
from ragcache.models.model import ForwardBatch
from ragcache.models.plain import HEAD, PlainConfig, PlainForCausalLM, PlainLM
from ragcache.models.reader import READER, read_reader
from ragcache.models.tokenizer import PromptTokenizer, tokenizer_fingerprint


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    return AutoTokenizer.from_pretrained(READER)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_reader(READER)[1]


def logits(causal: CausalLM, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, vocabulary], of a text without segments."""
    rows = torch.arange(len(token_ids))
    metadata = AttentionMetadata(
        shared_queries=None,
        shared_kv=(),
        causal_blocks=(CausalBlock(0, len(rows)),),
        paged_queries=None,
        writes=(ContiguousWrite(*causal.new_states(len(rows)), 0, 0, len(rows)),),
        shared_index=rows[None],
    )
    return causal.forward(ForwardBatch(token_ids, positions, rows, metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers_to_the_bit(
    float_reader: Path, dtype: torch.dtype
) -> None:
    patched = wrap_causal(AutoModelForCausalLM.from_pretrained(float_reader, dtype=dtype))
    causal = PlainLM(read_reader(float_reader)[0].to(dtype))
    assert causal.dtype == dtype
    assert isinstance(patched.scheme, Rotary)
    assert isinstance(causal.scheme, Rotary)
    assert torch.equal(causal.scheme.inverse_frequency, patched.scheme.inverse_frequency)
    assert causal.scheme.name == patched.scheme.name
    token_ids = torch.randint(8, 16384, (48,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(48) + torch.arange(48) // 7 * 100  # with gaps, as prompts of PML
    assert torch.equal(logits(causal, token_ids, positions), logits(patched, token_ids, positions))


def test_its_sizes_are_those_of_the_checkpoint() -> None:
    causal = PlainLM(read_reader(READER)[0])
    assert (causal.num_layers, causal.num_heads, causal.num_kv_heads) == (8, 8, 2)
    assert (causal.head_dim, causal.window, causal.vocabulary) == (64, 4096, 16384)
    assert (causal.scheme.name, causal.dtype) == ("rotary:default:32", torch.bfloat16)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_and_texts_are_those_of_transformers(
    tokenizer: Any, hugging_face: Any, text: str
) -> None:
    ids = hugging_face.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == hugging_face.decode(ids)


def test_special_tokens_are_those_of_transformers(tokenizer: Any, hugging_face: Any) -> None:
    ids = [0, 17, 1, 300, 2, 3]
    for skip in (True, False):
        expected = hugging_face.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token"):
        assert getattr(tokenizer, name) == getattr(hugging_face, name), name
    assert set(tokenizer.all_special_tokens) == set(hugging_face.all_special_tokens)
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(hugging_face), hugging_face.get_vocab())
    assert PromptTokenizer(tokenizer).control == PromptTokenizer(hugging_face).control
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(hugging_face)
    assert prompt_frame(tokenizer) == prompt_frame(hugging_face)


TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 8, "int8_rows": True,
}  # fmt: skip
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def int8_reader(tmp_path: Path) -> Path:
    """The folder of a tiny reader in int8 rows."""
    for file in READER.glob("*token*"):
        shutil.copy(file, tmp_path)
    shutil.copy(READER / "chat_template.jinja", tmp_path)
    entries = json.loads((READER / "config.json").read_text()) | TINY
    (tmp_path / "config.json").write_text(json.dumps(entries))
    del entries["int8_rows"]
    torch.manual_seed(5)
    weights = {}
    for name, weight in PlainForCausalLM(PlainConfig(**entries)).state_dict().items():
        if name == HEAD:
            continue
        if weight.dim() == 1:
            weights[name] = torch.rand(weight.shape).bfloat16() + 0.5
        else:
            weights[name] = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
            weights[name + "_scale"] = torch.rand(len(weight)) / 500 + 1e-4
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def rewrite(folder: Path, **weights: torch.Tensor | None) -> None:
    """Weights of a checkpoint put in another's place, or taken out."""
    kept = load_file(folder / "model.safetensors") | weights
    kept = {name: weight for name, weight in kept.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_are_the_same_model_without_transformers(
    int8_reader: Path, dtype: torch.dtype
) -> None:
    stored = load_file(int8_reader / "model.safetensors")
    model = read_reader(int8_reader)[0]
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    rows = stored[MATRIX].float() * stored[MATRIX + "_scale"][:, None]
    assert torch.equal(model.state_dict()[MATRIX], rows.bfloat16())
    hugging_face = load_checkpoint(str(int8_reader), dtype)
    theirs = hugging_face.state_dict()
    for name, weight in model.to(dtype).state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    token_ids, positions = torch.randint(0, 64, (24,)), torch.arange(24)
    ours = logits(PlainLM(model), token_ids, positions)
    assert torch.equal(ours, logits(wrap_causal(hugging_face), token_ids, positions))
    hugging_face.save_pretrained(int8_reader / "again")  # in its dtype, and says so
    assert not hasattr(AutoConfig.from_pretrained(int8_reader / "again"), "int8_rows")


def test_fingerprints_cover_scales(int8_reader: Path) -> None:
    def fingerprints() -> tuple[str, str]:
        theirs = wrap_causal(load_checkpoint(str(int8_reader), torch.bfloat16))
        return PlainLM(read_reader(int8_reader)[0]).fingerprint, theirs.fingerprint

    before = fingerprints()
    assert fingerprints() == before
    scale = load_file(int8_reader / "model.safetensors")[MATRIX + "_scale"]
    scale[7] *= 1.5
    rewrite(int8_reader, **{MATRIX + "_scale": scale})
    assert all(a != b for a, b in zip(before, fingerprints(), strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({MATRIX + "_scale": None}, f"{MATRIX} is in int8, and there is no {MATRIX}_scale"),
        ({MATRIX: None}, f"{MATRIX}_scale is there, and {MATRIX} is no matrix"),
        ({MATRIX: torch.ones(48, 32)}, f"{MATRIX}_scale is there, and {MATRIX} is no matrix"),
        ({MATRIX + "_scale": torch.ones(32)}, r"\[32\] instead of float32 \[48\]"),
        ({MATRIX + "_scale": torch.ones(48).half()}, "torch.float16"),
        ({MATRIX + "_scale": torch.zeros(48)}, "not positive"),
        ({MATRIX + "_scale": torch.full((48,), torch.nan)}, "not positive"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    int8_reader: Path, changed: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(int8_reader, **changed)
    with pytest.raises(UnsupportedModel, match=message):
        read_reader(int8_reader)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(int8_reader)


def test_int8_rows_are_packed_as_they_are(int8_reader: Path) -> None:
    plain = load_model(int8_reader, dtype="float32").causal.model
    packed = load_model(int8_reader, dtype="float32", quantization="int8").causal.model
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        exact = plain(ids, use_cache=False).logits
        error = (packed(ids, use_cache=False).logits - exact).std() / exact.std()
    assert float(error) < 0.02


@pytest.mark.slow
def test_a_question_needs_no_transformers() -> None:
    code = (
        "import sys, tempfile\n"
        "from ragcache import RagCache, SourceDocument\n"
        "with tempfile.TemporaryDirectory() as state, RagCache.open(state) as rag:\n"
        "    rag.ingest('notes', [SourceDocument('a.md', 'The key hangs in the shed.')])\n"
        "    print(rag.ask('Where is the key?', collection='notes').text)\n"
        "slow = ('transformers', 'torch._dynamo', 'faiss', 'requests')\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
