"""Sums that add the residual and normalize the result: a pass over compiled layers.

A decoder layer adds the result of each of its two sums to its hidden states, and normalizes those
of the first. Inductor makes a kernel of such an addition, since a sum is opaque to it. The pass
gives the residual and the norm to the sum, whose kernel does both on the way.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

_aten, _ours = torch.ops.aten, torch.ops.ragcache


def sums_add_residuals() -> AbstractContextManager[Any]:
    """Within it, compiled layers give residuals and norms to their sums."""
    patch: AbstractContextManager[Any] = torch._inductor.config.patch(
        post_grad_custom_post_pass=ResidualPass()
    )
    return patch


class ResidualPass(CustomGraphPass):
    """Replaces `residual + sum_products(...)` by `sum_products_add`, and that and an RMSNorm over
    it by `sum_and_normalize`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite a graph, in place."""
        for node in list(graph.find_nodes(op="call_function", target=_ours.sum_products.default)):
            users = list(node.users)
            if len(users) == 1 and (residual := _residual_of(users[0], node)) is not None:
                hidden, weight, handle = node.args
                with graph.inserting_before(users[0]):
                    joined = graph.call_function(
                        _ours.sum_products_add.default, (hidden, weight, residual, handle)
                    )
                joined.meta.update(users[0].meta)
                users[0].replace_all_uses_with(joined)
                graph.erase_node(users[0])
                graph.erase_node(node)
                if (norm := _norm_over(joined)) is not None:
                    _normalize(graph, joined, norm)

    def uuid(self) -> bytes:
        """Name the pass for the cache of compiled graphs."""
        return b"ragcache: sums add residuals and normalize, 1"


class _Norm(NamedTuple):
    """The nodes of an RMSNorm, in the order of the graph, of which the last one is its result."""

    nodes: list[torch.fx.Node]
    gain: torch.fx.Node
    epsilon: float


def _residual_of(add: torch.fx.Node, total: torch.fx.Node) -> torch.fx.Node | None:
    """The other term of an addition, if it is a tensor of the same kind."""
    if add.target is not _aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[1] if add.args[0] is total else add.args[0]
    if other is total or not isinstance(other, torch.fx.Node):
        return None
    kinds = [
        (each.meta["val"].dtype, [str(size) for size in each.meta["val"].shape])
        for each in (other, total)
    ]
    return other if kinds[0] == kinds[1] else None


def _norm_over(total: torch.fx.Node) -> _Norm | None:
    """The RMSNorm over a sum: gain * (x * rsqrt(mean(x ** 2) + epsilon)), x in float32."""
    convert = torch.ops.prims.convert_element_type.default
    dtype, nodes, wide = total.meta["val"].dtype, list[torch.fx.Node](), total
    if dtype != torch.float32:
        conversions = [
            each for each in total.users if each.target is convert and each.args[1] == torch.float32
        ]
        if len(conversions) != 1:
            return None
        nodes, wide = conversions, conversions[0]
    squares = [each for each in wide.users if each.target is _aten.pow.Tensor_Scalar]
    if len(squares) != 1 or squares[0].args[1] != 2:
        return None
    nodes += squares
    for target in (_aten.mean.dim, _aten.add.Tensor, _aten.rsqrt.default, _aten.mul.Tensor):
        if (node := _only_user(nodes[-1], target)) is None:
            return None
        nodes.append(node)
    mean, shifted, root, scaled = nodes[-4:]
    epsilon = shifted.args[1]
    fits = [*mean.args[1:]] == [[-1], True] and isinstance(epsilon, float)
    if not fits or set(scaled.args) != {wide, root} or shifted.kwargs:
        return None
    if wide is not total:
        rounded = _only_user(scaled, convert)
        if rounded is None or rounded.args[1] != dtype:
            return None
        nodes.append(rounded)
    result = _only_user(nodes[-1], _aten.mul.Tensor)
    if result is None:
        return None
    [gain] = [each for each in result.args if each is not nodes[-1]] or [None]
    if not isinstance(gain, torch.fx.Node) or gain.op != "placeholder":
        return None
    value = gain.meta["val"]
    if value.dtype != dtype or value.shape != total.meta["val"].shape[-1:]:
        return None
    assert isinstance(epsilon, float)
    return _Norm([*nodes, result], gain, epsilon)


def _only_user(node: torch.fx.Node, target: Any) -> torch.fx.Node | None:
    """The node that uses another's result, if it is one, of a kind."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _normalize(graph: torch.fx.Graph, total: torch.fx.Node, norm: _Norm) -> None:
    """Replace a sum that adds the residual, and the norm over it."""
    hidden, weight, residual, handle = total.args
    given = hidden, weight, residual, norm.gain, norm.epsilon, handle
    olds = total, norm.nodes[-1]
    with graph.inserting_before(total):
        both = graph.call_function(_ours.sum_and_normalize.default, given)
        news = [graph.call_function(operator.getitem, (both, number)) for number in range(2)]
    both.meta["val"] = tuple(each.meta["val"] for each in olds)
    for old, new in zip(olds, news, strict=True):
        new.meta.update(old.meta)
    norm.nodes[-1].replace_all_uses_with(news[1])
    for node in reversed(norm.nodes):
        graph.erase_node(node)
    total.replace_all_uses_with(news[0])
    graph.erase_node(total)
