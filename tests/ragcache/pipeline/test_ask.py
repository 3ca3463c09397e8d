"""Questions: what is leased, what is computed, and what is refused before either.

Modes `rooted` and `primed:N` give the logits of one ordinary forward pass with an explicit mask
that is built by hand from what each token saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import date, datetime, tzinfo
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.utils import chat_template_utils

from ragcache import Citation, GenerationParams, RagCache, SourceDocument
from ragcache.db import CollectionVersion, Database, ModuleRow
from ragcache.engine import Context, EncodeJob, LLMEngine, Segment, encode
from ragcache.errors import ConfigurationError, EmptyQuestion, EngineFailed, PromptTooLong
from ragcache.models import LoadedModel, wrap_causal
from ragcache.models.loader import prompt_frame
from ragcache.modes import EXACT, PRIMED, ROOTED, ReuseMode
from ragcache.params import SearchParams
from ragcache.pipeline import ChatTemplate
from ragcache.pipeline.ask import AskPipeline, lay_out
from ragcache.pipeline.module_states import ModuleEncoder, Scaffolds
from ragcache.pipeline.prompt import (
    AskedQuestion,
    CachedSpan,
    ModuleGroup,
    ModuleStates,
    PromptLayout,
    TokenPrompt,
    build_context,
)
from ragcache.retrieval import Hit, Selection
from ragcache.states import KVKey, KVStates
from ragcache.store import KVStore
from tests.ragcache.pipeline.conftest import DOCUMENTS, last_logits, spaced_tokenizer
from tests.tiny_models import random_tokens, tiny_model

QUESTION = "Where is the spare key of the boat?"


def test_one_rooted_module_answers_as_exact_does(rag: RagCache) -> None:
    """With k=1 the prompt is preamble, module, question: nothing is lost by caching."""
    for question in (QUESTION, "Who keeps the figures?", "Which quay?"):
        rooted = rag.ask(question, collection="notes", k=1)
        exact = rag.ask(question, collection="notes", k=1, mode="exact")
        assert rooted.text == exact.text
        assert rooted.finish_reason == exact.finish_reason


def test_a_repetition_penalty_counts_tokens_of_cached_modules(rag: RagCache) -> None:
    penalty = GenerationParams(repetition_penalty=0.1)  # prompt tokens come first
    rooted = rag.ask(QUESTION, collection="notes", k=1, generation=penalty)
    exact = rag.ask(QUESTION, collection="notes", k=1, mode="exact", generation=penalty)
    plain = rag.ask(QUESTION, collection="notes", k=1)
    assert rooted.reuse.cached_tokens > 0
    assert rooted.choices[0].token_ids == exact.choices[0].token_ids
    assert rooted.choices[0].token_ids != plain.choices[0].token_ids


@pytest.mark.parametrize("mode", ["rooted", "primed:3"])
def test_the_tokens_of_a_prompt_are_known_whatever_is_read(rag: RagCache, mode: str) -> None:
    params, ask = SearchParams(k=3), rag.internals.ask
    [read] = ask.prepare_prompts([QUESTION], "notes", params, ReuseMode.parse(mode))
    [exact] = ask.prepare_prompts([QUESTION], "notes", params, EXACT)
    assert read.states is not None
    with read.states.lease() as lease:
        context = build_context(read, lease.keys, lease.states)
    assert sorted(context.seen_token_ids) == sorted(build_context(exact).seen_token_ids)


DATED = (
    "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
)
SCHEMA = """
<schema name="trip"><system>You plan trips.</system><user>Oslo has a fjord.
<module name="m">Miami has a beach.</module></user></schema>
"""


def calendar(day: int) -> type[datetime]:
    class Calendar(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Calendar:
            return cls(2026, 11, day, tzinfo=tz)

    return Calendar


def test_nothing_is_encoded_again_after_midnight(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(model, tokenizer=deepcopy(model.tokenizer))
    model.tokenizer.chat_template = DATED
    prompt = '<prompt schema="trip"><m/><user>Is it warm?</user></prompt>'
    asked = []
    for day in (22, 23):
        monkeypatch.setattr(chat_template_utils, "datetime", calendar(day))
        with RagCache.open(tmp_path / "state", model, max_tokens=2) as rag:
            if day == 22:
                rag.ingest("notes", DOCUMENTS)
                rag.schemas.add(SCHEMA)
            ask = replace(rag.internals.ask, today=partial(date, 2026, 11, day))
            [question] = ask.prepare_prompts([QUESTION], "notes", SearchParams(k=1), ROOTED)
            asked.append(model.decode([token for _, token in question.computed_tokens]))
            found = rag.ask(QUESTION, collection="notes", k=1)
            planned = rag.prompt(prompt)
            chat = rag.chat([{"role": "user", "content": DOCUMENTS[1].text}])
            assert found.reuse.created_tokens == planned.reuse.created_tokens == 0
            assert min(each.reuse.cached_tokens for each in (found, planned, chat)) > 0
            assert (rag.stats().encoded > 0) == (day == 22)
    for text, day in zip(asked, (22, 23), strict=True):
        assert text.startswith(f"Today's date is 2026-11-{day}.\nQuestion: ")


def test_rooted_modules_see_the_preamble_and_isolated_do_not(
    tmp_path: Path, model: LoadedModel
) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 2**26)
    frame = prompt_frame(model.tokenizer, model.instruction)
    tokens = model.encode("The spare key hangs in the red cupboard.")
    other = replace(frame, preamble=frame.preamble.replace("documents", "pages"))
    states = {}
    for name, spoken in (("a", frame), ("b", other)):
        encoder = ModuleEncoder(model, store, partial(encode, model.causal), spoken)
        for mode in ("rooted", "isolated"):
            with encoder.lease([tokens], mode) as lease:
                states[name, mode] = lease.states[1]
    assert len(model.encode(frame.preamble)) == len(model.encode(other.preamble))
    assert torch.equal(states["a", "isolated"].values, states["b", "isolated"].values)
    assert not torch.equal(states["a", "rooted"].values, states["b", "rooted"].values)
    database.close()


def test_the_first_answer_counts_what_it_encodes_as_computed(rag: RagCache) -> None:
    first = rag.ask(QUESTION, collection="notes", k=2, mode="isolated")
    again = rag.ask(QUESTION, collection="notes", k=2, mode="isolated")
    assert [{s.tier for s in each.sources} for each in (first, again)] == [{"encoded"}, {"host"}]
    assert again.text == first.text
    modules = sum(
        row.tokens for row in rag.modules.all("notes")
        if row.document in {source.document for source in first.sources}
    )  # fmt: skip
    assert again.reuse.cached_tokens - first.reuse.cached_tokens == modules
    assert (first.reuse.created_tokens, again.reuse.created_tokens) == (modules, 0)
    assert first.reuse.prompt_tokens == again.reuse.prompt_tokens


def test_primed_modules_compute_their_first_tokens_again(rag: RagCache) -> None:
    asked = {"collection": "notes", "k": 3, "relative_threshold": 0.0}
    primed, *_ = (rag.ask(QUESTION, mode="primed", **asked) for _ in range(2))
    for count in (4, 8):
        answer = rag.ask(QUESTION, mode=f"primed:{count}", **asked)
        assert answer.mode == f"primed:{count}"
        assert answer.reuse.prompt_tokens == primed.reuse.prompt_tokens
        again = primed.reuse.cached_tokens + primed.reuse.created_tokens
        again -= answer.reuse.cached_tokens
        assert again == 2 * count, "all but the first module, which saw what stands before it"
        assert {source.tier for source in answer.sources} == {"host"}
    exact, whole = (rag.ask(QUESTION, mode=mode, **asked) for mode in ("exact", "primed:500"))
    assert whole.choices[0].token_ids == exact.choices[0].token_ids


def test_a_folder_has_a_default_mode(tmp_path: Path, model: LoadedModel) -> None:
    primed = replace(model, default_mode=PRIMED)
    message = [{"role": "user", "content": QUESTION}]
    with RagCache.open(tmp_path / "state", primed, max_tokens=2) as rag:
        rag.ingest("notes", DOCUMENTS)
        assert rag.ask(QUESTION, collection="notes").mode == "primed"
        assert rag.ask(QUESTION, collection="notes", mode="rooted").mode == "rooted"
        changes = rag.modules.warm("notes", dry_run=True)
        assert {change.action for change in changes} == {"encode"}, "states for later places"
    options: dict[str, Any] = {"max_tokens": 2, "default_mode": "primed:4"}
    with RagCache.open(tmp_path / "state", primed, **options) as rag:
        assert rag.ask(QUESTION, collection="notes").mode == "primed:4"
        assert rag.chat(message, collection="notes").mode == "recognized:primed:4"
        assert rag.chat(message, collection="notes", mode="exact").mode == "exact"
    with pytest.raises(ConfigurationError, match="default_mode"):
        RagCache.open(tmp_path / "state", primed, default_mode="fast")


def test_states_read_from_disk_are_counted_in_bytes(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    assert rag.ask(QUESTION, collection="notes").reuse.bytes_moved == {"disk": 0}
    rag.close()
    with RagCache.open(tmp_path / "state", model, max_tokens=8) as reopened:
        reuse = reopened.ask(QUESTION, collection="notes").reuse
        assert reuse.bytes_moved == {"disk": reuse.cached_tokens * model.causal.bytes_per_token}


def test_a_batch_mixes_questions_with_and_without_documents(rag: RagCache) -> None:
    answers = rag.ask_batch(["Zyxwv?", QUESTION, "Zyxwv?"], collection="notes")
    assert [answer.finish_reason == "no_documents" for answer in answers] == [True, False, True]
    assert answers[1].text == rag.ask(QUESTION, collection="notes").text
    assert answers[0].reuse.prompt_tokens == 0
    assert rag.ask_batch([], collection="notes") == []


def test_the_embedded_reader_reads_four_modules_at_most(
    tmp_path: Path, model: LoadedModel, quick_reader: LoadedModel
) -> None:
    boats = [SourceDocument(f"{number}", f"Boat {number} is at the quay.") for number in range(8)]
    many: dict[str, Any] = {"k": 8, "relative_threshold": 0.0}
    for name, each, read in (("reader", quick_reader, 4), ("other", model, 8)):
        with RagCache.open(tmp_path / name, each, max_tokens=2) as rag:
            rag.ingest("boats", boats)
            answer = rag.ask("Which boat?", collection="boats", **many)
            assert len(answer.sources) == read
            asked = [{"role": "user", "content": "Which boat?"}]
            assert len(rag.chat(asked, collection="boats", **many).sources) == read


def test_one_empty_question_refuses_the_whole_batch(rag: RagCache) -> None:
    with pytest.raises(EmptyQuestion, match="write what you want to know"):
        rag.ask_batch([QUESTION, "\n\t "], collection="notes")


def test_a_batch_with_a_prompt_too_long_encodes_nothing(rag: RagCache) -> None:
    encoded = rag.stats().encoded
    for mode in ("isolated", "rooted", "exact"):
        with pytest.raises(PromptTooLong, match=r"tokens \(\d\d of documents, \d{4} of question"):
            rag.ask_batch([QUESTION, "key " * 2000], collection="notes", mode=mode)
    assert rag.stats().encoded == encoded


def test_a_lease_ends_even_if_generation_fails(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    store = rag.internals.shared.store
    assert len(store.memory.top.entries) > 0
    with monkeypatch.context() as patched:
        patched.setattr(rag.internals.shared.engine.core.runner, "prepare_batch", fail)
        with pytest.raises(EngineFailed, match="out of memory"):
            rag.ask(QUESTION, collection="notes")
    assert not store.memory.leases
    with monkeypatch.context() as patched:
        patched.setattr(LLMEngine, "submit_request", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            rag.ask_batch([QUESTION, QUESTION], collection="notes")
    assert not store.memory.leases
    assert rag.ask(QUESTION, collection="notes").sources


@pytest.mark.slow
def test_another_model_on_the_same_folder_encodes_its_own_states(
    rag: RagCache, tmp_path: Path, reader: LoadedModel, model: LoadedModel
) -> None:
    before = rag.ask(QUESTION, collection="notes", relative_threshold=0.0)
    rag.close()
    with RagCache.open(tmp_path / "state", reader, max_tokens=8) as other:
        answer = other.ask(QUESTION, collection="notes", relative_threshold=0.0)
        assert {source.tier for source in answer.sources} == {"encoded"}
        assert other.ingest("notes", DOCUMENTS).unchanged == 3
        assert other.stats().encoded == 4, "the preamble, and every module once"
    with RagCache.open(tmp_path / "state", model, max_tokens=8) as back:
        again = back.ask(QUESTION, collection="notes", relative_threshold=0.0)
        assert (again.text, back.stats().encoded) == (before.text, 0)
        assert back.delete("notes", ["boats", "keys", "leave"]) == 3
    left = list((tmp_path / "state" / "states").glob("??/*.safetensors"))
    assert len(left) == 1, "a preamble: the modules went, whichever model had encoded them"


PREAMBLE, OWN = random_tokens(7, seed=1), random_tokens(6, seed=2)
MODULES = [tuple(random_tokens(n, seed=n)) for n in (11, 9, 14)]


def groups_of(modules: list[tuple[int, ...]], start: int) -> list[ModuleGroup]:
    starts = accumulate(map(len, modules), initial=start)
    return [ModuleGroup((n,), module, next(starts)) for n, module in enumerate(modules)]


def context_of(
    states: list[KVStates], modules: list[tuple[int, ...]], own: list[int], mode: ReuseMode
) -> tuple[Context, TokenPrompt]:
    """states: of the preamble and of each module. The preamble's tokens do not matter where they
    are read."""
    layout = PromptLayout([0] * states[0].length)
    groups = groups_of(modules, states[0].length)
    lay_out(layout, groups, own, mode)
    prompt = layout.prompt()
    keys = [KVKey(f"{number:064x}") for number in range(len(states))]
    return build_context(prompt, keys, states), prompt


def computing(tokens: int) -> ReuseMode:
    return ReuseMode.parse(f"primed:{tokens}") if tokens else ROOTED


@torch.no_grad()
def reference(plain: Any, first: int, priming: Sequence[int] = ()) -> Tensor:
    """Every module after the preamble, then its first tokens again in context, then the question.

    A module's cached rest saw the preamble right before it, for modules after the first with the
    priming text in between, and the module's first tokens as they were encoded. So these stand in
    the pass twice: for their module alone, and for everything that is computed.
    """
    rows = [(position, token, "root", True) for position, token in enumerate(PREAMBLE)]
    computed, position = [], len(PREAMBLE)
    for number, module in enumerate(MODULES):
        count = min(first, len(module)) if number else 0
        before = [*PREAMBLE, *priming] if number else PREAMBLE
        start = position - len(before)
        rows += [(start + i, t, f"module {number}", False) for i, t in enumerate(before)]
        for offset, token in enumerate(module):
            rows.append((position + offset, token, f"module {number}", offset >= count))
            if offset < count:
                computed.append((position + offset, token, "computed", True))
        position += len(module)
    computed += [(position + i, token, "computed", True) for i, token in enumerate(OWN)]
    rows += computed
    sees = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for q, (at, _, group, _) in enumerate(rows):
        for k, (stands, _, other, read) in enumerate(rows[: q + 1]):
            sees[q, k] = group == other or (group == "computed" and read and stands < at)
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    positions, tokens = [row[0] for row in rows], [row[1] for row in rows]
    logits: Tensor = plain(
        torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions])
    ).logits
    return logits[0, -1]


@pytest.mark.parametrize("mode", ["rooted", "rooted:1", "rooted:4", "rooted:12"])
def test_a_rooted_context_equals_the_pass_built_by_hand(mode: str) -> None:
    causal = wrap_causal(tiny_model("llama"))
    [root] = encode(causal, [EncodeJob(PREAMBLE)])
    start = len(PREAMBLE)
    jobs = [EncodeJob(module, start, Segment(root, 0)) for module in MODULES]
    states = [root, *encode(causal, jobs)]
    parsed = ReuseMode.parse(mode)
    context, _ = context_of(states, MODULES, OWN, parsed)
    [logits] = last_logits(causal, [context])
    expected = reference(tiny_model("llama"), parsed.amount)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1, 4, 9, 12, 99])
def test_a_primed_context_equals_the_pass_built_by_hand(first: int) -> None:
    """Modules after the first saw preamble and priming text; the question sees no priming text."""
    causal, priming = wrap_causal(tiny_model("llama")), random_tokens(11, seed=5)
    [root, other] = encode(causal, [EncodeJob(PREAMBLE), EncodeJob([*PREAMBLE, *priming])])
    jobs = [
        EncodeJob(module, before.length, Segment(before, 0))
        for module, before in zip(MODULES, [root, *[other] * len(MODULES)], strict=False)
    ]
    states = [root, *encode(causal, jobs)]
    context, _ = context_of(states, MODULES, OWN, computing(first) if first else PRIMED)
    [logits] = last_logits(causal, [context])
    expected = reference(tiny_model("llama"), first, priming)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    tokens = [*PREAMBLE, *(t for module in MODULES for t in module), *OWN]
    with torch.no_grad():
        plain = tiny_model("llama")(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(logits, plain, rtol=1e-4, atol=1e-5) == (first == 99), "all is computed"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_primed_modules_see_the_priming_text(
    tmp_path: Path, reader: LoadedModel, family: str
) -> None:
    """Modules whose positions cannot move see as much of it as stands before them."""
    causal = wrap_causal(tiny_model(family, vocab_size=len(reader.tokenizer)))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    with RagCache.open(tmp_path / "state", model, max_tokens=4) as rag:
        rag.ingest("notes", DOCUMENTS)
        asked = {"collection": "notes", "k": 3, "relative_threshold": 0.0}
        first, again = (rag.ask(QUESTION, mode="primed", **asked) for _ in range(2))
        assert [source.tier for source in first.sources] == ["host", "encoded", "encoded"]
        assert {source.tier for source in again.sources} == {"host"}
        assert again.choices[0].token_ids == first.choices[0].token_ids
        ask = rag.internals.ask
        [prompt] = ask.prepare_prompts(
            [QUESTION], "notes", SearchParams(k=3, relative_threshold=0.0),
            ReuseMode.parse("primed"),
        )  # fmt: skip
        assert isinstance(prompt.states, ModuleStates)
        preamble, priming = ask.encoder.preamble_ids, ask.encoder.surroundings.priming
        with prompt.states.lease() as lease:
            for group, states in list(zip(prompt.states.groups, lease.states, strict=True))[2:]:
                room = len(priming) if causal.scheme.movable else group.start - len(preamble)
                before = [*preamble, *priming[:room]]
                [root] = encode(causal, [EncodeJob(before)])
                at = len(before) if causal.scheme.movable else group.start
                [expected] = encode(causal, [EncodeJob(group.token_ids, at, Segment(root, 0))])
                assert states.start == at
                torch.testing.assert_close(states.keys, expected.keys)
                torch.testing.assert_close(states.values, expected.values)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_every_position_stands_in_a_segment_or_is_computed(
    modules: list[list[int]], own: list[int], first: int
) -> None:
    empty = partial(torch.zeros, 1, 1)
    states = [KVStates(empty(n, 2), empty(n, 2), 3) for n in (3, *map(len, modules))]
    context, prompt = context_of(states, list(map(tuple, modules)), own, computing(first))
    kept = [at for segment in context.segments for at in range(segment.start, segment.end)]
    assert sorted([*kept, *context.position_ids]) == list(range(context.next_position))
    assert list(context.position_ids) == sorted(context.position_ids)
    again = sum(min(first, len(module)) for module in modules[1:])
    assert prompt.recomputed == again
    assert len(context.token_ids) == len(own) + again
    assert context.cached_tokens == 3 + sum(map(len, modules)) - again
    tokens = dict(zip(context.position_ids, context.token_ids, strict=True))
    plain = [t for module in modules for t in module] + own
    assert all(plain[at - 3] == token for at, token in tokens.items())
    names = [segment.name for segment in context.segments]
    assert len(set(names)) == len(names)


# The pure builder: no store and no engine takes part.

ROWS = [ModuleRow(n, f"{d.id}#1", d.id, f"/{d.id}", d.text) for n, d in enumerate(DOCUMENTS, 1)]


class FakeScaffolds(Scaffolds):
    """Knows one scaffold: of the first two modules."""

    def __init__(self) -> None: ...

    def runs(self, collection: str, modules: Any) -> list[tuple[int, int]]:
        assert collection == "notes"
        rest = list(modules)
        begin = 2 if rest[:2] == [1, 2] else 0
        return [(0, 2)] * (begin == 2) + [(n, n + 1) for n in range(begin, len(rest))]


@pytest.fixture
def pipeline(reader: LoadedModel) -> AskPipeline:
    none = cast("Any", None)
    encoder = ModuleEncoder(reader, none, none, prompt_frame(reader.tokenizer, reader.instruction))
    tokens = SimpleNamespace(
        of=lambda rows: [tuple(reader.encode_untrusted(row.text)) for row in rows]
    )
    return AskPipeline(
        none,
        encoder,
        none,
        cast("Any", tokens),
        none,
        FakeScaffolds(),
        none,
    )


def selection_of(*numbers: int) -> Selection:
    hits = tuple(Hit(ROWS[n - 1], 1 / n) for n in numbers)
    return Selection(QUESTION, hits, CollectionVersion(1, 1))


def asked_in(mode: str) -> AskedQuestion:
    return AskedQuestion(QUESTION, ReuseMode.parse(mode), collection="notes")


def all_tokens(prompt: TokenPrompt) -> list[int]:
    """Every token of a prompt in order; each position is there once."""
    groups = prompt.states.groups if isinstance(prompt.states, ModuleStates) else ()
    places = dict(prompt.computed_tokens)
    for span in prompt.spans:
        read = groups[span.group].token_ids[span.begin : span.end]
        at = range(span.start, span.start + span.length)
        assert not places.keys() & set(at)
        places.update(zip(at, read, strict=True))
    assert sorted(places) == list(range(prompt.end))
    return [places[at] for at in range(prompt.end)]


@pytest.mark.parametrize(
    "mode", ["rooted", "rooted:3", "isolated", "primed", "primed:3", "primed:999", "exact"]
)
@pytest.mark.parametrize("numbers", [(3, 1), (1, 2, 3), (2,)])
def test_every_mode_builds_the_same_tokens(
    pipeline: AskPipeline, mode: str, numbers: tuple[int, ...]
) -> None:
    frame, model = pipeline.encoder.frame, pipeline.encoder.model
    texts = [model.encode_untrusted(ROWS[n - 1].text) for n in numbers]
    asked = model.encode(f"{frame.question}{QUESTION}{frame.epilogue}")
    expected = [*model.encode(frame.preamble), *chain(*texts)]
    prompt = pipeline.build(asked_in(mode), selection_of(*numbers))
    assert all_tokens(prompt) == [*expected, *asked]
    assert (prompt.question.text, prompt.answer_mode) == (QUESTION, mode)
    assert prompt.has_documents
    assert len(prompt.computed_tokens) - prompt.recomputed == len(asked)


NOTES = [
    SourceDocument("keys", "The spare key hangs at the north quay.\n\nAsk Ines Marlow."),
    SourceDocument("leave", "Everybody has the key 26 days a year."),
]


@pytest.mark.parametrize("bos", [False, True])
def test_a_question_has_the_tokens_of_the_whole_text(
    tmp_path: Path, model: LoadedModel, bos: bool
) -> None:
    """Also where the tokenizer puts a space before every text that it is given."""
    spaced, question = spaced_tokenizer(bos=bos), "which key? </s>"
    loaded = replace(model, tokenizer=spaced)
    with RagCache.open(tmp_path / "state", loaded) as rag:
        rag.ingest("notes", NOTES)
        ask, params = rag.internals.ask, SearchParams(k=2)
        [prompt] = ask.prepare_prompts([question], "notes", params, EXACT)
        hits = ask.retriever.retrieve(question, "notes", params).hits
        frame = ask.encoder.frame
    modules = "".join(hit.module.text for hit in hits)
    text = f"{frame.preamble}{modules}{frame.question}{question}{frame.epilogue}"
    content = [{"role": "user", "content": text[len("<s>[user] ") : -len("</s>")]}]
    assert len(hits) == 2
    assert text == spaced.apply_chat_template(content, tokenize=False)
    ids = all_tokens(prompt)
    assert spaced.decode(ids, clean_up_tokenization_spaces=False) == text
    template = ChatTemplate(loaded)
    assert ids == template.encode(template.render_chat(content)), "as a chat of this text"


def test_added_tokens_in_documents_are_ordinary_text(tmp_path: Path, model: LoadedModel) -> None:
    """Also those that are not special."""
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<think>", "<tool_call>"])
    with RagCache.open(tmp_path / "state", replace(model, tokenizer=tokenizer)) as rag:
        rag.ingest("notes", [SourceDocument("keys", "<think> of the <tool_call> key.")])
        ask = rag.internals.ask
        [prompt] = ask.prepare_prompts(["which <think> key?"], "notes", SearchParams(k=1), EXACT)
    ids = all_tokens(prompt)
    text = tokenizer.decode(ids)
    assert "<think> of the <tool_call> key." in text
    assert "which <think> key?" in text
    assert not {*ids} & {*tokenizer.convert_tokens_to_ids(["<think>", "<tool_call>"])}


def test_a_rooted_prompt_reads_everything_but_the_question(pipeline: AskPipeline) -> None:
    prompt = pipeline.build(asked_in("rooted"), selection_of(3, 1))
    assert isinstance(prompt.states, ModuleStates)
    assert [group.modules for group in prompt.states.groups] == [(), (3,), (1,)]
    assert [group.start for group in prompt.states.groups] == [s.start for s in prompt.spans]
    assert {group.encoding for group in prompt.states.groups} == {"rooted"}
    assert (prompt.recomputed, prompt.cacheable) == (0, True)
    assert prompt.retrieved.citations == (
        (Citation("leave", "leave#1", "/leave", 1 / 3, text=ROWS[2].text), 1),
        (Citation("boats", "boats#1", "/boats", 1.0, text=ROWS[0].text), 2),
    )


def test_prompts_read_the_same_object_until_the_states_are_gone() -> None:
    states = KVStates(torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4), 3)
    spans = [CachedSpan(0, begin, 9, 20, begin) for begin in range(1, 7)]
    parts = [span.segment(KVKey("key"), states).states for span in spans]
    assert [(part.length, part.start) for part in parts] == [(9 - n, 3 + n) for n in range(1, 7)]
    assert spans[-1].segment(KVKey("key"), states).states is parts[-1]
    assert spans[0].segment(KVKey("key"), states).states is not parts[0], "few are kept"
    part = ref(parts[-1])
    del parts, states
    assert part() is None


def test_an_exact_prompt_reads_nothing(pipeline: AskPipeline) -> None:
    prompt = pipeline.build(asked_in("exact"), selection_of(1, 2))
    assert (prompt.states, prompt.spans, prompt.cacheable) == (None, (), False)
    assert [(cited.scaffold, group) for cited, group in prompt.retrieved.citations] == [
        ("", None)
    ] * 2
    assert len(prompt.computed_tokens) == prompt.end


def test_modules_of_a_scaffold_are_one_group(pipeline: AskPipeline) -> None:
    prompt = pipeline.build(asked_in("primed:5"), selection_of(1, 2, 3))
    assert isinstance(prompt.states, ModuleStates)
    assert [group.modules for group in prompt.states.groups] == [(), (1, 2), (3,)]
    citations = prompt.retrieved.citations
    assert [group for _, group in citations] == [1, 1, 2]
    assert [cited.scaffold for cited, _ in citations] == ["boats#1 keys#1"] * 2 + [""]
    assert prompt.recomputed == 5, "of the last module; the first group comes after the preamble"


def test_a_prompt_without_modules_has_no_answer(pipeline: AskPipeline) -> None:
    prompt = pipeline.build(asked_in("rooted"), selection_of())
    assert (prompt.has_documents, prompt.states, prompt.retrieved.citations) == (False, None, ())


def test_the_reader_reads_no_more_modules_than_it_can(
    quick_reader: LoadedModel, tmp_path: Path
) -> None:
    documents = [SourceDocument(f"{n}", f"Box {n} holds a key.") for n in range(7)]
    asked: dict[str, Any] = {"collection": "boxes", "k": 7, "relative_threshold": 0.0}
    with RagCache.open(tmp_path, quick_reader, max_tokens=2, embedding="none") as rag:
        rag.ingest("boxes", documents)
        assert len(rag.retrieve("Which key?", **asked).hits) == 7
        assert len(rag.ask("Which key?", **asked).sources) == 4
        message = {"role": "user", "content": "Which key?"}
        assert len(rag.chat([message], **asked).sources) == 4
    with RagCache.open(tmp_path / "other", replace(quick_reader, extractive=False)) as rag:
        rag.ingest("boxes", documents)
        assert len(rag.ask("Which key?", **asked).sources) == 7
