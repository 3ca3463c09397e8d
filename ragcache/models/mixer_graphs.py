"""Recurrent mixers in compiled layers: gates and norms around a recurrence.

transformers computes the gates of Gated DeltaNet by operations of their own, and the norm behind
its recurrence reads the gate in another order than the product left it. `rewrite_mixers` finds both
in a traced graph, wherever they are: the recurrence computes its gates, and one operator is the
norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

Pattern = str | tuple[Any, ...]
"""A name for any node, or an operation and the patterns of its first arguments."""

_RATE = ("neg", ("exp", ("float", "rate")))
_GATES = (
    ("float", ("mul", _RATE, ("softplus", ("add", ("float", "decay"), "offset")))),
    ("float", ("sigmoid", "step")),
)
"""Decay and step, as arguments of a recurrence."""

_ROWS = ("to", ("reshape", ("to", "rows")))
_EVEN = ("mul", _ROWS, ("rsqrt", ("add", ("mean", ("pow", _ROWS)), "eps")))
_NORM = ("mul", ("mul", "weight", ("to", _EVEN)), ("silu", ("to", ("reshape", "gate"))))
"""A norm whose result is multiplied by SiLU of a gate."""


def rewrite_mixers(graph: fx.GraphModule) -> None:
    """Let recurrences compute their gates, and norms behind them be one operator, in place."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.ragcache.recur.default:
            _take_gates(node)
            _join_norm(graph.graph, node)
    graph.recompile()


def _take_gates(recur: Any) -> None:
    found: dict[str, Any] = {}
    if len(recur.args) != 9 or not recur.args[5]:
        return
    if all(_matches(recur.args[3 + n], each, found) for n, each in enumerate(_GATES)):
        inputs = *recur.args[:3], found["decay"], found["step"], *recur.args[5:]
        recur.args = *inputs, found["rate"], found["offset"]


def _join_norm(graph: fx.Graph, recur: Any) -> None:
    for node in _behind(recur, depth=12):
        found: dict[str, Any] = {}
        if not _matches(node, ("to", _NORM), found) or found["rows"] is not recur:
            continue
        gate = found["gate"]
        if _shape(gate) != _shape(recur) or node.args[1] != gate.meta["example_value"].dtype:
            return
        with graph.inserting_before(node):
            operator = torch.ops.ragcache.normalize_gated.default
            inputs = recur, gate, found["weight"], found["eps"]
            whole = graph.call_function(operator, inputs)
            rows = graph.call_method("reshape", (whole, -1, _shape(recur)[-1]))
        rows.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(rows)
        return


def _behind(node: Any, depth: int) -> Iterator[Any]:
    """The nodes that need a node, over so many steps."""
    seen, now = set[Any](), {node}
    for _ in range(depth):
        now = {user for each in now for user in each.users} - seen
        seen |= now
        yield from now


def _shape(node: Any) -> list[Any]:
    return list(node.meta["example_value"].shape)


def _matches(node: Any, pattern: Pattern, found: dict[str, Any]) -> bool:
    """Tell whether a pattern matches a node. The same name stands for the same node."""
    if isinstance(pattern, str):
        return found.setdefault(pattern, node) is node
    if not isinstance(node, fx.Node) or _name(node) != pattern[0]:
        return False
    inputs = pattern[1:]
    return len(node.args) >= len(inputs) and all(
        _matches(each, part, found) for each, part in zip(node.args, inputs, strict=False)
    )


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
