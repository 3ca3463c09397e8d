"""Compiled layers: one graph for all layers, steps and numbers of rows. Traced, not compiled."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ragcache.attention.triton.operator import OperatorMetadata, register_step
from ragcache.models import CausalLM, ForwardBatch, compiled, wrap_causal
from ragcache.models.compiled import (
    CompiledForward,
    compile_layers,
    decoder_layers,
    keep_kernels,
    no_recompiles,
    prepare_for_device,
)
from ragcache.models.hf_patch import number_layers
from tests.ragcache.attention.triton.own_tokens import OwnTokens
from tests.ragcache.models.reference import CLOSE, Module, last_logits, prompt, tiny_gemma
from tests.tiny_hybrids import tiny_hybrid
from tests.tiny_models import FAMILIES, LATENT, random_tokens, tiny_model

LAYERS = 3
RMS_NORM = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families whose last norm is compiled: a graph of its own. A `LayerNorm` is one kernel already."""
ROTARY = (*RMS_NORM, "phi", "gpt_neox", "falcon-7b", "falcon-40b")
"""Families whose rotary embedding is compiled: a graph of its own."""
SIMILAR = ("mistral", "qwen2", "phi3", "gpt_neox", "falcon-40b", "falcon-rw", "mpt")
"""Families whose layers are compiled as those of others."""
GEMMAS = ("gemma2", "gemma3")
"""Layers with a window and without; in Gemma 3 each kind has frequencies and a graph of its own."""


class Graphs(list[fx.GraphModule]):
    """A compiler that keeps each traced graph, and runs it as it is."""

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.append(graph)
        return graph.forward

    def products(self) -> list[int]:
        """Number of products of linear layers in each graph."""
        return [
            sum(node.target is torch._C._nn.linear for node in graph.graph.nodes) for graph in self
        ]


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


def graph_count(family: str) -> int:
    """One for all layers, or for layers with experts and without, and those before and behind."""
    if family in GEMMAS:
        return 3 + (family == "gemma3")
    if family == LATENT:
        return 4
    return 1 + (family in ROTARY) + (family in RMS_NORM)


def deep(family: str, **changes: Any) -> CausalLM:
    if family in GEMMAS:
        return wrap_causal(tiny_gemma(family, **changes))
    return wrap_causal(tiny_model(family, num_hidden_layers=LAYERS, **changes))


def run_step(causal: CausalLM, step: OwnTokens, tokens: list[int], handle: int = 0) -> Tensor:
    """Logits of the last token of a step through the operator."""
    rows = torch.tensor([len(tokens) - 1])
    metadata = OperatorMetadata(handle or register_step(step), causal.softcap)
    batch = ForwardBatch(torch.tensor(tokens), torch.arange(len(tokens)), rows, metadata)
    return causal.forward(batch)[0]


