"""A tiny random model with a small byte-level tokenizer, to run under grammars."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragcache.models import LoadedModel, wrap_causal
from ragcache.structured import Grammar
from ragcache.structured.grammar import grammar_compiler
from tests.tiny_models import VOCABULARY, tiny_model

TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "active": true, "boss": null}',
    "<tool_call>\n call the harbour office at noon, naïve café ☕ 12:30",
    '[{"name": "add", "arguments": {"a": 1}}] yes no maybe',
]
SPECIAL = ("<|end|>", "<|secret|>", "[TOOL_CALLS]")


@cache
def tokenizer() -> Any:
    """Byte-level BPE of fewer tokens than the tiny models have logits."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("über alles")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@cache
def tiny() -> LoadedModel:
    """Wider logits than the tokenizer has tokens; weights that make its answers vary."""
    assert len(tokenizer()) < VOCABULARY
    causal = wrap_causal(tiny_model("llama", initializer_range=0.2))
    return LoadedModel("tiny", causal, tokenizer())


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the text is a complete answer under the grammar."""
    matcher = grammar_compiler(tiny()).compile_grammar(grammar).deep_copy()
    return matcher.consume_tokens(tokenizer().encode(text)) and matcher.is_accepting()
