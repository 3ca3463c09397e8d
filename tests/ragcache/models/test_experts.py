"""Experts of mixtures as a GPU computes them, beside transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import AutoConfig

from ragcache.models import wrap_causal
from ragcache.models.checkpoint import text_class
from ragcache.models.experts import IMPLEMENTATION, use_expert_kernels
from ragcache.models.families import family_of
from ragcache.models.projections import merge_projections
from ragcache.models.routers import join_routers, multiply_joined, rewriting
from ragcache.models.trial import tiny_config
from ragcache.models.trial import tiny_model as random_model
from tests.interpreted import interpreted
from tests.tiny_hybrids import tiny_hybrid
from tests.tiny_models import LATENT, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def model_of(family: str) -> Any:
    """gpt-oss has weights the other way round, biases, and a gate of its own."""
    if family not in ("gpt_oss", "deepseek_v2"):
        return tiny_model(family)
    latents = {"kv_lora_rank": 64, "q_lora_rank": None, "num_experts_per_tok": 2}
    whole = AutoConfig.for_model(family, **(latents if family == "deepseek_v2" else {}))
    return random_model(text_class(whole), tiny_config(whole, family_of(whole)), 7)


def experts_of(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


def drawn(rows: int, chosen: int, experts: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.rand(rows, experts, generator=generator).topk(chosen).indices
    hidden = torch.randn(rows, width, generator=generator)
    return hidden, numbers, torch.rand(rows, chosen, generator=generator)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", LATENT])
@torch.inference_mode()
def test_experts_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    experts = experts_of(model)
    inputs = [drawn(rows, 2, experts.num_experts, 64) for rows in (1, 7, 60)]
    hidden = [(torch.nn.functional.pad(x, (0, _width(model) - 64)), *rest) for x, *rest in inputs]
    expected = [experts(*each) for each in hidden]
    use_expert_kernels(model)
    assert model.config._experts_implementation == IMPLEMENTATION
    for each, wanted in zip(hidden, expected, strict=True):
        torch.testing.assert_close(experts(*each), wanted, **CLOSE)


def _width(model: Any) -> int:
    return int(model.config.hidden_size)


@interpreted
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "chosen"), [(1, 3), (9, 3), (100, 1), (100, 3)])
def test_one_kernel_multiplies_few_rows(rows: int, chosen: int, *, turned: bool) -> None:
    from ragcache.models.expert_kernels import multiply_few, sort_pairs

    hidden, experts, _ = drawn(rows, chosen, 6, 40)
    experts[experts == 4] = 5  # an expert without pairs
    up, down = torch.randn(6, 40, 72) / 6, torch.randn(6, 72, 24) / 8
    if turned:
        up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
    order = sort_pairs(experts, 6)
    assert torch.equal(order, experts.flatten().argsort(stable=True))
    chosen_up, chosen_down = (w[experts.flatten()] for w in (up, down))
    expected = (hidden.repeat_interleave(chosen, 0)[:, None] @ chosen_up)[:, 0]
    found = multiply_few(hidden, up, experts, order)
    torch.testing.assert_close(found, expected[order], **CLOSE)
    gate, values = found.chunk(2, -1)
    gated = multiply_few(hidden, up, experts, order, gated=True)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * values, **CLOSE)
    back = multiply_few(found, down, experts, order, back=True)
    torch.testing.assert_close(back, (expected[:, None] @ chosen_down)[:, 0], **CLOSE)


@interpreted
@pytest.mark.parametrize("live", [0, 1, 5, 9])
def test_padding_has_no_experts(live: int) -> None:
    from ragcache.models.expert_kernels import multiply_few, sort_pairs

    hidden, experts, _ = drawn(9, 3, 6, 40)
    up, down = torch.randn(6, 40, 72) / 6, torch.randn(6, 36, 24) / 8
    order = sort_pairs(experts, 6)
    expected = multiply_few(hidden, up, experts, order, gated=True)
    expected = multiply_few(expected, down, experts, order, back=True)
    count, hidden = torch.tensor([live], dtype=torch.int32), hidden.clone()
    hidden[live:] = torch.nan
    order = sort_pairs(experts, 6, count)
    assert torch.equal(order[: live * 3], experts[:live].flatten().argsort(stable=True))
    assert order[live * 3 :].tolist() == [*range(live * 3, experts.numel())]
    found = multiply_few(hidden, up, experts, order, live=count, gated=True)
    found = multiply_few(found, down, experts, order, live=count, back=True)
    torch.testing.assert_close(found[: live * 3], expected[: live * 3], **CLOSE)
    assert not found[live * 3 :].any()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_kernel_chooses_experts(dtype: torch.dtype) -> None:
    from ragcache.models.expert_kernels import choose_few

    scores = torch.stack([torch.randperm(60) for _ in range(5)]).to(dtype) - 30
    scores[0, 4:] = -torch.inf
    wide = torch.nn.functional.pad(scores, (0, 3))[:, :60]
    values, places = choose_few(wide, 6, softmax=False)
    expected = scores.topk(6)
    assert torch.equal(values, expected.values)
    assert torch.equal(places[1:], expected.indices[1:])
    values, places = choose_few(wide, 6, softmax=True)
    torch.testing.assert_close(values, scores.softmax(-1, dtype=torch.float32).topk(6).values)
    assert torch.equal(places[1:], expected.indices[1:])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_routers_are_rewritten_with_equal_results(family: str) -> None:
    """deepseek_v2 multiplies in float32."""
    model = model_of(family).bfloat16()
    router = next(m for m in model.modules() if type(m).__name__.endswith("Router"))
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    hidden = torch.randn(9, _width(model)).bfloat16()
    with torch.inference_mode():
        expected = router(hidden)
        found = torch.compile(router, backend=rewriting(keep), fullgraph=True)(hidden)
    torch.testing.assert_close(found, expected)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert "ragcache.choose_experts.default" in targets
    assert ("ragcache.multiply_exactly.default" in targets) == (family == "deepseek_v2")


@torch.inference_mode()
def test_small_products_of_a_mixture_are_one() -> None:
    """A router, a shared expert and its gate are one product."""
    model = tiny_hybrid("qwen3_5_moe_text").bfloat16()
    causal = wrap_causal(model)
    causal.fingerprint = "random"
    merge_projections(causal)
    [mixture, *_] = [each for each in model.modules() if type(each).__name__.endswith("MoeBlock")]
    hidden = torch.randn(1, 9, _width(model)).bfloat16()
    expected, graphs = mixture(hidden), list[fx.GraphModule]()

    def keep(graph: fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    assert join_routers(model) == len(causal.model.model.layers)
    assert torch.equal(mixture(hidden), expected)
    use_expert_kernels(model)
    found = torch.compile(mixture, backend=rewriting(keep), fullgraph=True)(hidden)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("ragcache.multiply_joined.default") == 1
    [joined] = [n for n in graphs[0].graph.nodes if "joined" in str(n.target)]
    assert len(joined.args[1]) == 3


@pytest.mark.parametrize("room", [7, 8])
def test_joined_products_read_nothing_behind_their_memory(room: int) -> None:
    """Weights of 7 columns that follow each other are one product of 8 where 8 are allocated."""
    memory, rows = torch.randn(room, 16), torch.randn(3, 16)
    apart = torch.randn(2, 16)
    for weights in ([memory[:5], memory[5:7]], [memory[:5], apart], [memory[5:7], memory[:5]]):
        found = multiply_joined(rows, weights)
        assert found.shape == (3, 8)
        torch.testing.assert_close(found[:, :7], rows @ torch.cat(weights).T, **CLOSE)
