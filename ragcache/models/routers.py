"""The routers of mixtures in compiled layers.

transformers' routers choose experts by `torch.topk`, which takes two kernels made for long rows,
and some multiply in float32, which for few rows occupies one of a GPU's processors.
`rewrite_routers` replaces both in a traced graph, wherever they are, by operators with the same
results.

A router, a shared expert and the gate of the shared expert multiply the same rows by three small
matrices. `join_routers` puts these one behind the other, and `rewrite_routers` makes one product of
the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend

from ragcache.models.mixer_graphs import rewrite_mixers

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""Sizes of a choice up to which one program computes a row of it."""

COLUMNS = 8
"""Joined products have a multiple of so many columns: others are not aligned, and take longer."""


def join_routers(model: nn.Module) -> int:
    """Put the weights of routers, shared experts and their gates one behind the other in memory, in
    place, where a mixture multiplies the same rows by them.

    Returns: How many mixtures have joined weights.
    """
    joined = 0
    for mixture in model.modules():
        owners = _joined_owners(mixture)
        if len(owners) > 1:
            _join([owner.weight for owner in owners], owners)
            joined += 1
    return joined


def _joined_owners(mixture: nn.Module) -> list[Any]:
    """The modules of a mixture whose weights are joined: their inputs are the mixture's."""
    children: dict[str, Any] = dict(mixture.named_children())
    if not hasattr(children.get("gate"), "top_k") or "shared_expert" not in children:
        return []
    shared: dict[str, Any] = dict(children["shared_expert"].named_children())
    merged = shared.get("merged_gate_proj_up_proj")
    linears = (getattr(merged, "linear", None), children.get("shared_expert_gate"))
    plain = [each for each in linears if type(each) is nn.Linear and each.bias is None]
    owners = sorted([*plain, children["gate"]], key=lambda each: -len(each.weight))
    weights = [each.weight for each in owners]
    kinds = {(each.dim(), each.shape[-1], each.dtype, each.device) for each in weights}
    return owners if len(kinds) == 1 and weights[0].dim() == 2 else []


def _join(weights: list[Tensor], owners: Sequence[Any]) -> None:
    whole = weights[0].new_zeros(_rounded(weights), weights[0].shape[1])
    begin = 0
    for owner, weight in zip(owners, weights, strict=True):
        part = whole[begin : begin + len(weight)]
        part.copy_(weight.detach())
        owner.weight = nn.Parameter(part, requires_grad=False)
        begin += len(weight)