@torch.no_grad()
def ordinary(causal: CausalLM, tokens: list[int]) -> Tensor:
    return causal.model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in SIMILAR else ())
        for name in (*FAMILIES, *GEMMAS, LATENT)
    ],
)
def test_one_graph_serves_layers_steps_and_row_counts(family: str) -> None:
    """Steps through the operator are as before, and as ordinary calls, which are as before too."""
    causal = deep(family, **({"sliding_window": 40} if family in GEMMAS else {}))
    graphs = Graphs()
    number_layers(causal.model)
    prompts = [random_tokens(rows) for rows in (2, 8, 16, 64, 300)]
    expected = [run_step(causal, OwnTokens(), tokens) for tokens in prompts]
    tokens = random_tokens(40)
    pieces = Module(random_tokens(20)), tokens

    def other_calls() -> list[Tensor]:
        if family == "gemma2":  # its caps are the engine's alone
            return []
        if family == "gemma3":  # read through windows, from segments, by kernels only
            return [ordinary(causal, tokens)]
        return [ordinary(causal, tokens), last_logits(causal, [prompt(causal, pieces)])]

    before = other_calls()
    prepare_for_device(causal, graphs)
    assert len(graphs) == graph_count(family)
    if family in ("llama", "qwen3", "phi", "opt"):
        assert sum(graphs.products()) == 4, "merged projections are one product"
    with no_recompiles():
        for step_tokens, logits in zip(prompts, expected, strict=True):
            step = OwnTokens()
            torch.testing.assert_close(run_step(causal, step, step_tokens), logits, **CLOSE)
            assert step.layers == list(range(LAYERS))
        if family in (*ROTARY, "gpt2", "opt", "gemma3"):  # others have slopes, or caps
            torch.testing.assert_close(run_step(causal, OwnTokens(), tokens), before[0], **CLOSE)
    torch.testing.assert_close(other_calls(), before, rtol=0, atol=0)
    assert len(graphs) == graph_count(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_hybrids_have_a_graph_for_each_kind_of_layer(family: str) -> None:
    """However many layers they have. Qwen3.5 has two kinds, Falcon-H1 one."""
    kinds = ["linear_attention", "full_attention"]
    deeper = {"layer_types": 3 * kinds} if family == "qwen3_5_text" else {}
    causal = wrap_causal(tiny_hybrid(family, num_hidden_layers=6, **deeper))
    graphs = Graphs()
    prepare_for_device(causal, graphs)
    assert len(graphs) == 2 + (2 if deeper else 1), "the rotary embedding and the last norm, too"
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert targets.count("ragcache.normalize_gated.default") == bool(deeper)
    [recur] = [n for g in graphs for n in g.graph.nodes if "ragcache.recur" in str(n.target)]
    assert len(recur.args) == (11 if deeper else 9), "Gated DeltaNet computes its gates"


@pytest.mark.slow
def test_preparing_keeps_fingerprint_and_answers() -> None:
    causal, graphs = deep("llama"), Graphs()
    ids = torch.tensor([random_tokens(12)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    fingerprint, answer = deep("llama").fingerprint, causal.model.generate(ids, **options)
    for _ in range(2):
        prepare_for_device(causal, graphs)
        assert len(graphs) == graph_count("llama")
    assert causal.fingerprint == fingerprint
    assert causal.model.generate(ids, **options).tolist() == answer.tolist()


@pytest.mark.slow
def test_models_do_not_share_the_limit_of_graphs() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            graphs = Graphs()
            assert compile_layers(wrap_causal(tiny_model("gpt2")), graphs)
            assert len(graphs) == 1


@pytest.mark.slow
def test_one_row_is_compiled_apart_and_refused_during_capture() -> None:
    causal, graphs = deep("gpt2"), Graphs()
    prepare_for_device(causal, graphs)
    with no_recompiles(), pytest.raises(RuntimeError, match="recompile"):
        run_step(causal, OwnTokens(), [5])
    expected = ordinary(causal, [5])
    torch.testing.assert_close(run_step(causal, OwnTokens(), [5]), expected, **CLOSE)
    assert len(graphs) == 2


@pytest.mark.slow
def test_a_failing_compiler_leaves_the_eager_modules(caplog: pytest.LogCaptureFixture) -> None:
    def fail(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler on this machine")

    causal = deep("llama")
    tokens = random_tokens(30)
    expected = ordinary(causal, tokens)
    with caplog.at_level(logging.WARNING):
        assert not compile_layers(causal, fail)
    [record] = [each for each in caplog.records if each.name == "ragcache.models.compiled"]
    assert "no compiler on this machine" in record.message
    assert not isinstance(decoder_layers(causal)[0].forward, CompiledForward)
    torch.testing.assert_close(run_step(causal, OwnTokens(), tokens), expected, **CLOSE)


def test_a_model_whose_layers_are_not_found_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    causal, graphs = deep("llama"), Graphs()
    causal.num_layers += 1
    assert not compile_layers(causal, graphs)
    assert "no list of 4 layers in LlamaForCausalLM" in caplog.text


@pytest.mark.slow
def test_layers_that_need_a_graph_each_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2 may scale its scores by the layer's number, which is a constant of the graph."""
    causal = deep("gpt2", scale_attn_by_inverse_layer_idx=True)
    tokens = random_tokens(30)
    expected = ordinary(causal, tokens)
    with torch._dynamo.config.patch(recompile_limit=LAYERS - 1):
        assert not compile_layers(causal, Graphs())
    assert "stay eager" in caplog.text
    torch.testing.assert_close(run_step(causal, OwnTokens(), tokens), expected, **CLOSE)


@pytest.mark.slow
def test_long_rope_does_not_look_at_the_positions() -> None:
    """So that nothing waits for the device, whatever was computed before."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [8.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    rope["original_max_position_embeddings"] = 128
    causal = deep("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    tokens, graphs = random_tokens(40), Graphs()
    expected = ordinary(causal, tokens)
    ordinary(causal, random_tokens(200))  # past the switch
    prepare_for_device(causal, graphs)
    assert len(graphs) == graph_count("phi3")
    assert not any("max" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    torch.testing.assert_close(run_step(causal, OwnTokens(), tokens), expected, **CLOSE)


class Strides(OwnTokens):
    """Remembers the strides of the last layer's values."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.strides = value.stride()
        return super().attend(layer, query, key, value, scale, sinks)


@pytest.mark.slow
def test_compiled_code_does_not_copy_merged_columns() -> None:
    causal = deep("llama")
    tokens = random_tokens(40)
    expected = ordinary(causal, tokens)
    prepare_for_device(causal)
    assert isinstance(decoder_layers(causal)[0].forward, CompiledForward)
    step = Strides()
    torch.testing.assert_close(run_step(causal, step, tokens), expected, **CLOSE)
    assert step.strides[1:] == (16, 4 * 16 + 2 * 16 + 2 * 16, 1)  # head, row of q, k and v, element


def test_kernels_are_kept_beside_models_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "")  # so that the test leaves no other value behind
        monkeypatch.delenv(name)
    monkeypatch.setattr(compiled, "cached_assets_path", lambda *_, **__: tmp_path)
    keep_kernels()
    assert [os.environ[name] for name in names] == [str(tmp_path), str(tmp_path / "triton")]
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    keep_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"

    def read_only(*_: object, **__: object) -> Path:
        raise PermissionError("the file system is read-only")

    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setattr(compiled, "cached_assets_path", read_only)
    keep_kernels()
    assert not any(name in os.environ for name in names)
