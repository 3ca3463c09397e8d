"""Random models of the shapes of the figures, where only torch and transformers need to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragcache.bench.harness import LlamaShape, draw_model, shaped_causal, silence_others

if TYPE_CHECKING:
    from ragcache.models import LoadedModel


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
    from ragcache.models import LoadedModel, wrap_causal
    from ragcache.models.plain_tokenizer import PlainTokenizer
    from ragcache.models.reader import READER

    tokenizer = PlainTokenizer(READER)
    if device is None:
        return without_refusals(
            LoadedModel("shape", shaped_causal(shape, dtype, answers), tokenizer)
        )
    model = draw_model(shape, device)
    if answers is None:
        tokens = range(min(shape.vocabulary, len(tokenizer)))
        texts = ((each, tokenizer.decode([each], skip_special_tokens=True)) for each in tokens)
        answers = [each for each, text in texts if text and text.isascii() and text.isprintable()]
    silence_others(model, answers)
    causal = wrap_causal(model)
    causal.fingerprint = f"random weights of {shape}"
    return without_refusals(LoadedModel("shape", causal, tokenizer))


def without_refusals(model: LoadedModel) -> LoadedModel:
    """Return the model as one without a token that says that there is no answer.

    That token is the reader's. Steps would suppress it, which those of no other model do.
    """
    vars(model)["no_answer_id"] = None
    return model