def _rounded(weights: Sequence[Tensor]) -> int:
    return -(-sum(each.shape[0] for each in weights) // COLUMNS) * COLUMNS


def rewriting(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler of traced graphs that rewrites routers and mixers before another compiles
    them."""
    compile_graph = lookup_backend(backend) if isinstance(backend, str) else backend

    def rewritten(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        rewrite_routers(graph)
        rewrite_mixers(graph)
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
            logits = _before_softmax(node.args[0])
            node.args = (logits or node.args[0], chosen, logits is not None)
            node.kwargs = {}
        elif node.op == "call_function" and node.target is torch._C._nn.linear:
            factors = [_before_float32(each) for each in node.args]
            if len(factors) == 2 and not node.kwargs and all(factors):
                node.target = torch.ops.ragcache.multiply_exactly.default
                node.args = tuple(factors)
    if any(each.target is torch.ops.ragcache.choose_experts.default for each in nodes):
        _join_products(graph.graph)
    graph.recompile()


def _join_products(graph: fx.Graph) -> None:
    """Join products of the same rows."""
    by_rows: dict[fx.Node, list[Any]] = {}
    for node in graph.nodes:
        rows = _rows_of(node)
        if rows is not None:
            by_rows.setdefault(rows, []).append(node)
    for products in by_rows.values():
        if len(products) > 1:
            _join_some(graph, products)


def _rows_of(node: Any) -> fx.Node | None:
    """Return the rows [T, K] of a product by a weight of 16 bits, before reshapes that change
    nothing."""
    if node.op != "call_function" or node.target is not torch._C._nn.linear or node.kwargs:
        return None
    if len(node.args) == 3 and node.args[2] is not None:
        return None
    rows, weight = node.args[:2]
    found = [each.meta.get("example_value") for each in (rows, weight)]
    if not all(isinstance(each, Tensor) and each.dim() == 2 for each in found):
        return None
    if weight.op not in ("placeholder", "get_attr") or found[1].dtype.itemsize != 2:
        return None
    while rows.op == "call_method" and rows.target in ("reshape", "view"):
        before = rows.args[0].meta.get("example_value")
        if not isinstance(before, Tensor) or before.dim() != 2:
            break
        rows = rows.args[0]
    return rows if isinstance(rows, fx.Node) else None


def _join_some(graph: fx.Graph, products: Sequence[Any]) -> None:
    """Replace products by columns of one, in front of the first, if their weights are joined."""
    rows, weights = _rows_of(products[0]), [each.args[1] for each in products]
    found = [each.meta["example_value"] for each in weights]
    order = sorted(range(len(weights)), key=lambda n: int(found[n].storage_offset()))
    ends = [0, *accumulate(found[n].numel() for n in order)]
    if any(found[n].storage_offset() != end for n, end in zip(order, ends, strict=False)):
        return
    with graph.inserting_before(products[0]):
        operator = torch.ops.ragcache.multiply_joined.default
        whole = graph.call_function(operator, (rows, [weights[n] for n in order]))
        begin = 0
        for n in order:
            end = begin + found[n].shape[0]
            columns = (slice(None), slice(begin, end))
            part = graph.call_function(getitem, (whole, columns))
            part.meta["example_value"] = products[n].meta["example_value"]
            products[n].replace_all_uses_with(part)
            begin = end
    for each in products:
        graph.erase_node(each)


def _before_softmax(node: Any) -> fx.Node | None:
    """Return the numbers of which a node is the softmax of each row in float32, if it is."""
    if node.target is not torch.nn.functional.softmax or len(node.args) > 1:
        return None
    options = {name: each for name, each in node.kwargs.items() if name != "_stacklevel"}
    rows = options == {"dim": -1, "dtype": torch.float32}
    return node.args[0] if rows else None


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


@torch.library.custom_op(
    "ragcache::choose_experts", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def choose_experts(scores: Tensor, count: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """Return the largest `count` of each row's scores [T, E], the largest first, and their places
    [T, count], int64. softmax: whether the scores are first turned into their softmax, in
    float32."""
    if not scores.is_cuda:
        if softmax:
            scores = scores.softmax(-1, dtype=torch.float32)
        values, places = scores.topk(count)
        return values, places
    from ragcache.models.expert_kernels import choose_few

    return choose_few(scores, count, softmax=softmax)


@choose_experts.register_fake
def _shape_choice(scores: Tensor, count: int, softmax: bool) -> tuple[Tensor, Tensor]:
    shape = scores.shape[0], count
    values = scores.new_empty(shape, dtype=torch.float32 if softmax else scores.dtype)
    return values, scores.new_empty(shape, dtype=torch.int64)


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


@torch.library.custom_op(
    "ragcache::multiply_joined", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,)
)
def multiply_joined(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return rows [T, K] times several weights [N, K], side by side: [T, sum of N]. Columns of no
    defined content fill up a multiple of `COLUMNS`. Weights of one memory (`join_routers`) are one
    product."""
    width = _rounded(weights)
    if _is_joined(weights):
        first = weights[0]
        whole = first.as_strided((width, first.shape[1]), (first.shape[1], 1))
        return torch.nn.functional.linear(rows, whole)
    parts = [torch.nn.functional.linear(rows, each) for each in weights]
    return torch.nn.functional.pad(torch.cat(parts, 1), (0, width - sum(map(len, weights))))


def _is_joined(weights: Sequence[Tensor]) -> bool:
    """Tell whether weights follow each other in one memory, which has room for all columns."""
    first, at = weights[0], weights[0].data_ptr()
    memory = first.untyped_storage()
    for each in weights:
        same = each.untyped_storage().data_ptr() == memory.data_ptr() and each.data_ptr() == at
        if not same or not each.is_contiguous():
            return False
        at += each.nbytes
    end = first.data_ptr() + _rounded(weights) * first.shape[1] * first.element_size()
    return end <= memory.data_ptr() + memory.nbytes()


@multiply_joined.register_fake
def _shape_joined(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return rows.new_empty(rows.shape[0], _rounded(weights))
