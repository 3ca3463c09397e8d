"""The routers of mixtures in compiled layers.

transformers' routers choose experts by `torch.topk`, which takes two kernels made for long rows,
and some multiply in float32, which for few rows occupies one of a GPU's processors.
`rewrite_routers` replaces both in a traced graph, wherever they are, by operators with the same
results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""Sizes of a choice up to which one program computes a row of it."""


def rewriting(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of traced graphs that rewrites the routers before another compiles them."""
    compile_graph = lookup_backend(backend) if isinstance(backend, str) else backend

    def rewritten(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        rewrite_routers(graph)
        compiled: Callable[..., Any] = compile_graph(graph, inputs, **options)
        return compiled

    return rewritten


def rewrite_routers(graph: fx.GraphModule) -> None:
    """Replace choices of experts, and products of 16-bit numbers in float32, in place."""
    nodes: list[Any] = list(graph.graph.nodes)
    for node in nodes:
        if node.op == "call_function" and node.target is torch.topk and _is_choice(node):
            chosen = node.args[1] if len(node.args) > 1 else node.kwargs["k"]
            node.target = torch.ops.ragcache.choose_experts.default
            node.args, node.kwargs = (node.args[0], chosen), {}
        elif node.op == "call_function" and node.target is torch._C._nn.linear:
            factors = [_before_float32(each) for each in node.args]
            if len(factors) == 2 and not node.kwargs and all(factors):
                node.target = torch.ops.ragcache.multiply_exactly.default
                node.args = tuple(factors)
    graph.recompile()


def _is_choice(node: Any) -> bool:
    """Tell whether a `topk` takes the largest of few numbers in the last dimension."""
    options = dict(zip(("k", "dim", "largest", "sorted"), node.args[1:], strict=False))
    options |= node.kwargs
    scores = node.args[0].meta["example_value"] if isinstance(node.args[0], fx.Node) else None
    return (
        isinstance(scores, Tensor)
        and scores.dim() == 2
        and scores.shape[1] <= MOST_EXPERTS
        and isinstance(options.get("k"), int)
        and options["k"] <= MOST_CHOSEN
        and options.get("dim", -1) in (-1, 1)
        and options.get("largest", True) is True
    )


def _before_float32(node: Any) -> fx.Node | None:
    """Return the matrix of 16 bits that a node converts to float32, if it does."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or not node.args:
        return None
    source: Any = node.args[0]
    found = node.meta.get("example_value")
    if node.target not in ("type", "to", "float") or not isinstance(source, fx.Node):
        return None
    given = source.meta.get("example_value")
    if not isinstance(given, Tensor) or not isinstance(found, Tensor):
        return None
    short = given.dtype in (torch.bfloat16, torch.float16) and given.dim() == 2
    return source if short and found.dtype == torch.float32 else None


@torch.library.custom_op("ragcache::choose_experts", mutates_args=())
def choose_experts(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest `count` of each row's scores [T, E], the largest first, and their places
    [T, count], int64."""
    if not scores.is_cuda:
        values, places = scores.topk(count)
        return values, places
    from ragcache.models.expert_kernels import choose_few

    return choose_few(scores.contiguous(), count)


@choose_experts.register_fake
def _shape_choice(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = scores.shape[0], count
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("ragcache::multiply_exactly", mutates_args=())
def multiply_exactly(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows [T, K] times weights [N, K] of 16 bits, in float32: products of their numbers are
    exact there."""
    if not rows.is_cuda:
        return torch.nn.functional.linear(rows.float(), weight.float())
    return torch.mm(rows, weight.t(), out_dtype=torch.float32)


@multiply_exactly.register_fake
def _shape_product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
