"""Chats: what is computed, what is read, and that both are what they would be by hand.

The tokens of a prompt that is put together of modules and new text decode to the prompt.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache import Answer, AsyncRagCache, GenerationParams, RagCache, SourceDocument
from ragcache.db import ModuleRow
from ragcache.engine import Context, EncodeJob, Segment, complete, encode
from ragcache.errors import EmptyQuestion, InvalidRequest, PromptTooLong, UnknownCollection
from ragcache.models import LoadedModel, wrap
from ragcache.models.loader import prompt_frame
from ragcache.modes import EXACT, ISOLATED, ROOTED, ReuseMode
from ragcache.params import REFUSAL, SearchParams
from ragcache.pipeline import ChatCall, ChatTemplate, DocumentSearch
from ragcache.pipeline import chat as chat_module
from ragcache.pipeline.chat import (
    MIN_READ_TOKENS,
    ChatPipeline,
    InContextTokenizer,
    PreparationTurns,
    RenderedChat,
    _history_end,
    lay_out_chat,
)
from ragcache.pipeline.module_states import ModuleEncoder
from ragcache.pipeline.prompt import ModuleStates, PromptLayout
from ragcache.pipeline.submit import request_maker
from ragcache.recognition import Fingerprints, FingerprintTable, find
from ragcache.retrieval import Hit
from tests.ragcache.pipeline.conftest import spaced_tokenizer
from tests.ragcache.pipeline.test_chat_template import CALL, TOOLS, WEATHER
from tests.tiny_models import tiny_model

BOATS = "The survey boat Pipit is moored at the north quay, beside the crane."
KEYS = "The spare key of the boathouse hangs in the red cupboard. Ask Tom Hartley."
DOCUMENTS = [SourceDocument("boats", BOATS), SourceDocument("keys", KEYS)]
FREE = GenerationParams(max_tokens=8, ignore_eos=True)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PASTED = user(f"Use these notes.\n\n{KEYS}\n\n{BOATS}\n\nWhere is the key?")


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=8) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def tokens(answer: Answer) -> list[int]:
    return list(answer.choices[0].token_ids)


def test_a_plain_chat_generates_what_hugging_face_does(rag: RagCache, model: LoadedModel) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is the key?"},
        {"role": "assistant", "content": "In the cupboard."},
        {"role": "user", "content": "In which?"},
    ]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    plain = tiny_model("llama", vocab_size=len(model.tokenizer))
    out = plain.generate(
        ids["input_ids"], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    expected = out[0, ids["input_ids"].shape[1] :].tolist()
    for options in ({"recognize": False}, {"mode": "exact"}, {}):
        answer = rag.chat(chat, generation=FREE, **options)  # type: ignore[arg-type]
        assert tokens(answer) == expected
        assert (answer.mode, answer.sources) == ("exact", ())
        assert answer.question == "In which?"
        assert answer.reuse.prompt_tokens == ids["input_ids"].shape[1]


@pytest.mark.parametrize("mode", ["rooted", "isolated"])
def test_a_recognized_chat_reads_the_expected_context(
    rag: RagCache, model: LoadedModel, mode: str
) -> None:
    """The notes' states after the preamble of a question, or alone, at their places in the chat."""
    encoder = rag.internals.ask.encoder
    [root] = encode(model.causal, [EncodeJob(encoder.preamble_ids)])
    seen, start = (Segment(root, 0) if mode == "rooted" else None), len(encoder.preamble_ids)
    outside = model.encode_untrusted
    segments: list[Segment] = []
    own = [model.tokenizer.convert_tokens_to_ids("<|user|>"), *outside("Use these notes.\n\n")]
    placed, at = list(enumerate(own)), len(own)
    for text in (KEYS, BOATS):
        [states] = encode(model.causal, [EncodeJob(outside(f"{text}\n\n"), start, seen)])
        segments.append(Segment(states, at))
        at = segments[-1].end
    end = [*outside("Where is the key?"), model.tokenizer.convert_tokens_to_ids("<|assistant|>")]
    placed += enumerate(end, at)
    positions, token_ids = zip(*placed, strict=True)
    context = Context(tuple(segments), token_ids, positions, positions[-1] + 1)
    request = request_maker(FREE, model, 8, None)(context)
    [expected] = complete(model.causal, [request])
    answer = rag.chat(PASTED, mode=mode, generation=FREE)
    assert tokens(answer) == list(expected.token_ids)
    assert answer.mode == f"recognized:{mode}"
    assert [source.module for source in answer.sources] == ["keys#1", "boats#1"]
    assert {source.score for source in answer.sources} == {1.0}
    assert answer.reuse.prompt_tokens == context.prompt_tokens


