"""Fixtures of the pipeline's tests, and a tokenizer of the sentencepiece kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragcache import RagCache, SourceDocument
from ragcache.engine import Context
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.models import INSTRUCTION, CausalLM, LoadedModel


@pytest.fixture(scope="session")
def model(tiny_reader: LoadedModel) -> LoadedModel:
    """A tiny random model behind the embedded reader's tokenizer."""
    return tiny_reader


DOCUMENTS = [
    SourceDocument("boats", "The survey boat Pipit is moored at the north quay."),
    SourceDocument("keys", "The spare key hangs in the red cupboard of the boathouse."),
    SourceDocument("leave", "Requests for leave go to Ines Marlow, who keeps the key figures."),
]


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    """A folder that holds `DOCUMENTS` in the collection `notes`."""
    with RagCache.open(tmp_path / "state", model, max_tokens=8) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def last_logits(causal: CausalLM, contexts: list[Context]) -> Tensor:
    """Logits of each context's last token, all in one ragged pass: [R, vocabulary]."""
    chunks = [
        ScheduledChunk(
            c.segments, ContiguousKV.allocate(causal, len(c.token_ids)), c.token_ids, c.position_ids
        )
        for c in contexts
    ]
    return causal.forward(BatchBuilder(causal).build_batch(chunks))


CORPUS = [
    "The survey boat Pipit is moored at the north quay, where the spare key hangs.",
    "Everybody has 26 days of leave a year.\n\nRequests go to Ines Marlow two weeks ahead.",
    "Question: which boat is at the quay? Read the documents and answer the question.",
]


def spaced_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-pair encoding over words with `▁` for a space; one before the first word."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(set("".join((*CORPUS, INSTRUCTION, "<>[]/|xyzAB"))))
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ '<s>[' + m['role'] + '] ' + m['content'] + '</s>' }}{% endfor %}"
    )
    return made
