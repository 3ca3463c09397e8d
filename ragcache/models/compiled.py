"""Merged projections and compiled layers: one graph for all decoder layers and numbers of rows.

Eager modules launch 37 kernels a Llama layer, most of them elementwise. `prepare_for_device` merges
the projections and compiles each decoder layer, which leaves the products, the attention and a few
fused kernels. A trial step makes the graph at once, because none can be made while a CUDA graph is
captured. Only steps whose attention goes through the operator `ragcache::attend` are compiled; any
other call of the model takes the eager modules.

A decoder layer multiplies one input by the weights of queries, keys and values, and another by the
weights of gate and up. With few rows, reading the weights dominates a product, and a small matrix
does not occupy a GPU; one merged product does. `merge_projections` therefore replaces each of these
linear layers by one that returns its columns of the product. The model's own code stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragcache.attention.triton.operator import OperatorMetadata, register_step
from ragcache.machine import prefer_cublaslt
from ragcache.models.hf_patch import SegmentCache, number_layers
from ragcache.models.model import CausalLM, ForwardBatch

logger = logging.getLogger(__name__)

TRACED_ROWS = 61
"""Rows of the step that is traced. A prime, because the compiler takes equal sizes for one: rows
that equal a model's size would be compiled for that number only. Inductor tunes for this number."""
FEWEST_ROWS = 2
"""Rows that the same graph still serves; one row would be compiled apart."""

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that a module calls with the same input."""

Backend = str | Callable[..., Any]
"""Compiler of a traced graph: a name that `torch.compile` knows, or a function."""


def prepare_for_device(causal: CausalLM, backend: Backend = "inductor") -> None:
    """Takes the model's fingerprint, merges its projections and compiles its layers, in place, and
    chooses the library of products.

    Call it once the model is on its device, on the thread and stream that compute. A second call
    changes nothing.
    """
    if causal.device.type == "cuda":
        prefer_cublaslt()
    merge_projections(causal)
    compile_layers(causal, backend)


def compile_layers(causal: CausalLM, backend: Backend = "inductor") -> bool:
    """Compiles the decoder layers, and the rotary embedding and last norm around them, in place,
    and runs two trial steps.

    Returns: Whether they are compiled. Where they cannot be, a warning names the reason and the
    eager modules stay.
    """
    number_layers(causal.model)
    if any(isinstance(module.forward, CompiledForward) for module in causal.model.modules()):
        return True
    try:
        _install(causal, backend)
        with torch._dynamo.config.patch(specialize_float=True):  # as constants of the kernels
            _try_step(causal, TRACED_ROWS)
        with no_recompiles():
            _try_step(causal, FEWEST_ROWS)
    except Exception as error:  # compilers fail in more ways than have names
        logger.warning("model layers stay eager, because they cannot be compiled: %s", error)
        for module in causal.model.modules():
            if isinstance(compiled := vars(module).get("forward"), CompiledForward):
                module.forward = compiled.eager
        return False
    return True


def no_recompiles() -> AbstractContextManager[Any]:
    """Within it, an input that no compiled graph serves is an error. For the capture of CUDA
    graphs, in which nothing can be compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


def decoder_layers(causal: CausalLM) -> nn.ModuleList:
    """The list of the model's layers."""
    for module in causal.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == causal.num_layers:
            return module
    raise LookupError(f"no list of {causal.num_layers} layers in {type(causal.model).__name__}")


