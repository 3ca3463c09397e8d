"""Extractive answers: whatever the model and its sampling, they stand in the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from ragcache import Answer, GenerationParams, RagCache, SourceDocument
from ragcache.answers.policy import AnswerSpan
from ragcache.answers.quotations import Quotations
from ragcache.db import ModuleRow
from ragcache.documents.source import DocumentPart
from ragcache.errors import InvalidRequest, LedgerUnavailable
from ragcache.models import LoadedModel, wrap_causal
from tests.conftest import scaled
from tests.ragcache.pipeline.conftest import spaced_tokenizer
from tests.tiny_models import tiny_model

LONG = "\n\n".join(f"Paragraph {n} of the yard says where key {n} hangs." for n in range(12))
DOCUMENTS = [
    SourceDocument("yard", f"# Yard\n\n## Keys\n\n{LONG}\n\n## Leave\n\nAll have 28 days."),
    SourceDocument("table", "# Tides\n\n| day | tide |\n|---|---|\n" + "| May | 3.5 m |\n" * 40),
    SourceDocument("leave", "Everybody has 28 days of leave: 每年有28天假。 The key ☕ hangs."),
    SourceDocument(
        "scan", "The key of page one.\n\nThe key of page two hangs.", parts=(
            DocumentPart("The key of page one.", {"page": 1}),
            DocumentPart("The key of page two hangs.", {"page": 2}),
        ),
    ),
]  # fmt: skip
TEXTS = {document.id: document.text for document in DOCUMENTS}
QUESTIONS = ["Where does the key hang?", "How many days of leave?", "Which tide in May?"]


@pytest.fixture(scope="module")
def rags(
    tiny_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RagCache]]:
    """The documents, opened with random models of two families and kinds of tokens."""
    spaced = spaced_tokenizer()
    tiny = tiny_model("gpt2", vocab_size=len(spaced), initializer_range=0.3)
    models = [tiny_reader, LoadedModel("spaced", wrap_causal(tiny), spaced, instruction="Quote.")]
    with ExitStack() as stack:
        opened = []
        for number, model in enumerate(models):
            folder = tmp_path_factory.mktemp("quotations") / str(number)
            rag = RagCache.open(folder, model, max_tokens=8, module_tokens=64, private_bytes="8MiB")
            opened.append(stack.enter_context(rag))
            rag.ingest("all", DOCUMENTS)
        yield opened


@pytest.fixture(scope="module")
def rag(rags: list[RagCache]) -> RagCache:
    return rags[0]


def check(rag: RagCache, answer: Answer) -> None:
    """Every choice stands in a module that was read, and every span says where."""
    names = [source.module for source in answer.sources]
    modules = {m.name: m.text for m in rag.modules.named("all", names)}
    for number, choice in enumerate(answer.choices):
        said = choice.text
        assert said == said.strip()
        assert any(said in text for text in modules.values())
        spans = [span for span in answer.spans if span.choice == number]
        assert bool(spans) == bool(said)
        assert [names.index(span.module) for span in spans] == sorted(
            names.index(span.module) for span in spans
        ), "the best source first"
        for span in spans:
            assert TEXTS[span.document][span.start : span.end] == said
            assert f"{span.prefix}{said}{span.suffix}" in modules[span.module]
    assert answer.text == answer.choices[0].text


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.just(0.3),
        "seed": st.integers(0, 99),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 12),
        "min_tokens": st.just(1),
        "stop": st.sampled_from(["e", " h", ["3", "key"]]),
        "ignore_eos": st.just(True),
        "repetition_penalty": st.just(1.5),
        "frequency_penalty": st.just(1.0),
        "logprobs": st.just(2),
    },
)


@settings(max_examples=scaled(60, quick=0.1))
@given(
    options=st.lists(OPTIONS, min_size=1, max_size=2),
    questions=st.lists(st.sampled_from(QUESTIONS), min_size=1, max_size=4),
    k=st.integers(1, 4), mode=st.sampled_from(["rooted", "exact", "primed:4"]),
    which=st.integers(0, 1),
)  # fmt: skip
def test_every_answer_is_a_run_of_words_of_a_retrieved_module(
    rags: list[RagCache], options: list[dict[str, Any]], questions: list[str], k: int, mode: str,
    which: int,
) -> None:  # fmt: skip
    rag = rags[which]
    streams = [
        rag.stream(
            question, collection="all", k=k, mode=mode,
            generation=GenerationParams(extractive=True, **options[number % len(options)]),
        )
        for number, question in enumerate(questions)
    ]  # fmt: skip
    for stream in streams:
        pieces = list(stream)
        assert "".join(pieces) == stream.answer.text
        check(rag, stream.answer)


def test_spans_name_page_and_headings(rag: RagCache) -> None:
    generation = GenerationParams(extractive=True, temperature=2.0, max_tokens=4, n=8, seed=1)
    answer = rag.ask("Which key is on page two?", collection="all", k=1, generation=generation)
    assert {span.page for span in answer.spans} == {2}
    assert len({span.choice for span in answer.spans}) > 1
    answer = rag.ask("Which tide in May?", collection="all", k=1, generation=generation)
    assert {span.headings for span in answer.spans} == {("Tides",)}
    assert answer.to_dict()["spans"][0]["document"] == "table"


def test_what_is_not_a_quotation_has_no_spans(rag: RagCache) -> None:
    for options in ({}, {"extractive": False}):
        assert (
            rag.ask(QUESTIONS[0], collection="all", generation=GenerationParams(**options)).spans
            == ()
        )
    nothing = rag.ask("qwxz", collection="all", generation=GenerationParams(extractive=True))
    assert (nothing.finish_reason, nothing.spans) == ("no_documents", ())


def test_a_model_that_quotes_by_default_can_be_told_not_to(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoting = replace(rag.internals.submitter, model=replace(
        rag.internals.submitter.model, extractive=True
    ))  # fmt: skip
    monkeypatch.setattr(rag, "_internals", replace(rag.internals, submitter=quoting))
    quoted = rag.ask(QUESTIONS[0], collection="all", generation=GenerationParams(min_confidence=0))
    check(rag, quoted)
    assert quoted.spans
    for options in ({"extractive": False}, {"regex": "[ab]{3}"}):
        answer = rag.ask(QUESTIONS[0], collection="all", generation=GenerationParams(**options))
        assert answer.spans == ()
    assert rag.chat([{"role": "user", "content": "Hello."}]).spans == ()


def test_the_embedded_reader_quotes_by_default(reader: LoadedModel, rag: RagCache) -> None:
    assert reader.extractive
    assert not rag.internals.shared.model.extractive


def test_a_chat_quotes_the_modules_that_stand_in_it(rag: RagCache) -> None:
    text = f"{TEXTS['leave']} Where does the key hang?"
    generation = GenerationParams(extractive=True, temperature=2.0, seed=3)
    answer = rag.chat([{"role": "user", "content": text}], generation=generation)
    check(rag, answer)
    assert {span.document for span in answer.spans} == {"leave"}


def test_extractive_answers_keep_to_no_grammar_and_call_no_tools(rag: RagCache) -> None:
    wanted = GenerationParams(extractive=True)
    form = GenerationParams(extractive=True, json_object=True)
    with pytest.raises(InvalidRequest, match="keeps to no grammar"):
        rag.ask(QUESTIONS[0], collection="all", generation=form)
    with pytest.raises(InvalidRequest, match="calls no tools"):
        rag.chat("Hello.", generation=wanted, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequest, match="no ingested text was recognized"):
        rag.chat([{"role": "user", "content": "Hello."}], generation=wanted)
    rag.schemas.add('<schema name="trip"><module name="sea">The tide is out.</module></schema>')
    with pytest.raises(InvalidRequest, match="PML prompt"):
        rag.prompt('<prompt schema="trip"><sea/>When?</prompt>', generation=wanted)


def schema_of(**properties: object) -> GenerationParams:
    """Options of an answer in JSON with these properties."""
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return GenerationParams(json_schema={**schema, "additionalProperties": False}, max_tokens=40)


@pytest.fixture
def reading(quick_reader: LoadedModel, tmp_path: Path) -> Iterator[RagCache]:
    """A document, opened with the embedded reader."""
    with RagCache.open(tmp_path / "state", quick_reader) as opened:
        opened.ingest("all", [DOCUMENTS[2]])
        yield opened


def test_the_reader_refuses_json_that_it_cannot_fill(reading: RagCache) -> None:
    nothing = {"type": "string", "maxLength": 0}
    with pytest.raises(InvalidRequest, match=r"no words for 'place' of .* --model"):
        reading.ask(QUESTIONS[0], collection="all", generation=schema_of(place=nothing))
    stream = reading.stream(QUESTIONS[0], collection="all", generation=schema_of(place=nothing))
    with pytest.raises(InvalidRequest, match="'place'"):
        list(stream)
    listed = schema_of(places={"type": "array", "items": nothing, "minItems": 1, "maxItems": 1})
    with pytest.raises(InvalidRequest, match="no words for 0 of"):
        reading.ask(QUESTIONS[0], collection="all", generation=listed)
    words = schema_of(place={"enum": ["red cupboard"]}, sure={"type": "boolean"})
    answer = reading.ask(QUESTIONS[0], collection="all", generation=words)
    assert json.loads(answer.text)["place"] == "red cupboard"


def test_the_reader_writes_its_quotation_into_a_schema(reading: RagCache) -> None:
    place = schema_of(place={"type": "string", "title": "Place"})
    answer = reading.ask(QUESTIONS[1], collection="all", generation=place)
    quoted = json.loads(answer.text)["place"]
    plain = reading.ask(
        QUESTIONS[1], collection="all", generation=GenerationParams(min_confidence=0)
    )
    assert quoted == plain.text
    assert answer.spans == plain.spans
    assert TEXTS["leave"][answer.spans[0].start : answer.spans[0].end] == quoted
    stream = reading.stream(QUESTIONS[1], collection="all", generation=place)
    assert ["".join(stream)] == [answer.text] == [stream.answer.text]
    free = place.model_copy(update={"extractive": False})
    assert not reading.ask(QUESTIONS[1], collection="all", generation=free).spans


def test_the_reader_refuses_json_without_a_schema(reading: RagCache) -> None:
    formed = GenerationParams(json_object=True)
    with pytest.raises(InvalidRequest, match="give a json_schema with one string to fill, or a mo"):
        reading.ask(QUESTIONS[0], collection="all", generation=formed)
    with pytest.raises(InvalidRequest, match="cannot invent a JSON object"):
        reading.chat([{"role": "user", "content": "Hello"}], generation=formed)


def test_without_the_ledger_quotations_have_their_offsets(rag: RagCache) -> None:
    catalog, quotations = rag.internals.catalog, rag.internals.submitter.quotations
    assert quotations is not None
    modules = catalog.modules("all")
    quotations._known.clear()
    engine = rag.internals.shared.store.ledger.database.engine

    def fail(*_: object) -> None:
        raise OperationalError("SELECT", {}, Exception("no answer"))

    event.listen(engine, "before_cursor_execute", fail)
    try:
        with pytest.raises(LedgerUnavailable):
            catalog.collections()
        for module in quotations.of(modules).modules:
            assert module.places
            assert AnswerSpan.of(module, 0, 1).start is not None
    finally:
        event.remove(engine, "before_cursor_execute", fail)
    catalog.collections()


def test_graphs_of_texts_are_kept_up_to_a_number_of_bytes(
    tiny_reader: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ModuleRow(n, f"{n}", "", "", f"Key {n} hangs in the yard.") for n in range(4)]
    quotations = Quotations(tiny_reader)
    first = quotations.of(rows[:1]).graphs[0]
    assert quotations.of(rows[:1]).graphs[0] is first
    monkeypatch.setattr("ragcache.answers.quotations._KEPT_BYTES", 3 * first.nbytes)
    later = quotations.of(rows[1:]).graphs
    assert quotations.of(rows[1:]).graphs == later, "graphs are equal only to themselves"
    assert quotations.of(rows[:1]).graphs[0] is not first
