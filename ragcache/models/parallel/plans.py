"""Plans of split models: which linear layers a rank has some rows or columns of.

transformers names them in `base_model_tp_plan`. A layer that is split by columns of its result
(`colwise`) has some rows of the weight, whole heads of an attention; the layer behind it is split
by columns of its input (`rowwise`), and the ranks add up their results. A layer thus has two sums.
The head is split by tokens. Everything else is whole on every rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.errors import UnsupportedModel
from ragcache.models.families import family_of
from ragcache.models.fp8 import WORD, Fp8Linear, joined_fp8
from ragcache.models.hf_patch import patch_attention
from ragcache.models.model import Dimensions
from ragcache.models.parallel.collectives import (
    Collectives,
    register_collectives,
    sum_parts,
    sum_products,
)
from ragcache.models.recurrent import LayerKinds

COLUMNS, ROWS = "colwise", "rowwise"
_WHOLE = frozenset({"replicated", "replicated_with_grad_allreduce"})
_GATHERED = "colwise_gather_output"
_MERGED = {_GATHERED: COLUMNS, "rowwise_split_input": ROWS}
"""Styles of a merged projection and of the layer behind it. transformers gathers the former, and
ragcache splits it by its sections."""
_KEY_HEADS, _QUERIES_TOO, _TWO_HALVES = frozenset({"k_proj", "v_proj"}), "qkv_proj", "gate_up_proj"
_HEAD_COUNTS = "num_heads", "num_attention_heads"

Join = Callable[[list[Tensor]], Tensor]
"""Joins parts of a weight by rows."""


class RowParallel(nn.Module):
    """A linear layer that has some columns of its weight, and adds up the results of all ranks."""

    handle: int
    """Handle of the sums (`register_collectives`), once `attach` has set it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., in_features / ranks]; returns [..., out_features]."""
        total: Tensor = sum_products(hidden, self.weight, self.handle)
        return total if self.bias is None else total + self.bias


class Fp8RowParallel(Fp8Linear):
    """`RowParallel` over weights in fp8. A rank rounds its own part of the activations."""

    handle: int
    """Handle of the sums (`register_collectives`), once `attach` has set it."""

    def product(self, rows: Tensor) -> Tensor:
        total: Tensor = sum_parts(super().product(rows), self.handle)
        return total


@dataclass(frozen=True, slots=True)
class HeadParts:
    """How the heads of a model are split.

    Example:
        >>> HeadParts(8, 2, 4).key_heads(3)
        slice(1, 2, None)
    """

    num_heads: int
    num_kv_heads: int
    ranks: int

    def key_heads(self, rank: int) -> slice:
        """Return the key heads of a rank. Fewer heads than ranks are repeated."""
        count, ranks = self.num_kv_heads, self.ranks
        first = rank * count // ranks
        return slice(first, max(first + 1, (rank + 1) * count // ranks))

    def key_columns(self, begin: int, width: int, rank: int) -> slice:
        """Return a rank's part of columns begin:begin + width, which all key heads make."""
        heads, size = self.key_heads(rank), width // self.num_kv_heads
        return slice(begin + heads.start * size, begin + heads.stop * size)

    @property
    def changed(self) -> dict[str, int]:
        """Attributes of modules and configurations that count a rank's heads."""
        heads, kv_heads = self.num_heads // self.ranks, max(1, self.num_kv_heads // self.ranks)
        counts = dict.fromkeys(_HEAD_COUNTS, heads)
        return counts | {"num_key_value_heads": kv_heads, "num_key_value_groups": heads // kv_heads}


def check_split(kind: type[Any], config: Any, ranks: int) -> None:
    """Check that a model can be split, without its weights.

    Args:
        kind: Class of the model.
        config: Configuration of the text model.
        ranks: Number of ranks.

    Raises:
        UnsupportedModel: The model has no plan, or one that is not served.
    """
    _plan_of(config, ranks)  # before a model is made
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    check_model(model, ranks)


def check_model(model: Any, ranks: int) -> None:
    """Check that a Hugging Face model can be split. Raises `UnsupportedModel`."""
    if not isinstance(model, PreTrainedModel):
        refuse_reader(ranks)
    _check_layers(model, _plan_of(model.config, ranks), _head_parts(model.config, ranks))


def refuse_reader(ranks: int) -> NoReturn:
    """Raise `UnsupportedModel` for the embedded reader, which has no plan."""
    raise UnsupportedModel(
        f"tensor_parallel={ranks}: the embedded reader runs in one process; give a model, or "
        "leave tensor_parallel out"
    )


def shard_model(model: Any, rank: int, ranks: int, join: Join = torch.cat) -> tuple[Any, HeadParts]:
    """Make the part of a model that a rank computes. Its weights are views of the model's.

    Args:
        model: The Hugging Face model, which stays as it is.
        rank: Number of the rank.
        ranks: Number of ranks.
        join: Joins the parts of a merged projection, which are no view.

    Returns:
        The model of the rank, and how its heads are split.

    Raises:
        UnsupportedModel: As `check_split`.
    """
    plan, parts = _plan_of(model.config, ranks), _head_parts(model.config, ranks)
    split = _check_layers(model, plan, parts)
    shard = copy.deepcopy(model, {id(each): _alias(each) for each in weights_of(model)})
    for name, linear in split.items():
        shard.base_model.set_submodule(name, _part(name, linear, plan, rank, parts, join))
    head = model.get_output_embeddings()
    rows = _token_rows(head.out_features, rank, ranks)
    shard.set_output_embeddings(_linear(head, lambda weight: weight[rows]))
    _count_heads(shard, parts)
    return shard, parts


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model, each of them once."""
    yield from model.parameters()
    yield from model.buffers()


def attach(shard: Any, collectives: Collectives) -> None:
    """Give the layers of a rank's model the sums over all ranks."""
    handle = register_collectives(collectives)
    for module in shard.modules():
        if isinstance(module, RowParallel | Fp8RowParallel):
            module.handle = handle


def _plan_of(config: Any, ranks: int) -> dict[str, str]:
    """Patterns of module names below the stack, with their styles."""
    family = family_of(config)
    if getattr(config, "kv_lora_rank", None):
        _refuse(config, ranks, "keep latents, one head for all ranks")
    if family.dimensions(config).layout is not None:
        _refuse(config, ranks, "have heads of two sizes, whose states are not split")
    if LayerKinds.of(config).recurrent:
        _refuse(config, ranks, "have recurrent layers, whose states are not split")
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    if not plan:
        _refuse(config, ranks, "have no plan in transformers (base_model_tp_plan)")
    gathered = [name for name, style in plan.items() if style == _GATHERED]
    if gathered and all(name.endswith((_QUERIES_TOO, _TWO_HALVES)) for name in gathered):
        plan = {name: _MERGED.get(style, style) for name, style in plan.items()}
    others = sorted({*plan.values()} - {COLUMNS, ROWS} - _WHOLE)
    if others:
        _refuse(config, ranks, f"are split by {', '.join(others)}, which is not served")
    if family.patch is not patch_attention:
        _refuse(config, ranks, "have an attention of their own, which is not split")
    return plan


def _head_parts(config: Any, ranks: int) -> HeadParts:
    sizes: Dimensions = family_of(config).dimensions(config)
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UnsupportedModel(
            f"tensor_parallel={ranks}: the model has {heads} query heads and {kv_heads} key heads, "
            "which cannot be split evenly; take a number of ranks that divides the query heads, "
            "and divides the key heads or is a multiple of them"
        )
    return HeadParts(heads, kv_heads, ranks)


def _check_layers(model: Any, plan: Mapping[str, str], parts: HeadParts) -> dict[str, Any]:
    """Return the linear layers that the plan splits. Raises `UnsupportedModel` if the result of
    another layer, or of a weight between them, would be wrong."""
    config, ranks, dim = model.config, parts.ranks, Dimensions.of(model.config).head_dim
    split: dict[str, Any] = {}
    module: Any
    for name, module in _layer_modules(model):
        style = _style(name, plan)
        if isinstance(module, nn.Linear | Fp8Linear) or style in (COLUMNS, ROWS):
            if style not in (COLUMNS, ROWS):
                _refuse(config, ranks, f"have a layer that the plan does not split ({name})")
            if type(module) not in (nn.Linear, Fp8Linear):
                _refuse(config, ranks, f"have packed weights here, which are not split ({name})")
            width = module.out_features if style == COLUMNS else module.in_features
            kind = name.rsplit(".", 1)[-1]
            even = width // 2 if kind == _TWO_HALVES else width
            if even % ranks and kind not in (*_KEY_HEADS, _QUERIES_TOO):  # heads are checked
                _refuse(config, ranks, f"have a layer of {width} that cannot be split ({name})")
            if isinstance(module, Fp8Linear) and width // ranks % WORD:
                _refuse(config, ranks, f"have a layer of {width} that fp8 cannot split ({name})")
            split[name] = module
    if not split:
        _refuse(config, ranks, "have no layers of the names in their plan")
    owners = {name.rpartition(".")[0] for name in split}
    for name, module in _layer_modules(model):
        if name in split or not any(name == each or name.startswith(f"{each}.") for each in owners):
            continue
        if any(weight.numel() > dim for weight in module.parameters(recurse=False)):
            _refuse(config, ranks, f"have weights over all heads or columns ({name})")
    return split


def _layer_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of all decoder layers, with their names below the stack."""
    stack = model.base_model
    for name, module in stack.named_modules():
        if re.match(r"\w+\.\d+\.", name):
            yield name, module


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+\.", ".*.", name, count=1))


def _part(
    name: str,
    linear: nn.Linear | Fp8Linear,
    plan: Mapping[str, str],
    rank: int,
    parts: HeadParts,
    join: Join,
) -> nn.Module:
    """The part of a linear layer that a rank has."""
    if _style(name, plan) == ROWS:
        here = _even_part(linear.in_features, rank, parts.ranks)
        if isinstance(linear, Fp8Linear):  # rounded by whole rows, as by one process
            return Fp8RowParallel(linear.weight[:, here], linear.scales, linear.bias)
        return RowParallel(linear.weight.detach()[:, here], linear.bias)
    columns = _columns(name, linear.out_features, rank, parts)
    if isinstance(linear, Fp8Linear):
        sections = [linear.part(here) for here in columns]
        return sections[0] if len(sections) == 1 else joined_fp8(sections)
    if len(columns) == 1:
        return _linear(linear, lambda weight: weight[columns[0]])
    return _linear(linear, lambda weight: join([weight[here] for here in columns]))


def _columns(name: str, width: int, rank: int, parts: HeadParts) -> list[slice]:
    """The columns of a rank, of a layer's result."""
    kind, ranks = name.rsplit(".", 1)[-1], parts.ranks
    if kind in _KEY_HEADS:
        return [parts.key_columns(0, width, rank)]
    if kind == _QUERIES_TOO:
        size = width // (parts.num_heads + 2 * parts.num_kv_heads)
        queries, keys = parts.num_heads * size, parts.num_kv_heads * size
        behind = (parts.key_columns(begin, keys, rank) for begin in (queries, queries + keys))
        return [_even_part(queries, rank, ranks), *behind]
    if kind == _TWO_HALVES:
        half = _even_part(width // 2, rank, ranks)
        return [half, slice(half.start + width // 2, half.stop + width // 2)]
    return [_even_part(width, rank, ranks)]


def _even_part(count: int, rank: int, ranks: int) -> slice:
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def _token_rows(vocabulary: int, rank: int, ranks: int) -> slice:
    """The tokens of a rank's head. The last ranks may have fewer."""
    most = -(-vocabulary // ranks)
    return slice(rank * most, min((rank + 1) * most, vocabulary))


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, so that a model may move its weights and a rank not."""
    alias = tensor.detach()
    return nn.Parameter(alias, requires_grad=False) if isinstance(tensor, nn.Parameter) else alias


def _linear(whole: nn.Linear, part: Callable[[Tensor], Tensor]) -> nn.Linear:
    """A linear layer with a part of the rows of another's weight and bias."""
    weight, bias = part(whole.weight.detach()), whole.bias
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(part(bias.detach()), requires_grad=False)
    return layer


def _count_heads(shard: Any, parts: HeadParts) -> None:
    """Change the head counts of a rank's configuration and of modules that keep their own."""
    config, changed = shard.config, parts.changed
    config.head_dim = Dimensions.of(config).head_dim
    for name, value in changed.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    for module in shard.modules():
        for name in changed.keys() & vars(module).keys():
            setattr(module, name, changed[name])


def _refuse(config: Any, ranks: int, reason: str) -> NoReturn:
    raise UnsupportedModel(
        f"tensor_parallel={ranks}: {config.model_type} models {reason}. Leave tensor_parallel out, "
        "or serve the model by several replicas"
    )
