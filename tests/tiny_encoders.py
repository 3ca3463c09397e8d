"""Tiny random encoders as folders: a sentence embedder and a cross-encoder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_CONFIG = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=64, num_labels=1,
)  # fmt: skip


def write_embedder(folder: Path) -> Path:
    """A sentence-transformers model with 16 numbers a text."""
    torch.manual_seed(7)
    BertModel(_CONFIG).save_pretrained(folder)
    return _with_tokenizer(folder)


def write_cross_encoder(folder: Path) -> Path:
    """A cross-encoder with one logit a pair."""
    torch.manual_seed(7)
    BertForSequenceClassification(_CONFIG).save_pretrained(folder)
    return _with_tokenizer(folder)


def _with_tokenizer(folder: Path) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    return folder
