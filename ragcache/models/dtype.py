"""The dtype that a model computes in, and the one that its states are kept in.

`auto` computes in the checkpoint's dtype, or on a CPU that is slow in it in float32, if that fits
the memory. States are kept in the checkpoint's dtype either way: half the bytes, and first-token
log-probabilities within 5e-3 of float32 throughout (bfloat16 throughout: 4e-2). Weights can take
fewer bits than either (`ragcache.models.quantized`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ragcache.errors import ConfigurationError
from ragcache.machine import ROWS, available_memory, linear_seconds, processor_name

AUTO = "auto"
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
INT8, INT4, FP8 = "int8", "int4", "fp8"
QUANTIZATIONS = (INT8, INT4, FP8)
PACKED = (AUTO, INT8, INT4)
"""Quantizations of weights that a CPU multiplies packed."""
"""Quantizations of the weights of a model: the first two for a CPU, the last one for a GPU."""
MARGIN = 1.5
"""Factor by which float32 must be faster. A machine that is about as fast in both keeps the
checkpoint's dtype in every process, and so its states."""
Recall = Callable[[str, Callable[[], str]], str]
"""Returns the text that an earlier process kept under a name, or measures and keeps it."""
MEMORY_SHARE = 2 / 3
"""Share of the free memory that weights in float32 may take. States need the rest."""


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """The dtypes of a loaded model."""

    compute: torch.dtype
    """Dtype of weights and activations."""
    states: torch.dtype
    """Dtype of kept keys and values."""
    reason: str
    """Why `compute` was chosen, for people."""


def measure_anew(_name: str, measure: Callable[[], str]) -> str:
    """Keep nothing: the `Recall` of a model that belongs to no state folder."""
    return measure()


def timing_name(what: str) -> str:
    """Name under which times of this kind of processor are kept."""
    return f"times/{processor_name()}/{torch.backends.cpu.get_cpu_capability()}/{what}"


def parse_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of a name; no dtype for `auto`. Raises `ConfigurationError` for any other text."""
    if isinstance(name, torch.dtype):
        return name
    if name == AUTO:
        return None
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigurationError(
            f"{name!r} is not a dtype of models; give auto, {', '.join(DTYPES)}"
        ) from None


def check_quantization(name: str | None, device: torch.device) -> None:
    """Raises `ConfigurationError` for an unknown quantization of weights, and for one that the
    device has no products for."""
    if name not in (None, AUTO, *QUANTIZATIONS):
        raise ConfigurationError(
            f"unknown quantization {name!r}; quantizations: {AUTO}, {', '.join(QUANTIZATIONS)}"
        )
    if name in (INT8, INT4) and device.type != "cpu":
        raise ConfigurationError(
            f"weights in {name} are multiplied by a CPU alone; on {device}, give "
            "quantization='fp8' or leave it out"
        )
    if name == FP8 and not supports_fp8(device):
        raise ConfigurationError(
            f"weights in fp8 are multiplied by NVIDIA GPUs of compute capability 8.9 or later, "
            f"and not by {device_name(device)}; leave quantization out"
        )


def supports_fp8(device: torch.device) -> bool:
    """Whether a device multiplies in fp8: a GPU of NVIDIA's Ada or Hopper, or a later one."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def device_name(device: torch.device) -> str:
    """`NVIDIA A100 (cuda:0)`, or `cpu`."""
    if device.type != "cuda":
        return str(device)
    return f"{torch.cuda.get_device_name(device)} ({device})"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def choose_dtypes(
    model: Any,
    device: torch.device,
    dtype: str | torch.dtype = AUTO,
    states_dtype: str | torch.dtype = AUTO,
    checkpoint: torch.dtype | None = None,
    *,
    quantized: bool = False,
    recall: Recall = measure_anew,
) -> DTypeChoice:
    """Choose the dtypes of a loaded model.

    Args:
        model: The model, on a CPU yet.
        device: The device that it will compute on.
        dtype: Dtype of the computation, or `auto`.
        states_dtype: Dtype of kept states, or `auto`.
        checkpoint: Dtype of the file, if the model was loaded in another.
        quantized: Whether its linear layers will be quantized.
        recall: Keeps times for later processes.

    Raises:
        ConfigurationError: A dtype is unknown, or a GPU does not read states in it.
    """
    wanted, kept = parse_dtype(dtype), parse_dtype(states_dtype)
    if wanted is None:
        compute, reason = choose_compute(model, device, quantized=quantized, recall=recall)
    else:
        compute, reason = wanted, f"{dtype_name(wanted)}, as set"
    states = choose_states(kept, checkpoint or model.dtype, compute, device)
    return DTypeChoice(compute, states, reason)


