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
from ragcache.models.dtype import check_quantization
from ragcache.models.quantized import (
    GROUP,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    check_family,
    choose_quantization,
    four_bits,
    on_grid,
    packed_block,
    quantize_model,
)
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, reference
from tests.tiny_models import FAMILY_PARAMS, random_tokens, tiny_config, tiny_model

QUANTIZATIONS = ("int8", "int4")
FLOAT: Any = {"dtype": "float32", "states_dtype": "float32"}
ERRORS = {"int8": 0.05, "int4": 0.5}  # of the spread of logits; weights are random
SHARES = {"int8": 0.28, "int4": 0.20}  # of the bytes of float32, scales included
ROUNDING = 2**-7  # of products in bfloat16, whose numbers have 8 bits


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


@torch.inference_mode()
def logits(loaded: LoadedModel) -> Tensor:
    ids = torch.tensor([random_tokens(40)])
    last: Tensor = loaded.causal.model(ids, use_cache=False).logits[0, -1].float()
    return last


def packed_layers(model: Any) -> list[PackedLinear]:
    return [each for each in model.modules() if isinstance(each, PackedLinear)]


def limit_rows(model: Any, rows: int) -> None:
    """Let steps of at most some rows multiply packed weights."""
    for each in packed_layers(model):
        each.few_rows = rows


def layer_bytes(loaded: LoadedModel) -> int:
    return sum(each.nbytes for each in loaded.causal.model.model.layers.state_dict().values())


