"""Compilers: one for each model, errors that name what is wrong, and vocabularies as bytes."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ragcache.errors import InvalidRequest, MissingExtra
from ragcache.models import LoadedModel
from ragcache.structured import Grammar, constraint_of
from ragcache.structured.compiling import Compiler, compiler_of
from ragcache.structured.vocabulary import logits_width, token_bytes
from tests.conftest import VOCABULARY
from tests.ragcache.structured.tiny import SPECIAL, TEXTS, tiny, tokenizer


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("[a"), "^the regex cannot be compiled: .*Unclosed '\\['"),
        (Grammar.regex("(?=a)b"), "Lookahead"),
        (Grammar.regex("(" * 9999), "regex"),
        (
            Grammar.json_schema({"type": "string", "pattern": "(.{1000}){1000}"}),
            "compiled: it is too large$",
        ),
        (Grammar.ebnf("root ::= x"), '^the ebnf cannot be compiled: .*"x" is not defined'),
        (Grammar.ebnf('top ::= "a"'), "root"),
        (Grammar.json_schema({"type": "thing"}), 'Unsupported type "thing"'),
        (Grammar.json_schema({"$ref": "#/$defs/a"}), "Cannot find field"),
        (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "range"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        constraint_of(grammar, tiny())
    assert ".cc:" not in str(caught.value)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ragcache\[structured\]'"):
        Compiler(tiny())


def test_a_model_has_one_compiler_as_long_as_it_lives() -> None:
    model = LoadedModel("other", tiny().causal, tokenizer())
    made = weakref.ref(compiler_of(model))
    assert compiler_of(model) is made()
    assert compiler_of(tiny()) is not made()
    del model
    gc.collect()
    assert made() is None


def test_threads_compile_beside_each_other() -> None:
    grammars = [Grammar.regex(f"[a-c]{{{n}}}") for n in range(1, 9)] * 4
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda grammar: constraint_of(grammar, tiny()), grammars))
    for grammar, make in zip(grammars, made, strict=True):
        constraint, a = make(), tokenizer().convert_tokens_to_ids("a")
        for _ in range(int(grammar.text[6:-1])):
            assert not constraint.finished
            constraint.accept(a)
        assert constraint.finished


def test_byte_level_tokens_are_the_bytes_of_their_text() -> None:
    table = token_bytes(tiny())
    assert len(table) == logits_width(tiny()) == VOCABULARY
    for text in TEXTS:
        ids = tokenizer().encode(text, add_special_tokens=False)
        assert b"".join(table[token] for token in ids) == text.encode()


def test_control_tokens_are_in_no_grammar_unless_they_mark_tool_calls() -> None:
    table = token_bytes(tiny())
    ids = [tokenizer().convert_tokens_to_ids(each) for each in SPECIAL]
    assert [table[token] for token in ids] == [b"", b"", b"[TOOL_CALLS]"]
    added = tokenizer().convert_tokens_to_ids("über alles")
    assert table[added] == "über alles".encode()
    assert set(table[len(tokenizer()) :]) == {b""}


def test_the_embedded_reader(reader: LoadedModel) -> None:
    table = token_bytes(reader)
    text = "Naïve – 12 € ☕\n{}"
    assert b"".join(table[token] for token in reader.encode(text)) == text.encode()
    assert [table[token] for token in reader.stop_ids] == [b""]
    assert constraint_of(Grammar.json_object(), reader)().mask() is not None


def test_tokens_of_a_byte_fallback_tokenizer() -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    slow = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    table = token_bytes(LoadedModel("fallback", tiny().causal, slow))
    assert table[vocabulary["<0x0A>"]] == b"\n"
    assert [table[vocabulary[each]] for each in ("▁a", "é")] == [b" a", "é".encode()]
    assert [table[vocabulary[each]] for each in ("</s>", "<unk>")] == [b"", b""]
