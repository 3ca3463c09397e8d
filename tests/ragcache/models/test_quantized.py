"""Weights in 8 and 4 bits, packed for a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache import RagCache
from ragcache.errors import ConfigurationError, UnsupportedModel
from ragcache.models import LoadedModel, load_model, quantized
from ragcache.models.checkpoint import load_checkpoint
from ragcache.models.dtype import check_quantization
from ragcache.models.packed import PackedLinear
from ragcache.models.quantized import packed_layers, quantize_model
from ragcache.models.quantized_trial import check_family, choose_quantization
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference
from tests.ragcache.models.test_packed import stored_in_four_bits
from tests.tiny_models import FAMILY_PARAMS, random_tokens, tiny_config, tiny_model

QUANTIZATIONS = ("int8", "int4")
FLOAT: Any = {"dtype": "float32", "states_dtype": "float32"}
ERRORS = {"int8": 0.05, "int4": 0.5}  # of the spread of logits; weights are random
SHARES = {"int8": 0.28, "int4": 0.20}  # of the bytes of float32, scales included


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reader: LoadedModel) -> str:
    return saved(tmp_path_factory.mktemp("model"), reader)


@pytest.fixture(scope="module")
def plain(folder: str) -> LoadedModel:
    return load_model(folder, **FLOAT)


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def packed(request: pytest.FixtureRequest, folder: str) -> tuple[str, LoadedModel]:
    return request.param, load_model(folder, **FLOAT, quantization=request.param)


def saved(folder: Path, reader: LoadedModel, **changes: Any) -> str:
    """A tiny model in bfloat16 with the tokenizer of the reader."""
    changes = {"vocab_size": len(reader.tokenizer), "intermediate_size": 128, **changes}
    tiny_model("qwen3", torch.bfloat16, **changes).save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return str(folder)


def logits(loaded: LoadedModel) -> Tensor:
    [last] = last_logits(loaded.causal, [prompt(loaded.causal, [random_tokens(40)])])
    return last.float()


def limit_rows(model: Any, rows: int) -> None:
    """Let steps of at most some rows multiply packed weights."""
    for each in packed_layers(model):
        each.few_rows = rows


def layer_bytes(loaded: LoadedModel) -> int:
    return sum(each.nbytes for each in loaded.causal.model.model.layers.state_dict().values())


def test_layers_stay_whose_width_the_kernels_do_not_read() -> None:
    model = tiny_model("llama", hidden_size=40, num_attention_heads=2, num_key_value_heads=2)
    quantize_model(model, "int8")
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is torch.nn.Linear  # 40 numbers wide
    assert type(layer.mlp.down_proj) is PackedLinear


@pytest.mark.parametrize("family", FAMILY_PARAMS)
@torch.inference_mode()
def test_every_family_answers_alike_or_is_refused(family: str) -> None:
    model = tiny_model(family)
    if family.startswith(("falcon", "gpt2")):
        with pytest.raises(UnsupportedModel, match="leave quantization out"):
            check_family(type(model), model.config)
        return
    check_family(type(model), model.config)
    ids = torch.tensor([random_tokens(24)])
    exact = model(ids, use_cache=False).logits
    for quantization in QUANTIZATIONS:
        small = tiny_model(family)
        quantize_model(small, quantization)
        assert packed_layers(small)
        for rows in (0, 24):
            limit_rows(small, rows)
            error = (small(ids, use_cache=False).logits - exact).std() / exact.std()
            assert 0 < float(error) < ERRORS[quantization]


def test_quantized_weights_are_small_and_answer_alike(
    packed: tuple[str, LoadedModel], plain: LoadedModel
) -> None:
    name, loaded = packed
    error = (logits(loaded) - logits(plain)).std() / logits(plain).std()
    assert 0 < float(error) < ERRORS[name]
    assert layer_bytes(loaded) < SHARES[name] * layer_bytes(plain)
    assert loaded.dtypes is not None
    assert loaded.dtypes.reason.endswith(f"; weights in {name}")


def test_segments_are_read_as_exactly_as_those_of_any_model(
    packed: tuple[str, LoadedModel], folder: str
) -> None:
    """Moved modules give the logits of the quantized model where they stand."""
    quantization, causal = packed[0], packed[1].causal
    plain = load_checkpoint(folder, None, quantization=quantization).float()
    for each in (plain, causal.model):
        limit_rows(each, 0)  # products of both sides are then rounded alike
    pieces = [Module(random_tokens(24)), Module(random_tokens(31, seed=1)), random_tokens(9)]
    [cached] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(cached, reference(plain, pieces), **CLOSE)


def test_keys_follow_from_quantized_weights(
    packed: tuple[str, LoadedModel], folder: str, plain: LoadedModel
) -> None:
    name, loaded = packed
    other = load_model(folder, **FLOAT, quantization=QUANTIZATIONS[name == "int8"])
    again = load_model(folder, **FLOAT, quantization=name)
    assert again.causal.fingerprint == loaded.causal.fingerprint
    models = (plain, other, loaded)
    assert len({each.causal.fingerprint for each in models}) == len(models)
    layer = packed_layers(again.causal.model)[2]
    for part in (layer.weight, layer.scales):
        number = part.view(-1)[:1]
        before = number.clone()
        number.add_(1)
        del again.causal.fingerprint
        assert again.causal.fingerprint != loaded.causal.fingerprint
        number.copy_(before)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@torch.inference_mode()
def test_layers_over_one_input_are_packed_as_one(quantization: str) -> None:
    model = tiny_model("qwen2", intermediate_size=128)
    layers = model.model.layers[0]
    pairs = [(layers.mlp, "gate_proj"), (layers.mlp, "up_proj"), (layers.mlp, "down_proj")]
    pairs.append((layers.self_attn, "v_proj"))
    bits = {"int8": 8, "int4": 4}[quantization]
    torch.nn.init.normal_(layers.self_attn.v_proj.bias)
    expected = []
    for owner, name in pairs:
        layer = getattr(owner, name)
        rows = torch.randn(1, 3, layer.in_features)
        bias = None if layer.bias is None else layer.bias.detach()
        packed = PackedLinear.pack(layer.weight.detach(), bits, bias)
        expected.append((rows, packed(rows)))
    quantize_model(model, quantization)
    limit_rows(model, 0)
    for (owner, name), (rows, product) in zip(pairs, expected, strict=True):
        torch.testing.assert_close(getattr(owner, name)(rows), product)
    assert len(packed_layers(layers)) == 4, "inputs of a layer"


def test_auto_takes_four_bits_where_they_hold_the_weights() -> None:
    torch.manual_seed(4)
    model = tiny_model("qwen3", intermediate_size=128)
    stack = model.model.layers
    for layer in stack:
        weight = layer.mlp.down_proj.weight
        weight.data.copy_(stored_in_four_bits(*weight.shape))
    quantize_model(model, "auto")
    four = [layer.mlp.down_proj for layer in stack]
    assert {each.bits for each in four} == {4}
    assert {each.bits for each in packed_layers(model) if each not in four} == {8}


@pytest.mark.parametrize(
    ("rows", "free", "expected"), [(0, 2**40, None), (4, 2**40, "int8"), (4, 1, "int4")]
)
def test_auto_takes_the_widest_weights_that_are_quick_and_fit(
    rows: int, free: int, expected: str | None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "few_rows", lambda *_: rows)
    monkeypatch.setattr(quantized, "available_memory", lambda: free)
    loaded = load_model(folder, **FLOAT, quantization="auto")
    bits = {each.bits for each in packed_layers(loaded.causal.model)}
    assert bits == {None: set(), "int8": {8}, "int4": {4, 8}}[expected]


def test_auto_leaves_families_that_are_not_served_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "few_rows", lambda *_: 4)
    model = tiny_model("gpt2")
    assert choose_quantization(type(model), model.config, "auto", torch.float32) is None
    assert load_model(quantization="auto").extractive  # the embedded reader as it is


def test_auto_is_the_same_in_every_process_of_a_folder(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, str] = {}

    def recall(name: str, find: Callable[[], str]) -> str:
        return kept.setdefault(name, find())

    for rows in (4, 0):
        monkeypatch.setattr(quantized, "few_rows", lambda *_, rows=rows: rows)
        loaded = load_model(folder, **FLOAT, quantization="auto", recall=recall)
        layers = packed_layers(loaded.causal.model)
        assert layers, rows
        assert {each.few_rows for each in layers} == {4}, "timed once"


def test_the_number_of_few_rows_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragcache import machine

    def shortest(run: Callable[[], object]) -> float:
        size = len(run.args[0])  # type: ignore[attr-defined]
        return size if run.func == "packed" else 10.0  # type: ignore[attr-defined]

    monkeypatch.setattr(machine, "_shortest", shortest)
    first: Any = "packed"
    for size, expected in (((4, 8, 16), 8), ((16,), 0), ((4,), 4)):
        partial = lambda function, rows: type("Run", (), {"func": function, "args": (rows,)})  # noqa: E731
        monkeypatch.setattr(machine, "partial", partial)
        assert machine.quicker_rows(first, print, 2, torch.float32, size) == expected


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon-7b", "a falcon model keeps 100% of its layers' weights in FalconLinear"),
        ("deepseek_v3", "'deepseek_v3' are not served with quantized weights: their code reads"),
        ("gpt2", "a gpt2 model keeps 100% of its layers' weights in Conv1D"),
        ("qwen3_moe", "a qwen3_moe model keeps .* in Qwen3MoeExperts"),
    ],
)
def test_families_without_quantization_are_refused_unread(
    family: str, reason: str, tmp_path: Path, reader: LoadedModel
) -> None:
    tiny_config(family).save_pretrained(tmp_path)  # and no weights
    reader.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path, quantization="int8")


def test_stored_quantized_weights_are_not_quantized_again(folder: str, tmp_path: Path) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"stored quantized; leave quantization='int4'"):
        load_model(tmp_path, quantization="int4")


def test_a_quantization_without_a_product_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"quantization is 'int2'.*'auto', 'int8', 'int4' or 'fp8'"
    ):
        RagCache.open(tmp_path, quantization="int2")
    with pytest.raises(ConfigurationError, match="unknown quantization 'int2'"):
        load_model(quantization="int2")
    with pytest.raises(ConfigurationError, match="CPU alone; on cuda, give quantization='fp8'"):
        check_quantization("int8", torch.device("cuda"))


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, for models of any size."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(quantized, "packed_folder", lambda: kept)
    monkeypatch.setattr(quantized, "KEPT_FROM", 0)
    return kept


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_second_opening_reads_packed_weights(
    folder: str, quantization: str, kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(folder, **FLOAT, quantization=quantization)
    assert [path.suffix for path in kept_in.iterdir()] == [".pt"]
    monkeypatch.setattr(quantized, "_keep_packed", None)  # called where weights are packed
    second = load_model(folder, **FLOAT, quantization=quantization)
    assert second.causal.fingerprint == first.causal.fingerprint


@pytest.mark.parametrize("words", [320, 328, 3200])
def test_packed_weights_of_a_file_are_aligned(
    words: int, kept_in: Path, tmp_path: Path, reader: LoadedModel
) -> None:
    source = saved(tmp_path / "model", reader, vocab_size=words)
    for _ in range(2):
        loaded = load_model(source, **FLOAT, quantization="int8")
        for layer in packed_layers(loaded.causal.model):
            assert layer.weight.data_ptr() % 64 == layer.scales.data_ptr() % 64 == 0
    assert len(list(kept_in.iterdir())) == 1


def test_another_checkpoint_in_the_same_folder_is_packed_anew(
    kept_in: Path, tmp_path: Path, reader: LoadedModel
) -> None:
    source = saved(tmp_path / "model", reader)
    first = load_model(source, **FLOAT, quantization="int8").causal.fingerprint
    weights = Path(source) / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-2] ^= 1
    weights.write_bytes(changed)
    second = load_model(source, **FLOAT, quantization="int8").causal.fingerprint
    assert second != first
    assert len(list(kept_in.iterdir())) == 2


def test_a_mapped_model_answers_as_the_packed_one(
    folder: str, kept_in: Path, packed: tuple[str, LoadedModel]
) -> None:
    name, expected = packed
    for _ in range(2):
        loaded = load_model(folder, **FLOAT, quantization=name)
        limit_rows(loaded.causal.model, 0)
        limit_rows(expected.causal.model, 0)
        torch.testing.assert_close(logits(loaded), logits(expected))
        assert loaded.stop_ids == expected.stop_ids
        assert loaded.causal.fingerprint == expected.causal.fingerprint


def lose_the_head(file: Path) -> None:
    tensors = torch.load(file, weights_only=True)
    last = max(int(name.split(".")[0]) for name in tensors if name.endswith(".scales"))
    tensors["digests"].popitem()
    del tensors[f"{last}.weight"]
    torch.save(tensors, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def lose_a_layer(file: Path) -> None:
    tensors = torch.load(file, weights_only=True)
    del tensors["0.scales"]
    torch.save(tensors, file)


def hold_an_object(file: Path) -> None:
    torch.save({"0.weight": Path("/")}, file)  # a type that is not read


@pytest.mark.parametrize("damage", [cut, lose_a_layer, lose_the_head, hold_an_object])
def test_damaged_packed_weights_are_packed_again(
    damage: Callable[[Path], None], folder: str, kept_in: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_model(folder, **FLOAT, quantization="int8")
    [file] = kept_in.iterdir()
    damage(file)
    second = load_model(folder, **FLOAT, quantization="int8")
    assert second.causal.fingerprint == first.causal.fingerprint
    assert "packed again" in caplog.text
    load_model(folder, **FLOAT, quantization="int4")
    assert len(list(kept_in.iterdir())) == 2, "other numbers have another file"


def test_a_folder_that_cannot_be_written_keeps_nothing(
    folder: str, kept_in: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept_in.rmdir()
    kept_in.write_text("no folder")
    assert load_model(folder, **FLOAT, quantization="int8").causal.fingerprint
    assert "not kept" in caplog.text
