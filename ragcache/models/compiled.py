"""Compiled layers: one graph for all decoder layers and numbers of rows.

Eager modules launch 37 kernels a Llama layer, most of them elementwise. `prepare_for_device` merges
the projections and compiles each decoder layer, which leaves the products, the attention and a few
fused kernels. A trial step makes the graph at once, because none can be made while a CUDA graph is
captured. Only steps whose attention goes through the operator `ragcache::attend` are compiled; any
other call of the model takes the eager modules.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from torch import Tensor, nn

from ragcache.attention.triton.operator import OperatorMetadata, register_step
from ragcache.machine import prefer_cublaslt
from ragcache.models.experts import use_expert_kernels
from ragcache.models.hf_patch import SegmentCache, number_layers
from ragcache.models.model import CausalLM, ForwardBatch, layer_list
from ragcache.models.projections import merge_projections
from ragcache.models.routers import join_routers, rewriting

logger = logging.getLogger(__name__)

TRACED_ROWS = 61
"""Rows of the step that is traced. A prime, because the compiler takes equal sizes for one: rows
that equal a model's size would be compiled for that number only. Inductor tunes for this number."""
FEWEST_ROWS = 2
"""Rows that the same graph still serves; one row would be compiled apart."""

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
        keep_kernels()
    merge_projections(causal)
    if causal.device.type == "cuda":
        use_expert_kernels(causal.model)
        join_routers(causal.model)
    compile_layers(causal, backend)


def keep_kernels() -> None:
    """Let compiled kernels be kept in the cache folder of models, unless the environment names
    another. PyTorch and Triton keep them by what they compute and by their own versions. Where
    nothing can be written there, their own folders are used."""
    try:
        folder = cached_assets_path("ragcache", namespace="models", subfolder="kernels")
    except OSError as error:
        logger.info("compiled kernels are not kept for the next start: %s", error)
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


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
    layers = layer_list(causal.model, causal.depth)
    if layers is None:
        raise LookupError(f"no list of {causal.depth} layers in {type(causal.model).__name__}")
    return layers


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
    """Whether a layer is called for a step that goes through operators."""
    return any(
        isinstance(each, SegmentCache) and each.through_operators
        for each in (*args, *kwargs.values())
    )


def for_several_rows(rows: Tensor, *_args: Any, **_kwargs: Any) -> bool:
    """Whether a module is called by `CausalLM.forward`, rather than in training, and with rows
    [1, T, ...] that are no fewer than graphs are compiled for."""
    return torch.is_inference_mode_enabled() and rows.shape[1] >= FEWEST_ROWS


def _install(causal: CausalLM, backend: Backend) -> None:
    """Gives the modules that are compiled another forward."""
    layers = decoder_layers(causal)
    for kind in dict.fromkeys(map(type, layers)):
        same = [each for each in layers if type(each) is kind]
        _replace_forward(same, type(same[0]).forward, backend, through_operator)
    for module, forward in _around(causal, layers):
        _replace_forward([module], forward, backend, for_several_rows)


def _replace_forward(
    modules: list[nn.Module],
    forward: Callable[..., Any],
    backend: Backend,
    compiles: Callable[..., bool],
) -> None:
    """Gives modules of one class one compiled forward."""
    # PyTorch keeps graphs by code object, and allows eight: each model has its own
    own = FunctionType(_call.__code__.replace(), globals(), _call.__name__)
    compiled = torch.compile(own, backend=rewriting(backend), fullgraph=True, dynamic=True)
    for module in modules:
        module.forward = CompiledForward(module, partial(compiled, forward, module), compiles)


def _call(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


class _NoAttention:
    """A step of zeros: shapes are all that a trial needs."""

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        batch, heads, rows = query.shape[:3]
        return query.new_zeros(batch, rows, heads, value.shape[-1])

    def convolve(self, layer: int, inputs: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG002
        batch, channels, rows = inputs.shape
        return inputs.new_zeros(batch, rows, channels)

    def recur(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,  # noqa: ARG002
        key: Tensor,  # noqa: ARG002
        value: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return torch.zeros(value.shape, dtype=torch.float32, device=value.device)


def _try_step(causal: CausalLM, rows: int) -> None:
    step = _NoAttention()
    zeros = torch.zeros(rows, dtype=torch.int64, device=causal.device)
    positions = torch.arange(rows, device=causal.device)
    metadata = OperatorMetadata(register_step(step), causal.softcap)
    # logits of all rows, so that the last norm is compiled for several
    causal.forward(ForwardBatch(zeros, positions, positions, metadata))
