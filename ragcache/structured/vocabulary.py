"""A model's vocabulary as bytes, for the grammar compiler."""

from __future__ import annotations

from typing import Any

from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel

TOOL_MARKERS = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"))
"""Control tokens that a grammar may spell. No other control token stands in an answer of a given
form: its text is left out of what the caller sees."""


def token_bytes(model: LoadedModel) -> list[bytes]:
    """The bytes of every row of the model's logits, b"" for what no grammar may use: control
    tokens, and rows beyond the tokenizer. Raises `InvalidRequest` for an unknown tokenizer."""
    from xgrammar import TokenizerInfo

    tokenizer, width = model.tokenizer, logits_width(model)
    try:
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=[0])
    except Exception as error:
        raise InvalidRequest(
            f"this model's tokenizer, {type(tokenizer).__name__}, cannot be constrained: {error}"
        ) from error
    decoded = [bytes(token) for token in info.decoded_vocab]
    decoded += [b""] * (width - len(decoded))
    for token_id, added in _added(tokenizer).items():
        if token_id < width:
            hidden = added.special and added.content not in TOOL_MARKERS
            decoded[token_id] = b"" if hidden else added.content.encode()
    return decoded


def _added(tokenizer: Any) -> dict[int, Any]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return added


def logits_width(model: LoadedModel) -> int:
    """V of the model's logits, which may be more than its tokenizer has tokens."""
    hugging_face = model.causal.model
    head = hugging_face.get_output_embeddings()
    if head is not None:
        return int(head.weight.shape[0])
    return int(hugging_face.config.get_text_config().vocab_size)
