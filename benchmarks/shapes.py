"""Random models of the shapes of the figures, where only torch and transformers need to be."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ragcache.bench.harness import LlamaShape, shaped_causal, silence_others
from ragcache.states import KVKey

if TYPE_CHECKING:
    from ragcache.models import LoadedModel

SHAPES: Mapping[str, LlamaShape] = {
    "7b": LlamaShape(32, 4096, 32, 32, 11008, 32000, 32768, 10_000.0, tied=False),
    "8b": LlamaShape(32, 4096, 32, 8, 14336, 128256, 32768, 500_000.0, tied=False),
}
"""The shapes of the figures on a GPU: Llama 7B with as many key heads as query heads, and 8B."""


def draw_model(shape: LlamaShape, device: str) -> Any:
    """A Hugging Face model whose random weights are drawn on a device, in bfloat16 at once."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(shape.config(torch.bfloat16)).eval()
    finally:
        torch.set_default_dtype(before)


def shaped_model(
    shape: LlamaShape,
    device: str | None = None,
    dtype: str = "auto",
    answers: Sequence[int] | None = None,
) -> LoadedModel:
    """A model of the shape with random bfloat16 weights and the embedded reader's tokenizer.

    Args:
        shape: Its sizes.
        device: Where its weights are drawn. They get no digest, which would take minutes, and the
            model answers with tokens that are text. Defaults to a model on the CPU, as
            `shaped_causal` makes it.
        dtype: What a model on the CPU computes in, as in `load_model`.
        answers: Tokens that answers consist of. Defaults to tokens that are text on a device, and
            to all tokens on the CPU.
    """
    from ragcache.models import LoadedModel, load_model, wrap_causal

    tokenizer = load_model().tokenizer
    if device is None:
        return LoadedModel("shape", shaped_causal(shape, dtype, answers), tokenizer)
    model = draw_model(shape, device)
    if answers is None:
        tokens = range(min(shape.vocabulary, len(tokenizer)))
        texts = ((each, tokenizer.decode([each], skip_special_tokens=True)) for each in tokens)
        answers = [each for each, text in texts if text and text.isascii() and text.isprintable()]
    silence_others(model, answers)
    causal = wrap_causal(model)
    causal.fingerprint = f"random weights of {shape}"
    return LoadedModel("shape", causal, tokenizer)


def made_up_key(name: object) -> KVKey:
    """A key with the length of real digests."""
    return KVKey(hashlib.sha256(str(name).encode()).hexdigest())