def convert(model: Any, dtype: torch.dtype) -> Any:
    """The model in `dtype`, converted in place, one weight after another."""
    if model.dtype != dtype and not getattr(model, "is_quantized", False):
        model = model.to(dtype)
        model.config.dtype = dtype
    return model


def choose_compute(
    model: Any,
    device: torch.device,
    *,
    quantized: bool = False,
    recall: Recall = measure_anew,
) -> tuple[torch.dtype, str]:
    """The dtype in which a loaded model computes fastest on a device, and why."""
    own: torch.dtype = model.dtype
    name = dtype_name(own)
    if device.type != "cpu":
        return own, f"{name}, as the checkpoint: a GPU is fast in it"
    if own.itemsize >= torch.float32.itemsize:
        return own, f"{name}, as the checkpoint"
    if getattr(model, "is_quantized", False):
        return own, f"{name}: weights that are quantized stay as they are"
    shape = largest_linear(model)
    times = _layer_seconds(shape, own, recall)
    vocabulary = vocabulary_weights(model)
    stay = (each for each in model.parameters() if not quantized or id(each) in vocabulary)
    needed = sum(weight.numel() for weight in stay) * torch.float32.itemsize
    return faster_dtype(own, shape, times, needed, available_memory())


def _layer_seconds(
    shape: tuple[int, int], own: torch.dtype, recall: Recall
) -> Mapping[torch.dtype, float]:
    """Seconds of a linear layer in the checkpoint's dtype and in float32.

    Kept times make the choice the same in every process, however busy the machine is: states that
    were computed in one dtype have other keys than states that were computed in another.
    """
    names = (dtype_name(own), "float32")
    kept = recall(
        timing_name(f"linear/{shape[0]}x{shape[1]}/{names[0]}"),
        lambda: json.dumps({name: linear_seconds(*shape, DTYPES[name]) for name in names}),
    )
    return {DTYPES[name]: seconds for name, seconds in json.loads(kept).items()}


def faster_dtype(
    own: torch.dtype,
    shape: tuple[int, int],
    times: Mapping[torch.dtype, float],
    needed: int,
    free: int,
) -> tuple[torch.dtype, str]:
    """The checkpoint's dtype `own`, or float32, and why. shape, times: of the layer that was timed,
    and its seconds; needed, free: bytes of the weights in float32, and of free memory."""
    name, quicker = dtype_name(own), times[own] > MARGIN * times[torch.float32]
    timed = (
        f"{ROWS} rows through a layer of {shape[1]:,} x {shape[0]:,} take "
        f"{1e3 * times[torch.float32]:.2f} ms in float32, {1e3 * times[own]:.2f} ms in {name}"
    )
    if not quicker:
        return own, f"{name}, as the checkpoint: {timed}"
    if needed > MEMORY_SHARE * free:
        return own, (
            f"{name}, though {timed}: weights in float32 would take {needed:,} bytes of the "
            f"{free:,} that are free"
        )
    return torch.float32, f"float32: {timed}"


def choose_states(
    wanted: torch.dtype | None, checkpoint: torch.dtype, compute: torch.dtype, device: torch.device
) -> torch.dtype:
    """Choose the dtype of kept states: `wanted`, or the narrower of checkpoint and compute.

    Raises `ConfigurationError` on a GPU if `wanted` differs from `compute`, in which its kernels
    read states.
    """
    if device.type != "cpu":
        if wanted not in (None, compute):
            raise ConfigurationError(
                f"a GPU reads states in the model's dtype, {dtype_name(compute)}; leave "
                "states_dtype at auto, or keep eight bits with device_kv_dtype=int8"
            )
        return compute
    if wanted is not None:
        return wanted
    return checkpoint if checkpoint.itemsize < compute.itemsize else compute


def vocabulary_weights(model: Any) -> set[int]:
    """The `id`s of a model's weights by word: of embeddings and of the head."""
    embeddings = (each for each in model.modules() if isinstance(each, torch.nn.Embedding))
    weights = {id(each.weight) for each in embeddings}
    head = model.get_output_embeddings()
    return weights if head is None else weights | {id(head.weight)}


def largest_linear(model: Any) -> tuple[int, int]:
    """The size [out, in] of the matrices, embeddings aside, that most of the weights are in."""
    vocabulary, head = vocabulary_weights(model), model.get_output_embeddings()
    sizes: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        packed = getattr(module, "packed", None)
        if packed is not None and module is not head:
            sizes[packed.outputs, packed.inputs] += packed.outputs * packed.inputs
    for weight in model.parameters():
        if weight.dim() >= 2 and id(weight) not in vocabulary:
            sizes[int(weight.shape[-2]), int(weight.shape[-1])] += weight.numel()
    if not sizes:  # nothing but embeddings: any size tells
        return model.config.hidden_size, model.config.hidden_size
    return sizes.most_common(1)[0][0]
