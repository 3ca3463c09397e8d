"""Quotations: whatever tokens are chosen, the answer is a run of words of one of the texts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragcache.answers.quotation_index import (
    Occurrence,
    QuotableText,
    Quotation,
    QuotationIndex,
    QuotationText,
    quote,
    token_spellings,
)
from ragcache.errors import ConstraintFailed
from ragcache.models import LoadedModel, wrap_causal
from tests.conftest import scaled
from tests.ragcache.pipeline.conftest import CORPUS, spaced_tokenizer
from tests.ragcache.structured.byte_level_model import tiny
from tests.tiny_models import tiny_model

TEXTS = (
    "# Boats\n\nThe survey boat Pipit is moored at the north quay (berth 3.5), Erik's berth.\n\n",
    "他在1923年出生于上海。The ☕ costs 3 € — naïve café, ﬁne!  Two  spaces.\n",
    "The spare key: red cupboard. The spare key of Erik Dalstad hangs there\n\n\n",
)
KINDS = ("reader", "bytes", "spaced", "fallback")


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece with a normalizer and byte tokens for what it has no letters for."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(0x21, 0x7F)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = spec["added_tokens"][:2]  # bytes are no control tokens
    backend = Tokenizer.from_str(json.dumps(spec))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@cache
def made(kind: str) -> LoadedModel:
    if kind == "bytes":
        return tiny()
    tokenizer: Any = spaced_tokenizer() if kind == "spaced" else fallback_tokenizer()
    causal = wrap_causal(tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.2))
    return LoadedModel(kind, causal, tokenizer)


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest, tiny_reader: LoadedModel) -> LoadedModel:
    return tiny_reader if request.param == "reader" else made(request.param)


def index_of(model: LoadedModel, *texts: str, cuts: tuple[int, ...] = ()) -> QuotationIndex:
    spellings = token_spellings(model)
    graphs = [QuotableText.of(each, spellings, cuts) for each in texts]
    return QuotationIndex(graphs, spellings)


def allowed(quotation: Quotation, model: LoadedModel) -> list[int]:
    """The tokens of a mask, without those that end an answer."""
    bits = np.unpackbits(quotation.mask().numpy().view(np.uint8), bitorder="little")
    return [token for token in np.flatnonzero(bits).tolist() if token not in model.stop_ids]


def boundaries(text: str) -> set[int]:
    return {each.start() for each in regex.finditer(r"(?w)\b", text)} | {0, len(text)}


@pytest.mark.parametrize("loaded", KINDS, indirect=True)
@settings(max_examples=scaled(100, quick=0.1))
@given(data=st.data())
def test_any_choice_of_tokens_is_a_run_of_words(loaded: LoadedModel, data: st.DataObject) -> None:
    letters = st.text(alphabet=" ab3.,-(é\n中文ﬁ☕\u0301", max_size=30)
    texts = data.draw(st.lists(st.sampled_from(TEXTS) | letters, min_size=1, max_size=4))
    index, stop = index_of(loaded, *texts), data.draw(st.sampled_from([(), ("e",), ("y b", "3")]))
    quotation, text, tokens, pieces = Quotation(index), QuotationText(index, stop), [], []
    for _ in range(data.draw(st.integers(1, 12))):
        choices = allowed(quotation, loaded)
        if not choices or text.stopped is not None:
            break
        tokens.append(data.draw(st.sampled_from(choices)))
        quotation.accept(tokens[-1])
        pieces.append(text.push(tokens[-1]))
    said = "".join(pieces) + text.finish()
    assert said == said.strip()
    assert not any(each in said for each in stop)
    found = quote(index, tokens, said)
    assert bool(found) == bool(said)
    for place in found:
        source = texts[place.text]
        assert source[place.begin : place.end] == said
        assert place.begin in boundaries(source)
    assert not found or any(place.end in boundaries(texts[place.text]) for place in found)


@pytest.mark.parametrize("loaded", ["fallback"], indirect=True)
def test_characters_of_byte_tokens_are_quoted(loaded: LoadedModel) -> None:
    index, text = index_of(loaded, TEXTS[1]), QuotationText(index_of(loaded, TEXTS[1]))
    tokens = loaded.encode_untrusted("生于上海")
    assert len(tokens) == 12
    assert "".join(map(text.push, tokens)) + text.finish() == "生于上海"
    text = QuotationText(index)
    assert "".join(map(text.push, tokens[:-1])) + text.finish() == "生于上", "no part of one"


def test_a_long_text_is_quoted_and_a_short_one_has_a_small_graph(
    tiny_reader: LoadedModel,
) -> None:
    """Places beyond 65,536 need more than 16 bits."""
    graph = QuotableText.of(TEXTS[2], token_spellings(tiny_reader))
    assert graph.nbytes < 25 * len(graph.raw)
    long = f"{TEXTS[0] * 1000}The lighthouse is closed. {TEXTS[1]}"
    index = index_of(tiny_reader, TEXTS[2], long, TEXTS[2])
    said = "The lighthouse is closed"
    [found] = quote(index, tiny_reader.encode_untrusted(said), said)
    assert (found.text, long[found.begin : found.end]) == (1, said)


def test_places_of_two_texts_need_more_bits_than_each(tiny_reader: LoadedModel) -> None:
    said = "The lighthouse is closed"
    index = index_of(tiny_reader, TEXTS[0] * 500, f"{TEXTS[1] * 500}{said}.")
    assert len(TEXTS[0]) * 500 < 2**16 < len(index._raw)
    assert {index.first.dtype, index.ends.dtype} == {np.dtype(np.int32)}
    [found] = quote(index, tiny_reader.encode_untrusted(said), said)
    assert (found.text, found.begin) == (1, len(TEXTS[1]) * 500)


@pytest.mark.parametrize("loaded", ["reader", "bytes", "spaced"], indirect=True)
def test_every_run_of_words_can_be_said_as_the_model_spells_it(loaded: LoadedModel) -> None:
    """Also where its first word lacks the space that stands before it in the text, or has one."""
    source = CORPUS[0]
    index, words = index_of(loaded, source), source.split(" ")
    for begin in range(len(words)):
        run = " ".join(words[begin : begin + 5]).rstrip(",.")
        for spelled in (loaded.encode_untrusted(run), loaded.encode_untrusted(f" {run}")):
            quotation, text = Quotation(index), QuotationText(index)
            said = "".join(map(text.push, spelled)) + text.finish()
            for token in spelled:
                quotation.accept(token)
            assert said == run
            stop = next(iter(loaded.stop_ids))
            assert quotation.mask()[stop // 32] >> stop % 32 & 1, "it may end here"


def test_an_answer_may_end_between_words_only(tiny_reader: LoadedModel) -> None:
    index = index_of(tiny_reader, "Dalstadfjord is far")
    tokens = tiny_reader.encode_untrusted("Dalstadfjord")
    assert len(tokens) > 2
    [stop] = tiny_reader.stop_ids
    quotation, text = Quotation(index), QuotationText(index)
    for token in tokens[:-1]:
        quotation.accept(token)
        assert not quotation.mask()[stop // 32] >> stop % 32 & 1
        assert text.push(token) == ""
    assert text.finish() == "", "nothing is left of a word that a limit cut"
    assert quote(index, tokens[:-1], "") == []


def test_each_chinese_character_is_a_word(tiny_reader: LoadedModel) -> None:
    index, text = index_of(tiny_reader, "他在1923年出生于上海。"), None
    for said in ("1923年", "年出", "上海"):
        text = QuotationText(index)
        assert "".join(map(text.push, tiny_reader.encode_untrusted(said))) + text.finish() == said


def test_all_occurrences_are_found_in_the_order_of_the_texts(tiny_reader: LoadedModel) -> None:
    texts = ("the red key", "no", "a red key, the red keys")
    index, tokens = index_of(tiny_reader, *texts), tiny_reader.encode_untrusted(" red key")
    assert quote(index, tokens, "red key") == [Occurrence(0, 4, 11), Occurrence(2, 2, 9)]
    assert quote(index, tokens, "red") == [Occurrence(0, 4, 7), Occurrence(2, 2, 5)]


def test_no_quotation_crosses_a_cut(tiny_reader: LoadedModel) -> None:
    text = "# Leave\n\nThere are 28 days."
    whole, cut = index_of(tiny_reader, text), index_of(tiny_reader, text, cuts=(9,))
    tokens = tiny_reader.encode_untrusted(text)
    assert len(quote(whole, tokens, text.rstrip())) == 1
    quotation, said = Quotation(cut), 0
    while not quotation.finished:
        quotation.accept(tokens[said])
        said += 1
    assert quotation.text() == "# Leave"
    assert quote(cut, tokens[said:], "There") == [Occurrence(0, 9, 14)]


def test_what_no_tokens_spell_is_not_quoted() -> None:
    model = made("spaced")
    quotation = Quotation(index_of(model, "key ☕ key ☕key"))
    first = model.tokenizer.convert_ids_to_tokens(allowed(quotation, model))
    assert "☕" not in "".join(first)
    for token in model.encode_untrusted("key"):
        quotation.accept(token)
    assert [each.begin for each in quotation.occurrences("key")] == [0, 6, 11]


def test_nothing_to_quote_ends_at_once(tiny_reader: LoadedModel) -> None:
    for texts in ((), ("",), ("\n \n",)):
        quotation = Quotation(index_of(tiny_reader, *texts))
        assert quotation.finished
        assert allowed(quotation, tiny_reader) == []
        assert quotation.mask().any(), "a stop token may come"


def test_a_token_that_no_text_has_fails_its_own_request(tiny_reader: LoadedModel) -> None:
    from ragcache.engine.constraint import GuardedConstraint

    index = index_of(tiny_reader, "The spare key")
    guarded = GuardedConstraint(lambda: Quotation(index))
    guarded.accept(3)
    assert isinstance(guarded.failure, ConstraintFailed)