@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (128, 4096), (41, 48), (7, 112)])
def test_packed_numbers_are_nearest_to_the_weight(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of a step multiply the same numbers, at most half a scale from the weight."""
    monkeypatch.setattr(quantized, "_PIECE", 2**12)  # several pieces
    torch.manual_seed(1)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    weight[3] = 0
    rows = torch.randn(5, shape[1]).bfloat16()
    kinds = [Int8Linear] if shape[0] % 64 else [Int8Linear, Int4Linear]
    for kind in kinds:
        layer = kind.pack(weight)
        numbers = layer.dequantize(0, shape[0], torch.empty(weight.numel()))
        if kind is Int8Linear:
            step = layer.scales.float()[:, None].expand(shape)
            bound = 0.5 * step + 127 * 2**-8 * step
        else:
            step, zero = layer.scales.float().unbind(-1)  # [groups, out]
            bound = (0.5 + 15 * 2**-8) * step + 2**-8 * zero.abs()
            bound = bound.t().repeat_interleave(GROUP, 1)
        assert bool(((numbers - weight).abs() <= bound * 1.01).all())
        assert bool((numbers[3].abs() < 1e-20).all())
        expected = rows.float() @ numbers.t()
        scale = rows.float().abs() @ numbers.abs().t()
        for few in (0, 5):
            layer.few_rows = few
            found = layer(rows.float()) if few == 0 else layer(rows).float()
            assert bool(((found - expected).abs() <= ROUNDING * scale + 1e-20).all())
        assert torch.allclose(layer._by_pieces(rows.float()), expected, rtol=1e-4, atol=1e-4)


def test_layers_stay_whose_width_the_kernels_do_not_read() -> None:
    model = tiny_model("llama", hidden_size=40, num_attention_heads=2, num_key_value_heads=2)
    quantize_model(model, "int8", torch.float32)
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is torch.nn.Linear  # 40 numbers wide
    assert type(layer.mlp.down_proj) is Int8Linear


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
        quantize_model(small, quantization, torch.float32)
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
    packed: tuple[str, LoadedModel],
) -> None:
    """Moved modules give the logits of the quantized model where they stand."""
    causal = packed[1].causal
    limit_rows(causal.model, 0)  # products of both sides are then rounded alike
    pieces = [Module(random_tokens(24)), Module(random_tokens(31, seed=1)), random_tokens(9)]
    [cached] = last_logits(causal, [prompt(causal, pieces)])
    torch.testing.assert_close(cached, reference(causal.model, pieces), **CLOSE)


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
    if quantization == "int8":  # its rows fill no block of 4 bits
        pairs.append((layers.self_attn, "v_proj"))
    kinds = {"int8": Int8Linear, "int4": Int4Linear}
    torch.nn.init.normal_(layers.self_attn.v_proj.bias)
    expected = []
    for owner, name in pairs:
        layer = getattr(owner, name)
        rows = torch.randn(1, 3, layer.in_features)
        expected.append((rows, kinds[quantization].pack(layer.weight, layer.bias)(rows)))
    quantize_model(model, quantization, torch.float32)
    limit_rows(model, 0)
    for (owner, name), (rows, product) in zip(pairs, expected, strict=True):
        torch.testing.assert_close(getattr(owner, name)(rows), product)
    assert len(packed_layers(layers)) == 4, "inputs of a layer"


def stored_in_four_bits(rows: int, columns: int) -> Tensor:
    """A weight in bfloat16 as Q4_K holds it; many groups lack a first or last step."""
    numbers = torch.randint(0, 16, (rows, columns // GROUP, GROUP))
    scale = torch.rand(rows, columns // GROUP, 1) * 0.01 + 0.001
    least = -8 * scale * torch.rand_like(scale)
    return (numbers * scale + least).view(rows, columns).bfloat16()


def test_weights_of_four_bits_are_found_again() -> None:
    torch.manual_seed(3)
    weight = stored_in_four_bits(64, 1024)
    numbers, grid = four_bits(weight)
    error = on_grid(numbers, grid).view_as(weight) - weight.float()
    assert float(error.norm() / weight.float().norm()) < 2**-7, "roundings of scales and zeros"
    plain = torch.randn(64, 1024)
    between = on_grid(*four_bits(plain)).view_as(plain) - plain
    assert float(between.norm() / plain.norm()) > 8 * 2**-7


@pytest.mark.skipif(not packed_block(), reason="no kernel for 4 bits")
def test_auto_takes_four_bits_where_they_hold_the_weights() -> None:
    torch.manual_seed(4)
    model = tiny_model("qwen3", intermediate_size=128)
    stack = model.model.layers
    for layer in stack:
        weight = layer.mlp.down_proj.weight
        weight.data.copy_(stored_in_four_bits(*weight.shape))
    quantize_model(model, "auto", torch.float32)
    kinds = [type(each) for each in packed_layers(model)]
    assert [type(layer.mlp.down_proj) for layer in stack] == [Int4Linear] * len(stack)
    assert kinds.count(Int4Linear) == len(stack)
    assert Int8Linear in kinds


@pytest.mark.parametrize(
    ("rows", "free", "expected"), [(0, 2**40, None), (4, 2**40, "int8"), (4, 1, "int4")]
)
def test_auto_takes_the_widest_weights_that_are_quick_and_fit(
    rows: int, free: int, expected: str | None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "few_rows", lambda *_: rows)
    monkeypatch.setattr(quantized, "available_memory", lambda: free)
    loaded = load_model(folder, **FLOAT, quantization="auto")
    kinds = {type(each) for each in packed_layers(loaded.causal.model)}
    wanted = {None: set(), "int8": {Int8Linear}, "int4": {Int8Linear, Int4Linear}}
    assert kinds == wanted[expected]


def test_auto_leaves_families_that_are_not_served_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "few_rows", lambda *_: 4)
    assert choose_quantization(tiny_model("gpt2"), "auto", torch.float32) is None
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
        assert packed_layers(loaded.causal.model), rows


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


def test_blocks_of_four_bits_are_known() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    assert packed_block() == {"AVX512": 64, "AVX2": 32}.get(capability, 0)


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
def test_packed_weights_of_a_file_are_aligned(words: int, kept_in: Path) -> None:
    """The kernels load 16 bytes at once, and end the process where they are not aligned."""
    for _ in range(2):
        model = tiny_model("qwen3", vocab_size=words)
        quantize_model(model, "int8", torch.float32)
        for layer in packed_layers(model):
            assert layer.weight.data_ptr() % 16 == layer.scales.data_ptr() % 16 == 0
    assert len(list(kept_in.iterdir())) == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def lose_a_layer(file: Path) -> None:
    tensors = torch.load(file, weights_only=True)
    del tensors["0.scales"]
    torch.save(tensors, file)


def hold_an_object(file: Path) -> None:
    torch.save({"0.weight": Path("/")}, file)  # a type that is not read


@pytest.mark.parametrize("damage", [cut, lose_a_layer, hold_an_object])
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