def test_a_module_at_its_encoded_place_loses_nothing(rag: RagCache, model: LoadedModel) -> None:
    """A chat that begins as a question's prompt does reads states that fit exactly."""
    frame = rag.internals.ask.encoder.frame
    asked = user(f"{frame.preamble.removeprefix('<|user|>')}{KEYS}\n\nQuestion: Where?")
    rooted = rag.chat(asked, generation=FREE)
    assert tokens(rooted) == tokens(rag.chat(asked, mode="exact", generation=FREE))
    assert rooted.mode == "recognized:rooted"


def test_reuse_counts_what_was_read_and_what_was_made(rag: RagCache) -> None:
    kept = rag.chat(PASTED)
    assert (kept.reuse.created_tokens, {s.tier for s in kept.sources}) == (0, {"host"})
    first, again = rag.chat(PASTED, mode="isolated"), rag.chat(PASTED, mode="isolated")
    assert {source.tier for source in first.sources} == {"encoded"}
    assert first.reuse.cached_tokens == 0
    assert first.reuse.created_tokens == again.reuse.cached_tokens == kept.reuse.cached_tokens
    assert first.reuse.created_tokens <= first.reuse.computed_tokens
    exact = rag.chat(PASTED, mode="exact")
    assert (exact.mode, exact.reuse.cached_tokens) == ("exact", 0)
    assert [source.tier for source in exact.sources] == ["computed", "computed"]
    plain = rag.chat(PASTED, recognize=False)
    assert (plain.mode, plain.sources, plain.reuse.cached_tokens) == ("exact", (), 0)
    rag.chat(PASTED, mode="primed")
    primed = rag.chat(PASTED, mode="primed:4")
    assert primed.mode == "recognized:primed:4"
    assert primed.reuse.cached_tokens == kept.reuse.cached_tokens - 8
    assert tokens(rag.chat(PASTED, mode="primed:400")) == tokens(exact)


def test_states_made_for_a_chat_belong_to_their_modules(rag: RagCache) -> None:
    rag.chat(PASTED, mode="isolated")
    keys = rag.internals.catalog.keys("notes")
    assert len(keys) == 4, "both modules, rooted and isolated"
    assert rag.delete("notes", ["boats", "keys"]) == 2
    gone = rag.chat(PASTED)
    assert (gone.mode, gone.sources) == ("exact", ())


def test_a_pml_prompt_counts_what_it_makes(rag: RagCache) -> None:
    rag.schemas.add(f'<schema name="s"><module name="m">{KEYS}</module></schema>')
    asked = '<prompt schema="s"><m/>Where?</prompt>'
    assert rag.prompt(asked).reuse.created_tokens == 0
    store = rag.internals.shared.store
    store.evict(list(store.memory.top.entries))
    made = rag.prompt(asked).reuse
    assert made.created_tokens > 0
    assert made.cached_tokens == 0


QUESTION = "Where does the spare key of the boathouse hang?"
AGENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "It rains.", "tool_call_id": "c1"},
]


