"""Sums that add the residual: a pass over compiled layers.

A decoder layer adds the result of each of its two sums to its hidden states. Inductor makes a
kernel of such an addition, since a sum is opaque to it. The pass gives the residual to the sum,
whose kernel adds it on the way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass


def sums_add_residuals() -> AbstractContextManager[Any]:
    """Within it, compiled layers give residuals to their sums."""
    patch: AbstractContextManager[Any] = torch._inductor.config.patch(
        post_grad_custom_post_pass=ResidualPass()
    )
    return patch


class ResidualPass(CustomGraphPass):
    """Replaces `residual + sum_products(...)` by `sum_products_add`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite a graph, in place."""
        target = torch.ops.ragcache.sum_products.default
        for node in list(graph.find_nodes(op="call_function", target=target)):
            users = list(node.users)
            if len(users) == 1 and (residual := _residual_of(users[0], node)) is not None:
                hidden, weight, handle = node.args
                with graph.inserting_before(users[0]):
                    joined = graph.call_function(
                        torch.ops.ragcache.sum_products_add.default,
                        (hidden, weight, residual, handle),
                    )
                joined.meta.update(users[0].meta)
                users[0].replace_all_uses_with(joined)
                graph.erase_node(users[0])
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """Name the pass for the cache of compiled graphs."""
        return b"ragcache: sums add residuals, 1"


def _residual_of(add: torch.fx.Node, total: torch.fx.Node) -> torch.fx.Node | None:
    """The other term of an addition, if it is a tensor of the same kind."""
    if add.target is not torch.ops.aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[1] if add.args[0] is total else add.args[0]
    if other is total or not isinstance(other, torch.fx.Node):
        return None
    kinds = [
        (each.meta["val"].dtype, [str(size) for size in each.meta["val"].shape])
        for each in (other, total)
    ]
    return other if kinds[0] == kinds[1] else None