def _around(
    causal: CausalLM, layers: nn.ModuleList
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules before and behind the layers that need more than one kernel, with the function to
    compile: the rotary embedding, and the last norm unless it is a `LayerNorm`."""
    stack = next(each for each in causal.model.modules() if layers in each.children())
    if isinstance(rotary := getattr(stack, "rotary_emb", None), nn.Module):
        # transformers looks at the positions, which waits for the device, whether LongRoPE changes
        # its frequencies; in the window they are the original ones, which one call sets
        zero = torch.zeros(1, 1, dtype=torch.int64, device=causal.device)
        for layer_type in getattr(rotary, "layer_types", (None,)):
            kind = {} if layer_type is None else {"layer_type": layer_type}
            rotary(zero.to(causal.dtype), zero, **kind)
        yield rotary, unwrap(type(rotary).forward)
    children = list(stack.children())
    behind = children[children.index(layers) + 1 :]
    norms = [each for each in behind if "norm" in type(each).__name__.lower()]
    if norms and not isinstance(norms[-1], nn.LayerNorm):
        yield norms[-1], type(norms[-1]).forward


class CompiledForward:
    """Stands in place of a module's forward: compiled where `compiles` says so, else eager."""

    def __init__(
        self, module: nn.Module, compiled: Callable[..., Any], compiles: Callable[..., bool]
    ) -> None:
        self.eager, self.compiled, self.compiles = module.forward, compiled, compiles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.compiled if self.compiles(*args, **kwargs) else self.eager
        return forward(*args, **kwargs)


def through_operator(*args: Any, **kwargs: Any) -> bool:
    """Whether a layer is called for a step whose attention goes through the operator."""
    return any(
        isinstance(each, SegmentCache) and isinstance(each.metadata, OperatorMetadata)
        for each in (*args, *kwargs.values())
    )


def in_inference(*_args: Any, **_kwargs: Any) -> bool:
    """Whether a module is called by `CausalLM.forward`, rather than by others in training."""
    return torch.is_inference_mode_enabled()


def _install(causal: CausalLM, backend: Backend) -> None:
    """Gives the modules that are compiled another forward."""
    layers = decoder_layers(causal)
    _replace_forward([*layers], type(layers[0]).forward, backend, through_operator)
    for module, forward in _around(causal, layers):
        _replace_forward([module], forward, backend, in_inference)


def _replace_forward(
    modules: list[nn.Module],
    forward: Callable[..., Any],
    backend: Backend,
    compiles: Callable[..., bool],
) -> None:
    """Gives modules of one class one compiled forward."""
    # PyTorch keeps graphs by code object, and allows eight: each model has its own
    own = FunctionType(_call.__code__.replace(), globals(), _call.__name__)
    compiled = torch.compile(own, backend=backend, fullgraph=True, dynamic=True)
    for module in modules:
        module.forward = CompiledForward(module, partial(compiled, forward, module), compiles)


def _call(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


class _NoAttention:
    """A step of zeros: shapes are all that a trial needs."""

    def attend(self, layer: int, query: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG002
        batch, heads, rows, dim = query.shape
        return query.new_zeros(batch, rows, heads, dim)


def _try_step(causal: CausalLM, rows: int) -> None:
    step = _NoAttention()
    zeros = torch.zeros(rows, dtype=torch.int64, device=causal.device)
    positions = torch.arange(rows, device=causal.device)
    metadata = OperatorMetadata(register_step(step), causal.softcap)
    causal.forward(ForwardBatch(zeros, positions, zeros[:1], metadata))


class MergedLinear(nn.Module):
    """Linear layers over the same input, multiplied at once. Keeps the last input with its product
    until the last of them was handed out. Threads may call it at once: they see both or neither.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([part.weight.detach() for part in parts])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """The product, [..., all columns]; computed where the input is another than before."""
        kept = self.kept
        if kept is None or kept[0] is not hidden:
            self.kept = kept = hidden, F.linear(hidden, self.weight, self.bias)
        return kept[1]


class ProjectionSlice(nn.Module):
    """Columns begin:end of a `MergedLinear`, in place of a linear layer."""

    merged: MergedLinear

    def __init__(self, merged: MergedLinear, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "merged", merged)  # not registered: its weights count once
        self.begin, self.end, self.last = begin, end, last

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.merged(hidden)
        if self.last:
            self.merged.kept = None
        return product[..., self.begin : self.end]


def merge_projections(language: CausalLM) -> int:
    """Merges the projections of a model, in place. Memory for one merged weight is needed beyond
    the model. A second call changes nothing.

    The fingerprint is taken first, because it names the parameters that end here.

    Returns: How many groups were merged.
    """
    assert language.fingerprint
    merged = 0
    first = tuple(names[0] for names in GROUPS)
    # owners alone: a list of all modules would keep all weights until its end
    owners = [m for m in language.model.modules() if any(hasattr(m, name) for name in first)]
    for owner in owners:
        for names in GROUPS:
            if parts := _plain_linears(owner, names):
                _merge(owner, names, parts)
                merged += 1
    return merged


def _plain_linears(owner: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The owner's layers of these names, where all are plain, without hooks, and fit each other."""
    found = [getattr(owner, name, None) for name in names]
    parts = [p for p in found if type(p) is nn.Linear and not _is_hooked(p)]
    kinds = {(p.in_features, p.bias is None, p.weight.dtype, p.weight.device) for p in parts}
    return parts if len(parts) == len(names) and len(kinds) == 1 else []


def _is_hooked(layer: nn.Module) -> bool:
    """Whether calling a layer may do more than its class does, as where weights are offloaded."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _merge(owner: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    """Replaces the owner's linear layers. The memory of their weights is freed."""
    merged = MergedLinear(parts)
    owner.add_module("merged_" + "_".join(names), merged)
    widths = [part.out_features for part in parts]
    device = merged.weight.device
    begin = 0
    for name, width in zip(names, widths, strict=True):
        setattr(owner, name, ProjectionSlice(merged, begin, begin + width, last=name == names[-1]))
        begin += width
    parts.clear()
    if device.type == "cuda":
        # freed weights lie in segments too small for the next merged one
        torch.cuda.empty_cache()