@pytest.fixture
def agent(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    """A model whose template takes tools."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = TOOLS
    taught = LoadedModel("agent", model.causal, tokenizer)
    with RagCache.open(tmp_path / "agent", taught, max_tokens=8) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def test_documents_and_tools_share_a_prompt(agent: RagCache) -> None:
    answer = agent.chat(AGENT, collection="notes", k=1, tools=[WEATHER])
    [source] = answer.sources
    assert (answer.question, source.document, source.tier) == (QUESTION, "keys", "host")
    assert source.bm25 is not None
    assert answer.mode == "recognized:rooted"
    assert answer.reuse.cached_tokens >= len(agent.internals.chat.template.encode(KEYS))
    search = DocumentSearch("notes", SearchParams(k=1))
    call = ChatCall(EXACT, tools=[WEATHER], search=search)
    [prompt] = agent.internals.chat.prepare_prompts([AGENT], call)
    model = agent.internals.shared.model
    text = model.tokenizer.decode([token for _, token in prompt.computed_tokens])
    instruction = agent.internals.shared.instruction
    documents = f"user: {instruction}\n\n{KEYS}\n\nQuestion: {QUESTION}<|end|>"
    parts = [
        '"name": "weather"',
        "system: Be brief.",
        documents,
        "calls weather",
        "tool: It rains.",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert BOATS not in text


def test_a_chat_takes_the_selection_of_a_search(agent: RagCache) -> None:
    found = agent.retrieve("survey boat", collection="notes", k=1)
    answer = agent.chat(AGENT, collection="notes", selection=found)
    assert [source.document for source in answer.sources] == ["boats"]
    nothing = agent.chat(user("xyzzy"), collection="notes", tools=[WEATHER])
    assert (nothing.sources, nothing.mode) == ((), "exact")
    assert nothing.finish_reason != "no_documents", "tools may answer"


GREETED = [SourceDocument("hello.py", "print('hello')"), *DOCUMENTS]


def test_small_talk_is_answered_without_documents(agent: RagCache) -> None:
    agent.ingest("greeted", GREETED)
    answer = agent.chat(user("Hello!"), collection="greeted", generation=FREE)
    assert tokens(answer) == tokens(agent.chat(user("Hello!"), generation=FREE))
    assert answer.sources == ()
    refused = agent.ask("Hello!", collection="greeted")
    assert (refused.finish_reason, refused.text) == ("no_documents", REFUSAL)
    assert [hit.module.document for hit in agent.retrieve("Hello!", collection="greeted").hits]


@pytest.mark.parametrize("question", ["Hello!", "Xyzzy?"])
def test_the_reader_refuses_chats_without_documents_in_words(
    tmp_path: Path, quick_reader: LoadedModel, question: str
) -> None:
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=8) as rag:
        rag.ingest("greeted", GREETED)
        stream = rag.stream_chat(user(question), collection="greeted")
        assert "".join(stream) == REFUSAL
        assert (stream.answer.finish_reason, stream.answer.sources) == ("no_documents", ())


def test_a_chat_of_a_model_is_refused_where_nothing_is_found(agent: RagCache) -> None:
    answer = agent.chat(user("xyzzy"), collection="notes")
    assert (answer.finish_reason, answer.text) == ("no_documents", REFUSAL)


def test_a_chat_over_documents_is_a_quotation_with_a_confidence(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    shown = GenerationParams(min_confidence=0.0)
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=8) as rag:
        rag.ingest("notes", DOCUMENTS)
        answer = rag.chat(user(QUESTION), collection="notes", k=1, generation=shown)
        assert answer.text in KEYS
        assert answer.spans[0].document == "keys"
        assert answer.confidence is not None
        doubted = GenerationParams(min_confidence=1.0)
        refused = rag.chat(user(QUESTION), collection="notes", generation=doubted)
        assert (refused.finish_reason, refused.text) == ("no_answer", REFUSAL)


async def test_a_blank_chat_of_the_reader_becomes_words(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=8) as rag:
        said = rag.chat(user("Where?")).text
        silent = GenerationParams(stop=said[0])
        stream = rag.stream_chat(user("Where?"), generation=silent)
        assert "".join(stream).strip() == REFUSAL
        assert (stream.answer.finish_reason, stream.answer.text) == ("no_answer", REFUSAL)
        async with AsyncRagCache(rag).stream_chat(user("Where?"), generation=silent) as pieces:
            assert "".join([piece async for piece in pieces]).strip() == REFUSAL


def test_a_chat_reads_the_states_of_its_collections_instruction(agent: RagCache) -> None:
    agent.collections.set_instruction("notes", "Reply in one word, from the notes:")
    agent.modules.warm("notes")
    answer = agent.chat(user(QUESTION), collection="notes", k=1)
    assert [source.tier for source in answer.sources] == ["host"]


@pytest.mark.parametrize(
    ("chat", "options", "error", "fault"),
    [
        ("text", {"collection": "notes"}, InvalidRequest, "no place for documents"),
        (AGENT[:1], {"collection": "notes"}, EmptyQuestion, "asks a question"),
        (user(" "), {"collection": "notes"}, EmptyQuestion, "asks a question"),
        (AGENT, {"k": 2}, InvalidRequest, "k search documents; give `collection`"),
        (AGENT, {"collection": "other"}, UnknownCollection, "other"),
    ],
)
def test_a_search_for_a_chat_that_cannot_be_made(
    rag: RagCache, chat: Any, options: Any, error: type[Exception], fault: str
) -> None:
    with pytest.raises(error, match=fault):
        rag.chat(chat, **options)


def test_a_plain_text_is_continued(rag: RagCache, model: LoadedModel) -> None:
    ids = model.encode_untrusted(f"{KEYS} So the key")
    context = Context((), tuple(ids), tuple(range(len(ids))), len(ids))
    [expected] = complete(model.causal, [request_maker(FREE, model, 8, None)(context)])
    text = f"{KEYS} So the key"
    assert tokens(rag.chat(text, mode="exact", generation=FREE)) == list(expected.token_ids)
    recognized = rag.chat(text, generation=FREE)
    assert (recognized.mode, recognized.question) == ("recognized:rooted", text)
    assert rag.chat(f"{KEYS}\n\n", generation=FREE).reuse.computed_tokens == 1
    with pytest.raises(InvalidRequest, match="no place for tools; give messages"):
        rag.chat(text, tools=[{"type": "function", "function": {"name": "f"}}])


def test_positions_that_cannot_move_are_encoded_where_they_stand(
    tmp_path: Path, reader: LoadedModel
) -> None:
    size = len(reader.tokenizer)
    causal = wrap(tiny_model("gpt2", vocab_size=size))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    with RagCache.open(tmp_path / "state", model, max_tokens=8) as rag:
        rag.ingest("notes", DOCUMENTS)
        first = rag.chat(PASTED, mode="isolated", generation=FREE)
        assert [source.tier for source in first.sources] == ["encoded", "encoded"]
        script = [*model.encode_untrusted("Use these notes.\n\n")]
        at = 1 + len(script)
        [states] = encode(causal, [EncodeJob(model.encode_untrusted(f"{KEYS}\n\n"), at)])
        key = rag.internals.ask.encoder.key(model.encode_untrusted(f"{KEYS}\n\n"), "isolated", at)
        with rag.internals.shared.store.borrow([key]) as lease:
            torch.testing.assert_close(lease.found[key].keys, states.keys)
        early = rag.chat(PASTED, generation=FREE)
        assert early.sources[0].tier == "computed", "it would stand within the preamble"
        assert rag.chat(PASTED, mode="isolated", generation=FREE).choices == first.choices


def test_a_chat_over_the_window_is_refused_unencoded(rag: RagCache) -> None:
    encoded = rag.stats().encoded
    for options in ({}, {"mode": "isolated"}, {"recognize": False}):
        with pytest.raises(PromptTooLong, match="context length is 512 tokens"):
            rag.chat_batch([PASTED, user(KEYS + " key" * 600)], **options)  # type: ignore[arg-type]
    assert rag.stats().encoded == encoded


@pytest.mark.parametrize("ids", [[3, -1], [3, 2**40], [3, 1_000_000]])
def test_token_ids_that_the_model_lacks_are_refused(rag: RagCache, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="is none of the model's"):
        rag.chat(ids, generation=FREE)


def test_token_ids_are_continued_and_scored(rag: RagCache, model: LoadedModel) -> None:
    tokens = [*model.encode_untrusted("The key hangs in the red cupboard.")]
    scored = GenerationParams(prompt_logprobs=True, logprobs=2, max_tokens=4)
    answer = rag.chat(tokens, generation=scored)
    assert [each.token for each in answer.prompt_logprobs] == tokens
    assert answer.prompt_logprobs[0].logprob is None
    assert all(len(each.alternatives) == 2 for each in answer.prompt_logprobs[1:])
    plain = rag.chat(tokens, generation=GenerationParams(max_tokens=4))
    assert plain.prompt_logprobs == ()
    assert plain.choices[0].token_ids == answer.choices[0].token_ids
    with pytest.raises(InvalidRequest, match="reads states"):
        rag.chat(PASTED, generation=scored)
    whole = rag.chat(PASTED, mode="exact", generation=scored)
    assert len(whole.prompt_logprobs) == whole.reuse.prompt_tokens
    with pytest.raises(InvalidRequest, match="plain text"):
        rag.chat(tokens, tools=[{}])


def test_private_characters_of_a_module_are_no_marks(tmp_path: Path, model: LoadedModel) -> None:
    text = "\U00100000 hangs in the red cupboard of the boathouse, as ever."
    with RagCache.open(tmp_path / "state", model, max_tokens=4) as rag:
        rag.ingest("notes", [SourceDocument("a", text)])
        with pytest.raises(InvalidRequest, match="private character"):
            rag.chat(user(text))


MODULES = [
    "The survey boat Pipit is moored at the north quay, where the key hangs.\n\n",
    "Everybody has 26 days of leave a year. Requests go to Ines Marlow.\n\n",
    "  which boat is at the quay? Read the documents and answer.</s>\n\n",
]
ROWS = [ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(MODULES)]
TABLE = FingerprintTable(Fingerprints.of(ROWS))


@pytest.fixture(scope="module", params=["reader", "spaced"])
def worded(request: pytest.FixtureRequest, reader: LoadedModel) -> LoadedModel:
    """A model whose tokenizer puts a space before texts, and one whose does not."""
    if request.param == "reader":
        return reader
    return LoadedModel("spaced", reader.causal, spaced_tokenizer())


def laid_out(
    model: LoadedModel, text: str, first: int = 0, allowed: bool = True, lead: tuple[int, ...] = ()
) -> tuple[PromptLayout, list[int | None], list[int]]:
    """A prompt's layout, the group of each module in it, and all of its tokens in order."""
    found = find(text, TABLE)
    ids = [tuple(model.encode_untrusted(each.module.text)) for each in found]
    tokenizer = InContextTokenizer(ChatTemplate(model))
    layout, chat = PromptLayout(), RenderedChat("", text, found, lead)
    mode = ReuseMode.parse(f"primed:{first}") if first else ROOTED
    groups = lay_out_chat(layout, chat, ids, tokenizer, mode, lambda *_: allowed)
    places = dict(layout.own)
    assert len(places) == len(layout.own)
    assert [at for at, _ in layout.own] == sorted(places)
    for span in layout.spans:
        run = layout.groups[span.group].token_ids[span.begin : span.end]
        at = range(span.start, span.start + span.length)
        assert not places.keys() & set(at)
        assert layout.groups[span.group].start == span.start - span.begin
        places.update(zip(at, run, strict=True))
    assert sorted(places) == list(range(layout.length))
    return layout, groups, [places[at] for at in range(layout.length)]


def decoded(model: LoadedModel, ids: list[int]) -> str:
    text: str = model.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


PARTS = st.one_of(
    st.sampled_from([*MODULES, *map(str.strip, MODULES)]),
    st.sampled_from(["The key ", "boat", "\n", "\n\n", " ", "year. ", "Question: ", "<s>"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARTS, min_size=1, max_size=7), st.sampled_from([0, 3, 99]))
def test_the_tokens_decode_to_the_prompt(worded: LoadedModel, parts: list[str], first: int) -> None:
    model = worded
    content = "".join(parts)
    template = ChatTemplate(model)
    if content.strip():
        text = template.render_chat([{"role": "user", "content": content}])
        _, _, ids = laid_out(model, text, first)
        rendered = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert decoded(model, ids) == rendered
    _, _, ids = laid_out(model, template.plain(content), first)
    whole = model.encode_untrusted(content)  # which may not decode to spaces at its front
    assert decoded(model, ids) == decoded(model, whole)


def test_modules_as_they_are_cost_no_tokens_of_their_own(reader: LoadedModel) -> None:
    layout, _, _ = laid_out(reader, f"Read: {MODULES[0]}{MODULES[1]}Which?")
    sizes = [len(group.token_ids) for group in layout.groups[1:]]
    assert [(span.begin, span.end) for span in layout.spans] == [(0, size) for size in sizes]
    assert len(sizes) == 2
    assert len(layout.own) == len(reader.encode("Read: ")) + len(reader.encode("Which?"))


def test_a_trimmed_module_is_read_as_far_as_its_tokens_agree(worded: LoadedModel) -> None:
    layout, _, ids = laid_out(worded, f"[user] {MODULES[0].strip()}\r\nWhich?")
    [span] = layout.spans
    own = worded.encode_untrusted(MODULES[0])
    assert len(own) - 6 < span.length < len(own)
    assert ids[span.start : span.start + span.length] == own[span.begin : span.end]


def test_a_space_that_the_tokenizer_adds_is_not_read(reader: LoadedModel) -> None:
    model = LoadedModel("spaced", reader.causal, spaced_tokenizer())
    layout, _, _ = laid_out(model, f"The key:\n{MODULES[0]}Which?")
    [span] = layout.spans
    assert (span.begin, span.end) == (0, len(layout.groups[span.group].token_ids))
    first, _, ids = laid_out(model, f"{MODULES[0]}Which?")
    assert 0 < first.spans[0].begin <= 2, "it stands at the beginning of a prompt alone"
    assert ids[0] != layout.groups[1].token_ids[0]


def test_the_last_token_is_computed(reader: LoadedModel) -> None:
    layout, _, ids = laid_out(reader, MODULES[0])
    [span] = layout.spans
    own = reader.encode_untrusted(MODULES[0])
    assert layout.own == [(layout.length - 1, own[-1])]
    assert span.length == len(ids) - 1


def test_modules_that_may_not_stand_there_are_computed(reader: LoadedModel) -> None:
    text = f"Read: {MODULES[0]}Which?"
    layout, groups, ids = laid_out(reader, text, allowed=False)
    assert (layout.spans, groups) == ([], [None])
    assert [token for _, token in layout.own] == ids
    layout, groups, _ = laid_out(reader, text, first=99)
    assert (layout.spans, groups) == ([], [None])
    some, groups, _ = laid_out(reader, text, first=MIN_READ_TOKENS)
    assert (some.spans[0].begin, groups) == (MIN_READ_TOKENS, [1])


def test_what_stands_before_every_text_comes_first(reader: LoadedModel) -> None:
    layout, _, ids = laid_out(reader, MODULES[0], lead=(7,))
    assert ids[0] == 7
    assert layout.spans[0].start == 1


# The pure builder: no store and no engine takes part.


@pytest.fixture
def pipeline(reader: LoadedModel) -> ChatPipeline:
    none = cast("Any", None)
    template = ChatTemplate(reader)
    tokens = SimpleNamespace(
        of=lambda rows: [tuple(reader.encode_untrusted(row.text)) for row in rows]
    )
    return ChatPipeline(
        template,
        InContextTokenizer(template),
        cast("Any", SimpleNamespace(find=lambda text: find(text, TABLE))),
        none,
        ModuleEncoder(reader, none, none, prompt_frame(reader.tokenizer, reader.instruction)),
        cast("Any", tokens),
        none,
        cast("Any", SimpleNamespace(find=lambda _, found, __: found, mode_for=lambda mode: mode)),
        none,
    )


def test_a_chat_is_built_without_an_engine(pipeline: ChatPipeline) -> None:
    chat = user(f"Read: {MODULES[1]}{MODULES[0]}Which?")
    [prompt] = pipeline.prepare_prompts([chat], ChatCall())
    assert (prompt.answer_mode, prompt.cacheable) == ("recognized:rooted", True)
    assert prompt.question.text == chat[0]["content"]
    assert isinstance(prompt.states, ModuleStates)
    assert [group.modules for group in prompt.states.groups] == [(), (1,), (0,)]
    assert [(cited.module, group) for cited, group in prompt.retrieved.citations] == [
        ("d#1", 1),
        ("d#0", 2),
    ]
    assert [span.group for span in prompt.spans] == [1, 2], "the preamble is leased, not read"
    assert prompt.question.times.called <= prompt.question.times.retrieved


def test_an_exact_chat_cites_its_modules_and_reads_none(pipeline: ChatPipeline) -> None:
    chat = user(f"Read: {MODULES[1]}Which?")
    [read] = pipeline.prepare_prompts([chat], ChatCall(ISOLATED))
    [exact] = pipeline.prepare_prompts([chat], ChatCall(EXACT))
    assert isinstance(read.states, ModuleStates)
    assert [group.encoding for group in read.states.groups[1:]] == ["isolated"]
    assert (exact.states, exact.spans, exact.cacheable) == (None, (), False)
    assert [(cited.module, group) for cited, group in exact.retrieved.citations] == [("d#1", None)]
    assert len(exact.computed_tokens) == exact.end
    [plain] = pipeline.prepare_prompts([chat], ChatCall(recognize=False))
    assert (plain.answer_mode, plain.retrieved.citations, plain.cacheable) == ("exact", (), True)
    assert plain.computed_tokens == exact.computed_tokens


def test_given_documents_are_read_as_a_collections_are(rag: RagCache) -> None:
    question = user("Where is the key of the boathouse?")
    found = rag.retrieve(question[0]["content"], collection="notes")
    modules = rag.internals.catalog.modules("notes")
    in_order = replace(found, hits=tuple(Hit(each, 1.0) for each in modules))
    stored = rag.chat(question, collection="notes", selection=in_order, generation=FREE)
    given = rag.chat(question, documents=DOCUMENTS, generation=FREE)
    assert tokens(given) == tokens(stored)
    assert given.reuse.cached_tokens == stored.reuse.cached_tokens > 0
    assert [each.document for each in given.sources] == ["boats", "keys"]
    quoted = rag.chat(question, documents=DOCUMENTS, generation=GenerationParams(extractive=True))
    [span, *_] = [each for each in quoted.spans if each.start is not None]
    text = {each.id: each.text for each in DOCUMENTS}[span.document]
    assert text[span.start : span.end] == quoted.text
    with pytest.raises(InvalidRequest, match="either `collection` or `documents`"):
        rag.chat(question, documents=DOCUMENTS, collection="notes")


def test_a_history_that_a_template_changes_has_no_end() -> None:
    """A template may trim a message, or leave it out."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ada and Grace."},
        {"role": "user", "content": "Why?"},
    ]
    assert _history_end(messages, "Who? Ada and Grace. Why?") == len("Who? Ada and Grace.")
    assert _history_end(messages, "Who? ADA AND GRACE. Why?") == 0


def test_threads_prepare_prompts_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = PreparationTurns(), list[str]()
    first_waits, first_may_end = threading.Event(), threading.Event()

    def first() -> None:
        with turns.take():
            first_waits.set()
            assert first_may_end.wait(60)
            order.append("first")

    def second() -> None:
        with turns.take():
            order.append("second")

    monkeypatch.setattr(chat_module, "TURN_SECONDS", 60)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(first)
        assert first_waits.wait(60)
        waiting = pool.submit(second)
        first_may_end.set()
        held.result()
        waiting.result()
    assert order == ["first", "second"]


def test_a_thread_that_waits_too_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "TURN_SECONDS", 0.001)
    turns = PreparationTurns()

    def take() -> bool:
        with turns.take():
            return True

    with ThreadPoolExecutor() as pool:
        with turns.take():
            assert pool.submit(take).result()
        assert pool.submit(take).result()
