"""The trial of a family with quantized weights, before weights are read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ragcache.errors import UnsupportedModel
from ragcache.models.dtype import AUTO, FP8, INT8, Recall, measure_anew
from ragcache.models.families import family_of
from ragcache.models.fp8 import quantize_fp8
from ragcache.models.quantized import auto_quantization, check_gain, quantize_model
from ragcache.models.trial import SEEDS, TOLERANCE, tiny_config, tiny_model, trial_difference


def choose_quantization(
    kind: type[Any],
    config: Any,
    quantization: str | None,
    dtype: torch.dtype,
    recall: Recall = measure_anew,
) -> str | None:
    """The quantization that a name stands for. See `auto_quantization`.

    Args:
        kind: Class of the model.
        config: Its configuration.
        quantization: The name that was given.
        dtype: Dtype of the computation.
        recall: Keeps times for later processes.
    """
    if quantization != AUTO:
        return quantization
    if getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        model = kind(config)
    return auto_quantization(model, dtype, recall, partial(check_family, kind, config))


def check_family(kind: type[Any], config: Any, quantization: str = INT8) -> None:
    """Check that a family can be served with quantized weights, before weights are read.

    Tries a tiny random model (`ragcache.models.trial`). Raises `UnsupportedModel` where most
    weights are in no linear layer, or code reads weights past its layers.
    """
    family = family_of(config)
    family.check(config)
    with torch.device("meta"):
        check_gain(kind._from_config(config))
    differences = []
    try:
        for seed in SEEDS:
            tiny = tiny_model(kind, tiny_config(config, family), seed)
            if quantization == FP8:
                quantize_fp8(tiny, tiny.get_output_embeddings(), tiny.device)
            else:
                quantize_model(tiny, INT8)
            differences.append(trial_difference(tiny))
            if differences[-1] <= TOLERANCE:
                return
    except Exception as error:  # code of models raises any type
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not served with quantized weights: their "
            f"code reads weights itself ({type(error).__name__}: {error}). Leave quantization out"
        ) from error
    raise UnsupportedModel(
        f"models of type {config.model_type!r} are not served with quantized weights: answers over "
        f"kept states would differ by {min(differences):.1%}. Leave quantization out"
    )
