"""The causal language model of a checkpoint: the text model of one that also sees or hears."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import cached_file

from ragcache.errors import ConfigurationError
from ragcache.models.dtype import PACKED, QUANTIZATIONS
from ragcache.models.families import family_of
from ragcache.models.positions import LONG_FACTORS, rotary_scaling
from ragcache.models.reader import dequantize_rows


class TextForCausalLM(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed
    """A text stack and its head, for composite models whose text model has no class of its own."""

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        config._experts_implementation = None  # the stack chooses; this class has no experts
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last tokens, or of these rows, or of all."""
        out = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits)


def load_checkpoint(
    source: str,
    dtype: torch.dtype | None,
    *,
    long_context: bool = False,
    quantization: str | None = None,
) -> Any:
    """Load the Hugging Face language model of a folder or hub name.

    Of a composite checkpoint, only the text model is kept.

    Args:
        source: Folder or hub name.
        dtype: Dtype of the weights. Defaults to the file's.
        long_context: See `use_long_factors`.
        quantization: Quantization of the weights, which is checked before they are read: `int8`,
            `int4` or `auto` packs them (`ragcache.models.quantized`), `fp8` is left to the caller.

    Raises:
        UnsupportedModel: No family serves the text model.
        ConfigurationError: An option does not fit the checkpoint.
    """
    config = AutoConfig.from_pretrained(source)
    text = config.get_text_config(decoder=True)
    if long_context:
        use_long_factors(text)
    if quantization in QUANTIZATIONS:
        _check_quantization(config, text, str(quantization))
    read = partial(_read, source, config, dtype or "auto")
    if quantization not in PACKED:
        return read()
    from ragcache.models.quantized import load_quantized, quantize_model

    if text is config:
        place = Path(source)
        folder = place if place.is_dir() else Path(cached_file(source, "config.json")).parent
        fill = partial(_model_of, folder, config)
        return load_quantized(folder, str(quantization), read, fill)
    model = read()
    quantize_model(model, str(quantization))
    return model


def _read(source: str, config: Any, dtype: torch.dtype | str) -> Any:
    """The model with the weights of its files."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "int8_rows", False):
        return _dequantized(source, config, dtype)
    if text is config or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
    family_of(text).check(text)  # before gigabytes are read
    whole = AutoModelForImageTextToText.from_pretrained(source, config=config, dtype=dtype)
    return text_model(whole)


def _model_of(folder: Path, config: Any, weights: Mapping[str, Tensor]) -> Any:
    """A model of these weights. Others are numbers of no size until they are replaced."""
    kind = text_class(config)
    dtype = next(each.dtype for each in weights.values() if each.is_floating_point())
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in kind._from_config(config).named_parameters()}
    nothing = torch.zeros((), dtype=dtype)
    state = {name: nothing.expand(shape) for name, shape in shapes.items()}
    model = kind.from_pretrained(None, config=config, state_dict={**state, **weights}, dtype=dtype)
    with suppress(OSError):  # there is no file: the configuration's own
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _check_quantization(config: Any, text: Any, quantization: str) -> None:
    """Raises `ConfigurationError` where weights were stored quantized, and `UnsupportedModel`."""
    from ragcache.models.packed import required_kernels
    from ragcache.models.quantized_trial import check_family

    if getattr(config, "quantization_config", None):
        raise ConfigurationError(
            f"the weights of this model were stored quantized; leave quantization={quantization!r} "
            "out, or give the checkpoint that it was made from"
        )
    if quantization in PACKED:
        required_kernels()
    check_family(text_class(text), text, quantization)


def _dequantized(source: str, config: Any, dtype: torch.dtype | str) -> Any:
    """A model whose file keeps matrices in int8, a scale for each row, as the reader's may."""
    del config.int8_rows  # of the file, not of the model
    weights = dequantize_rows(load_file(cached_file(source, "model.safetensors")), config.dtype)
    return text_class(config).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)


def text_model(whole: Any) -> Any:
    """The text model of a composite one, over the same weights."""
    stack, head = whole.get_decoder(), whole.get_output_embeddings()
    kind = text_class(stack.config)
    with torch.device("meta"):
        model = kind(stack.config)
    setattr(model, model.base_model_prefix, stack)
    model.set_output_embeddings(head)
    model.generation_config = whole.generation_config
    return model.eval()


def text_class(config: Any) -> type[Any]:
    """The class that continues texts with models of a text model's configuration."""
    found: type[Any] = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), TextForCausalLM)
    return found


def use_long_factors(config: Any) -> None:
    """Make a LongRoPE model use its long-context factors for every text, in place.

    transformers changes factors at the original length, so that states before and after it
    disagree. With one set of factors the window is the whole context. Raises `ConfigurationError`
    for another model.
    """
    if rotary_scaling(config) != "longrope":
        raise ConfigurationError(
            f"long_context is for models with LongRoPE, and this {config.model_type} model has the "
            f"rotary scaling {rotary_scaling(config)!r}; leave it out"
        )
    parameters = config.rope_parameters
    for short, long in LONG_FACTORS.items():
        if long in parameters:
            parameters[short] = parameters[long]
