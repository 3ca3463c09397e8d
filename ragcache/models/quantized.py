"""Weights in 8 and 4 bits, by torchao (extra `quantized`).

The linear layers of the decoder are quantized one by one as their weights are read: `int8` with a
scale per row, `int4` with a scale and a zero for 32 numbers of a row. Embeddings, head, norms,
activations and states stay as they are. Kept states belong to the quantized model and are read as
exactly as with any other model. Checkpoints that torchao has quantized load as they were stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ragcache.errors import ConfigurationError, UnsupportedModel
from ragcache.models.dtype import (
    INT4,
    QUANTIZATIONS,
    check_quantization,
    choose_compute,
    dtype_name,
    vocabulary_weights,
)
from ragcache.models.families import family_of
from ragcache.models.trial import SEEDS, TOLERANCE, tiny_config, tiny_model, trial_difference

GROUP = 32  # numbers of a row that share a scale in 4 bits
_ROWS = 16  # of a weight in 4 bits: the kernel of a CPU multiplies that many at once
_SHARE = 0.5  # of the layers' weights, which must become small, or else nothing is gained


def is_stored_quantized(config: Any, quantization: str | None = None) -> bool:
    """Whether the weights of a checkpoint were quantized by torchao. Raises `MissingExtra` where
    they were, but it is not installed, and `ConfigurationError` where they were quantized by
    anything, and are to be again."""
    stored = getattr(config, "quantization_config", None)
    if stored and quantization is not None:
        raise ConfigurationError(
            f"the weights of this model were stored quantized; leave quantization={quantization!r} "
            "out, or give the checkpoint that it was made from"
        )
    if not stored or _entry(stored, "quant_method") != "torchao":
        return False
    check_quantization(QUANTIZATIONS[0])
    return True


def quantizing_options(
    config: Any, quantization: str, device: torch.device, dtype: torch.dtype | None
) -> dict[str, Any]:
    """The options with which `from_pretrained` quantizes a model as it reads it.

    Args:
        config: Configuration of a model in its own dtype.
        quantization: `int8` or `int4`.
        device: Device of the weights.
        dtype: Dtype of the computation. Defaults to the fastest.

    Raises:
        UnsupportedModel: Its weights are not in linear layers, or its family reads them otherwise.
        ConfigurationError: A GPU computes with weights in 4 bits in bfloat16 only.
        MissingExtra: torchao is not installed.
    """
    from transformers import TorchAoConfig

    check_quantization(quantization)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    kept = _unquantized(skeleton, quantization)
    _check_gain(skeleton, kept, quantization)
    try_quantized(type(skeleton), config, quantization)
    scheme = torchao_scheme(quantization, device)
    options: dict[str, Any] = {
        "quantization_config": TorchAoConfig(scheme, modules_to_not_convert=kept),
        "dtype": dtype or _fastest(skeleton, quantization, device),
    }
    if device.type != "cpu":
        if quantization == INT4 and options["dtype"] != torch.bfloat16:
            raise ConfigurationError(
                f"a GPU computes with weights in 4 bits in bfloat16 alone, not in "
                f"{dtype_name(options['dtype'])}; leave dtype at auto"
            )
        options["device_map"] = {"": str(device)}  # weights in 4 bits are packed where they stay
    return options


def check_stored(config: Any, dtype: torch.dtype | None) -> None:
    """Checks a checkpoint that torchao has quantized, before its weights are read. Raises
    `ConfigurationError` for another dtype than theirs, or `UnsupportedModel`."""
    if dtype not in (None, config.dtype):
        raise ConfigurationError(
            f"the weights of this model were quantized for {dtype_name(config.dtype)}; leave dtype "
            "at auto"
        )
    try_quantized(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, QUANTIZATIONS[0])


@torch.inference_mode()
def check_computes(model: Any) -> None:
    """Computes one token with stored weights. Raises `UnsupportedModel` where this machine has no
    kernel for their format."""
    try:
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:  # kernels that are missing fail in more ways than have names
        formats = sorted({type(w).__name__ for w in model.parameters()} - {"Parameter"})
        raise UnsupportedModel(
            f"the weights of this model are stored as {', '.join(formats)}, which "
            f"{model.device.type} does not compute here ({type(error).__name__}: {error}). Give "
            "the checkpoint that it was made from, with quantization='int8' or 'int4'"
        ) from error


def try_quantized(kind: type[Any], config: Any, quantization: str) -> None:
    """Tries a family with quantized weights on a tiny random model (`ragcache.models.trial`).
    Raises `UnsupportedModel` where segments are not read as Hugging Face reads the whole text."""
    from torchao.quantization import quantize_

    family = family_of(config)
    family.check(config)
    differences = []
    try:
        for seed in SEEDS:
            tiny = tiny_model(kind, tiny_config(config, family), seed)
            kept = _unquantized(tiny, quantization)
            scheme = torchao_scheme(quantization, torch.device("cpu"))
            quantize_(tiny, scheme, lambda each, name, kept=kept: _is_quantized(each, name, kept))
            differences.append(trial_difference(tiny))
            if differences[-1] <= TOLERANCE:
                return
    except Exception as error:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not served with quantized weights: their "
            f"code reads weights itself ({type(error).__name__}: {error}). Leave quantization out"
        ) from error
    raise UnsupportedModel(
        f"models of type {config.model_type!r} are not served with quantized weights: answers over "
        f"kept states would differ by {min(differences):.1%}. Leave quantization out"
    )


def torchao_scheme(quantization: str, device: torch.device) -> Any:
    """torchao's configuration. Weights in 4 bits are packed for the kernel of their device."""
    if quantization != INT4:
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def _unquantized(model: Any, quantization: str) -> list[str]:
    """Names of linear layers that stay as they are: the head, and layers whose size 4 bits do not
    divide."""
    head = model.get_output_embeddings()
    return [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and (each is head or not _divides(each, quantization))
    ]


def _divides(layer: nn.Linear, quantization: str) -> bool:
    if quantization != INT4:
        return True
    return layer.in_features % GROUP == 0 and layer.out_features % _ROWS == 0


def _is_quantized(layer: nn.Module, name: str, kept: list[str]) -> bool:
    return isinstance(layer, nn.Linear) and name not in kept


def _check_gain(model: Any, kept: list[str], quantization: str) -> None:
    """Raises `UnsupportedModel` where most weights of the layers would stay as they are, as fused
    experts and the convolutions of GPT-2 do."""
    vocabulary = vocabulary_weights(model)
    small, large = 0, 0
    others: set[str] = set()
    for name, each in model.named_modules():
        own = [w for w in each.parameters(recurse=False) if w.dim() > 1 and id(w) not in vocabulary]
        size = sum(weight.numel() for weight in own)
        if _is_quantized(each, name, kept):
            small += size
        elif size:
            large += size
            others.add(type(each).__name__)
    if small < _SHARE * (small + large):
        raise UnsupportedModel(
            f"a {model.config.model_type} model keeps {large / (small + large):.0%} of its layers' "
            f"weights in {', '.join(sorted(others))}, which torchao does not make {quantization}; "
            "leave quantization out"
        )


def _fastest(skeleton: Any, quantization: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. The kernels for 4 bits are made for bfloat16."""
    return torch.bfloat16 if quantization == INT4 else choose_compute(skeleton, device)[0]


def _entry(config: Any, name: str) -> Any:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return getattr(value, "value", value)
