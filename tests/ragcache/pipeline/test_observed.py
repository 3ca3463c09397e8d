"""Texts that recur in chats are read from states, without any ingestion."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragcache import Answer, GenerationParams, RagCache, SourceDocument
from ragcache.db import ModuleRow
from ragcache.engine import LLMEngine
from ragcache.engine.core import EngineCore
from ragcache.errors import ModeRefused
from ragcache.models import LoadedModel, wrap_causal
from ragcache.modes import ROOTED, ReuseMode
from ragcache.pipeline import Keeper, gate, prompt_observer
from ragcache.pipeline import observed as module
from ragcache.pipeline.chat import ChatPipeline
from ragcache.pipeline.history import HistoryReads
from ragcache.recognition import NO_DOCUMENT, RecognizedModule
from ragcache.store import KVStore
from tests.ragcache.pipeline.test_gate import FAR, NEAR
from tests.ragcache.test_recurrence import passage
from tests.tiny_models import tiny_model

FREE = GenerationParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, module_tokens=512, force_modes=True) as opened:
        yield opened


def chat(seeds: list[int], question: str) -> list[dict[str, Any]]:
    texts = "\n".join(
        f'<source id="{n}">{passage(seed, 5)}</source>' for n, seed in enumerate(seeds)
    )
    return [{"role": "user", "content": f"Answer from these texts.\n{texts}\n{question}"}]


def ask(rag: RagCache, seeds: list[int], question: str, **options: Any) -> Answer:
    """Answer from passages, and wait until recurring ones are encoded."""
    answer = rag.chat(chat(seeds, question), generation=FREE, **options)
    rag.internals.shared.observing.submit(lambda: None).result()
    return answer


def test_a_text_is_read_from_its_third_prompt_on(rag: RagCache) -> None:
    first = ask(rag, [1, 2], "How many days?")
    second = ask(rag, [3, 1], "Who decides?")
    third = ask(rag, [1, 4], "And where?")
    assert [each.mode for each in (first, second, third)] == ["exact", "exact", "recognized:rooted"]
    [observed] = rag.modules.observed.all()
    assert third.reuse.cached_tokens == len(observed.token_ids)
    assert (observed.row.text, observed.hits) == (passage(1, 5), 1)
    assert third.sources == (), "no document has the text"


def test_a_recurring_text_of_up_to_576_tokens_stays_whole(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    texts = [passage(size, size) for size in range(1, 40)]
    sizes = {text: len(quick_reader.encode_untrusted(text)) for text in texts}
    whole = max((text for text in texts if 384 < sizes[text] <= 576), key=len)
    longer = min((text for text in texts if sizes[text] > 576), key=len)
    with RagCache.open(tmp_path / "state", quick_reader, force_modes=True) as rag:
        for first in ("Answer from two texts.", "Answer."):
            pasted = f"{first}\n<source>{whole}</source>\n<source>{longer}</source>"
            rag.chat([{"role": "user", "content": pasted}], generation=FREE)
            rag.internals.shared.observing.submit(lambda: None).result()
        kept = [each.row.text for each in rag.modules.observed.all()]
    assert whole in kept
    assert len(kept) == 3
    assert max(len(quick_reader.encode_untrusted(text)) for text in kept) <= 576


@pytest.mark.slow
def test_an_observed_text_is_read_as_an_ingested_one_is(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    ask(rag, [1, 2], "How many days?")
    ask(rag, [3, 1], "Who decides?")
    observed = ask(rag, [5, 1, 6], "And where?")
    with RagCache.open(tmp_path / "other", model, module_tokens=512, force_modes=True) as other:
        other.ingest("texts", [SourceDocument("one", passage(1, 5))])
        ingested = ask(other, [5, 1, 6], "And where?")
    assert observed.mode == ingested.mode == "recognized:rooted"
    assert observed.choices[0].token_ids == ingested.choices[0].token_ids


@pytest.mark.slow
def test_a_mode_with_two_states_of_a_module_has_both_encoded(rag: RagCache) -> None:
    for seeds in ([1, 2], [3, 1], [2, 3]):
        ask(rag, seeds, "How many days?", mode="primed")
    encoded = rag.stats().encoded
    answer = ask(rag, [1, 2], "And where?", mode="primed")
    assert answer.mode == "recognized:primed"
    assert {len(each.keys) for each in rag.modules.observed.all()} == {2}
    assert answer.reuse.created_tokens == 0
    assert rag.stats().encoded == encoded, "the request waits for no encoding"


@pytest.mark.slow
def test_an_ingested_text_does_not_become_an_observed_one(rag: RagCache) -> None:
    rag.ingest("texts", [SourceDocument("one", passage(1, 5))])
    for seeds in ([1, 2], [3, 1], [4, 1]):
        answer = ask(rag, seeds, "How many days?")
        assert [each.document for each in answer.sources] == ["one"]
    assert rag.modules.observed.all() == []


@pytest.mark.slow
def test_observed_states_stay_in_memory(rag: RagCache) -> None:
    for number, seeds in enumerate(([1, 2], [3, 1], [1, 4], [5, 1], [6, 1])):
        ask(rag, seeds, f"Question {number}?")
    store = rag.internals.shared.store
    store.sweep()
    [observed] = rag.modules.observed.all()
    assert observed.hits == 3
    [key] = observed.keys
    assert store.memory.is_known(key)
    assert not store.persistent.holds(key)


@pytest.mark.slow
def test_nothing_crosses_namespaces(rag: RagCache) -> None:
    other = rag.within("other")
    ask(rag, [1, 2], "How many days?")
    ask(rag, [3, 1], "Who decides?")
    for seeds in ([1, 4], [5, 1]):
        assert ask(other, seeds, "And where?").mode == "exact"
    [here], [there] = rag.modules.observed.all(), other.modules.observed.all()
    assert here.id == there.id
    assert here.keys != there.keys, "keys are salted"


@pytest.mark.slow
def test_nothing_of_another_namespace_changes_the_work(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a request must not tell which texts another namespace has sent."""
    done = counted_work(monkeypatch)
    asked = [([1, 2], "Who?"), ([3, 1], "Why?"), ([2, 1], "When?"), ([1, 5], "Where?")]
    work: list[list[Any]] = []
    for other in (0, 50):  # the texts of the other namespace are the same, or others
        folder = tmp_path / str(other)
        with RagCache.open(folder, model, module_tokens=512, force_modes=True) as rag:
            for seeds, question in asked:
                ask(rag.within("red"), [seed + other for seed in seeds], question)
            assert len(rag.within("red").modules.observed.all()) == 2
            blue, own = rag.within("blue"), []
            for seeds, question in asked:
                done.clear()
                answer = ask(blue, seeds, question)
                own.append((answer.mode, answer.reuse, answer.choices[0].token_ids, dict(done)))
            work.append(own)
    assert work[0] == work[1]
    assert [mode for mode, *_ in work[0]] == ["exact", "exact", *["recognized:rooted"] * 2]


def test_a_text_is_encoded_after_the_request_that_finds_it(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is idle while a prompt is prepared. That is no pause between requests."""
    order: list[str] = []
    build = ChatPipeline.build

    def record(name: str) -> None:
        method = getattr(EngineCore, name)

        def recorded(*given: Any) -> Any:
            order.append(name)
            return method(*given)

        monkeypatch.setattr(EngineCore, name, recorded)

    def build_slowly(*given: Any) -> Any:
        time.sleep(prompt_observer._POLL_SECONDS + 0.02)
        return build(*given)

    ask(rag, [1, 2], "How many days?")
    monkeypatch.setattr(rag.gate, "measure", lambda _: None)  # its passes are requests, too
    monkeypatch.setattr(ChatPipeline, "build", build_slowly)
    record("add_request")
    record("add_encoding")
    time.sleep(prompt_observer._PAUSE_SECONDS)
    ask(rag, [3, 1], "Who decides?")
    assert order[0] == "add_request"
    assert set(order[1:]) == {"add_encoding"}


def test_texts_wait_together_under_constant_load(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []
    clock = iter(range(10**6))
    time_of_module = SimpleNamespace(
        monotonic=lambda: next(clock) * 1e-3, sleep=slept.append, time=time.time
    )
    monkeypatch.setattr(prompt_observer, "time", time_of_module)
    monkeypatch.setattr(rag.modules.observed._observer, "_is_idle", lambda: False)
    for seeds in ([1, 2, 3, 4], [5, 4, 3, 2, 1]):
        rag.modules.observed.find(chat(seeds, "Who?")[0]["content"], [], ROOTED)
    rag.internals.shared.observing.submit(lambda: None).result()
    assert len(rag.modules.observed.all()) == 4
    readings = prompt_observer._MOST_SECONDS * 1e3
    assert 0 < len(slept) <= readings, "no text waits for the one before it"


def test_what_recurs_most_is_encoded_first(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    observed, encoded = rag.modules.observed, list[str]()
    monkeypatch.setattr(prompt_observer, "MOST_TOGETHER", 1)
    monkeypatch.setattr(
        observed, "_encode", lambda made: encoded.extend(each.row.text for each, _ in made)
    )
    for seeds in ([1, 2, 3], [4, 3, 2, 1], [5, 2], [6, 3, 7, 2]):
        observed.find(chat(seeds, "Who?")[0]["content"], [], ROOTED)
    while observed.waiting or not encoded:
        rag.internals.shared.observing.submit(int).result(60)
    assert encoded == [passage(seed, 5) for seed in (2, 3, 1)]


def test_what_waits_is_forgotten_too(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    observed, encode = rag.modules.observed, rag.modules.observed._encode
    monkeypatch.setattr(prompt_observer, "MOST_TOGETHER", 1)
    monkeypatch.setattr(observed, "_encode", lambda made: (encode(made), observed.forget()))
    for seeds in ([1, 2, 3], [4, 3, 2, 1]):
        observed.find(chat(seeds, "Who?")[0]["content"], [], ROOTED)
    rag.internals.shared.observing.submit(int).result(60)
    assert observed.waiting == len(observed.all()) == 0


def test_constant_load_leaves_others_their_turns(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one namespace come without a pause. Another one's texts are encoded meanwhile."""
    busy, other = rag.modules.observed, rag.within("other")
    prompts = iter(range(10, 10**6))
    ends = threading.Event()
    compare = busy._observer._compare

    def compare_with_another() -> None:
        compare()
        if not ends.is_set():
            busy.find(chat([1, next(prompts)], "Who?")[0]["content"], [], ROOTED)

    monkeypatch.setattr(busy._observer, "_compare", compare_with_another)
    try:
        busy.find(chat([1], "Who?")[0]["content"], [], ROOTED)
        for seeds in ([2, 3], [4, 2]):
            other.modules.observed.find(chat(seeds, "Who?")[0]["content"], [], ROOTED)
            rag.internals.shared.observing.submit(int).result(60)
        assert other.modules.observed.all()
    finally:
        ends.set()


def counted_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts tokens that the engine computes and encodes, and states that the store looks for."""
    done: Counter[str] = Counter()

    def count(owner: Any, name: str, size: Callable[..., int]) -> None:
        method = getattr(owner, name)

        def counted(self: Any, *given: Any, **options: Any) -> Any:
            done[name] += size(*given)
            return method(self, *given, **options)

        monkeypatch.setattr(owner, name, counted)

    count(LLMEngine, "submit_request", lambda request: len(request.context.token_ids))
    count(LLMEngine, "encode", lambda jobs: sum(len(each.token_ids) for each in jobs))
    for name in ("look_up", "lease"):
        count(KVStore, name, lambda keys, *_: len(keys))
    return done


def test_a_prompt_queues_a_bounded_number_of_texts(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[str] = []

    def take(waiting: dict[str, Any]) -> list[str]:
        taken = [*waiting]
        waiting.clear()
        return taken

    monkeypatch.setattr(
        prompt_observer.PromptObserver, "_encode", lambda self: queued.extend(take(self._waiting))
    )
    texts = [f"<source>{passage(seed, 5)}</source>" for seed in range(200)]
    monkeypatch.setattr(prompt_observer, "MOST_WAITING", sum(map(len, texts[:50])))
    observed = rag.modules.observed
    observed.find("\n".join(texts), [], ROOTED)
    for start in (0, 100):
        mixed = texts[start : start + 100][::-1]
        observed.find("Another.\n" + "\n".join(mixed), [], ROOTED)
    rag.internals.shared.observing.submit(lambda: None).result()
    sizes = [*map(len, queued)]
    assert sum(sizes[:-1]) < prompt_observer.MOST_WAITING <= sum(sizes)
    assert len(set(queued)) == len(queued)


def test_few_characters_of_prompts_wait(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    observed, compared = rag.modules.observed, list[str]()
    observer = observed._observer
    texts = [f"{number}. {passage(number, 5)}" for number in range(9)]
    monkeypatch.setattr(prompt_observer, "MOST_CHARACTERS", sum(map(len, texts[5:])))
    monkeypatch.setattr(observer, "_background", SimpleNamespace(submit=lambda _: None))
    monkeypatch.setattr(observer, "_recurrences", SimpleNamespace(observe=compared.append))
    for text in texts:
        observed.find(text, [], ROOTED)
    monkeypatch.setattr(observer._recurrences, "observe", lambda text: compared.append(text) or [])
    observer._compare()
    assert compared == texts[5:]


@pytest.mark.slow
def test_a_request_can_leave_it_out(rag: RagCache) -> None:
    for seeds in ([1, 2], [3, 1], [4, 1]):
        assert ask(rag, seeds, "Who?", recognize_recurring=False).mode == "exact"
        assert ask(rag, seeds, "Why?", mode="exact").mode == "exact"
    assert rag.modules.observed.all() == []


@pytest.mark.slow
def test_a_folder_can_leave_it_out(tmp_path: Path, model: LoadedModel) -> None:
    state = tmp_path / "state"
    with RagCache.open(state, model, force_modes=True, recognize_recurring=False) as rag:
        for seeds in ([1, 2], [3, 1], [4, 1]):
            assert ask(rag, seeds, "Who?").mode == "exact"
        assert rag.modules.observed.all() == []


@pytest.mark.parametrize("more", [0, 1])
def test_texts_under_the_least_length_are_not_kept(
    tmp_path: Path, model: LoadedModel, more: int
) -> None:
    least = len(model.encode_untrusted(passage(1, 5))) + more
    with RagCache.open(tmp_path / "state", model, force_modes=True, min_module_tokens=least) as rag:
        ask(rag, [1, 2], "Who?")
        ask(rag, [3, 1], "Why?")
        assert len(rag.modules.observed.all()) == 1 - more


def test_a_forced_mode_is_not_measured(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "measure_modes", None)
    ask(rag, [1, 2], "Who?")
    ask(rag, [3, 1], "Why?")
    assert len(rag.modules.observed.all()) == 1


def test_a_refused_mode_reads_nothing_and_fails_no_chat(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [FAR])
    with RagCache.open(tmp_path / "state", model, force_modes=False) as rag:
        for seeds in ([1, 2], [3, 1], [4, 1]):
            assert ask(rag, seeds, "Who?").mode == "exact"
        assert rag.modules.observed.all() == []
        assert [each.mode for each in rag.gate.results()] == ["rooted"]


@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
@pytest.mark.parametrize(("asked", "other"), [("rooted", "primed"), ("primed", "rooted")])
def test_texts_are_read_in_the_other_mode_where_one_is_refused(
    tmp_path: Path,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    other: str,
    near: bool,
) -> None:
    def measure(_model: LoadedModel, _engine: LLMEngine, modes: list[ReuseMode]) -> Any:
        found = {asked: FAR, other: NEAR if near else FAR}
        return [replace(found[str(each)], mode=str(each)) for each in modes]

    monkeypatch.setattr(gate, "measure_modes", measure)
    with RagCache.open(tmp_path / "state", model, force_modes=False, default_mode=asked) as rag:
        modes = [ask(rag, seeds, "Who?").mode for seeds in ([1, 2], [3, 1], [4, 1], [5, 1])]
        read = f"recognized:{other}" if near else "exact"
        assert modes == ["exact", "exact", read, read]
        kept = {len(each.keys) for each in rag.modules.observed.all()}
        assert kept == ({2 if other == "primed" else 1} if near else set())
        rag.ingest("notes", [SourceDocument("one", passage(9, 5))])
        with pytest.raises(ModeRefused):
            ask(rag, [9, 1], "Who?")


@pytest.mark.slow
def test_the_least_recently_used_text_ends_beyond_the_budget(
    tmp_path: Path, model: LoadedModel
) -> None:
    tokens = len(model.encode_untrusted(passage(1, 5)))
    room = 3 * tokens * model.causal.bytes_per_token
    with RagCache.open(tmp_path / "state", model, force_modes=True, observed_bytes=room) as rag:
        for seed in range(1, 6):
            ask(rag, [10 + seed, seed], "Who?")
            ask(rag, [20 + seed, seed], "Why?")
        kept = rag.modules.observed.all()
        assert 2 <= len(kept) <= 3
        assert kept[0].row.text == passage(5, 5)
        assert sum(each.nbytes for each in kept) <= room
        memory = rag.internals.shared.store.memory
        assert all(memory.is_known(key) for each in kept for key in each.keys)


def test_a_text_that_nobody_uses_ends(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    rag.internals.shared.store.on_heartbeat.clear()
    monkeypatch.setitem(module.SECONDS_TO_LIVE, "memory", 0.0)
    for seed in (1, 2):
        ask(rag, [10 + seed, seed], "Who?")
        ask(rag, [20 + seed, seed], "Why?")
    assert [each.row.text for each in rag.modules.observed.all()] == [passage(2, 5)]


def test_operators_end_observed_modules(rag: RagCache) -> None:
    ask(rag, [1, 2], "How many days?")
    ask(rag, [2, 1], "Who decides?")
    one, other = rag.modules.observed.all()
    assert rag.modules.observed.forget([one.id, "unknown"]) == 1
    assert [each.id for each in rag.modules.observed.all()] == [other.id]
    assert rag.modules.observed.forget() == 1
    memory = rag.internals.shared.store.memory
    assert not any(memory.is_known(key) for each in (one, other) for key in each.keys)
    assert ask(rag, [3, 1, 2], "And where?").mode == "exact", "fingerprints are forgotten, too"


def test_a_marked_text_is_encoded_by_its_first_prompt(rag: RagCache) -> None:
    first = ask(rag, [1, 2], "How many days?", keep={passage(1, 5): 60.0})
    again = ask(rag, [3, 1], "Who decides?")
    [kept] = [each for each in rag.modules.observed.all() if each.kept_until]
    assert kept.row.text == passage(1, 5)
    assert first.reuse.created_tokens == again.reuse.cached_tokens == len(kept.token_ids)


def test_marked_texts_keep_to_the_budget_of_their_caller(rag: RagCache) -> None:
    texts = {passage(seed, 5): 60.0 for seed in (1, 2)}
    rag.chat(chat([1], "How many days?"), generation=FREE, keep=texts, keeper=Keeper("key 1", 0))
    assert [each.kept_until for each in rag.modules.observed.all()] == [0.0, 0.0]
    one = max(each.nbytes for each in rag.modules.observed.all())
    keeper = Keeper("key 1", one)
    rag.chat(chat([1], "How many days?"), generation=FREE, keep=texts, keeper=keeper)
    assert sum(each.kept_by == "key 1" for each in rag.modules.observed.all()) == 1


def test_states_of_kept_texts_are_pinned_for_their_time(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(rag, [1], "How many days?", keep={passage(1, 5): 60.0})
    [kept] = rag.modules.observed.all()
    memory = rag.internals.shared.store.memory
    assert set(kept.keys) <= memory.pinned
    later = time.time() + 61
    monkeypatch.setattr(module.time, "time", lambda: later)
    rag.modules.observed.end_kept()
    assert not set(kept.keys) & memory.pinned
    [ended] = rag.modules.observed.all()
    assert ended.kept_until == 0


@pytest.mark.slow
def test_kept_texts_outlive_others(tmp_path: Path, model: LoadedModel) -> None:
    with RagCache.open(
        tmp_path, model, module_tokens=512, force_modes=True, observed_bytes="300KiB"
    ) as rag:
        ask(rag, [1], "How many days?", keep={passage(1, 5): 60.0})
        for seed in range(2, 8):
            ask(rag, [seed], "How many days?", keep={passage(seed, 5): 0.0})
        assert passage(1, 5) in [each.row.text for each in rag.modules.observed.all()]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture
def talks(tmp_path: Path, reader: LoadedModel) -> Iterator[RagCache]:
    """A folder with room for conversations of several turns."""
    size = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    model = LoadedModel("tiny", wrap_causal(tiny_model("llama", **size)), reader.tokenizer)
    with RagCache.open(tmp_path / "talks", model, module_tokens=512, force_modes=True) as opened:
        yield opened


def talk(rag: RagCache, messages: list[dict[str, Any]]) -> Answer:
    """Answer the last message, and wait for what the background keeps."""
    answer = rag.chat(messages, generation=FREE)
    for background in (rag.internals.shared.keeping, rag.internals.shared.observing):
        background.submit(lambda: None).result()
    return answer


@pytest.mark.parametrize("marked", [False, True], ids=["recurring", "marked"])
def test_a_new_module_leaves_its_conversation_the_kept_states(
    talks: RagCache, marked: bool
) -> None:
    """Reading it would compute the rest of the history again, which is longer than the module."""
    text, rest = passage(1, 5), passage(2, 30)
    history = [said("user", f"Read this.\n\n{text}\n\nAnd this.\n\n{rest}\n\nWho?")]
    answer = talk(talks, history)
    keep = {text: 60.0} if marked else {}
    if not marked:
        talk(talks, [said("user", f"Another.\n\n{passage(3, 5)}\n\n{text}\n\nWhy?")])
    for question in ("Where?", "When?"):
        history += [said("assistant", answer.text), said("user", question)]
        answer = talks.chat(history, generation=FREE, keep=keep)
        talks.internals.shared.keeping.submit(lambda: None).result()
        assert len(talks.modules.observed.all()) == 1
        assert sum(answer.reuse.resumed_tokens.values()) > 0.8 * answer.reuse.prompt_tokens
        assert answer.mode == "exact", "the whole history is as the conversation has computed it"
    fresh = talk(talks, [said("user", f"New.\n\n{passage(4, 5)}\n\n{text}\n\nWhy?")])
    assert fresh.mode == "recognized:rooted"


def test_a_module_is_read_where_a_chat_has_no_kept_states(talks: RagCache) -> None:
    text = passage(1, 5)
    for question in ("Who?", "Why?"):
        talk(talks, [said("user", f"{question}\n\n{text}\n\n{question}")])
    history = [said("user", f"Read.\n\n{text}"), said("assistant", "Done."), said("user", "Who?")]
    answer = talk(talks, history)
    assert answer.mode == "recognized:rooted"
    [observed] = talks.modules.observed.all()
    history += [said("assistant", answer.text), said("user", "And when?")]
    again = talk(talks, history)
    assert again.mode == "recognized:rooted"
    assert again.reuse.cached_tokens >= len(observed.token_ids)


def test_kept_states_slow_to_read_do_not_hold_up_a_module(
    talks: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the history are compared as far as an answer would read them."""
    text, rest = passage(1, 5), passage(2, 30)
    history = [said("user", f"Read this.\n\n{text}\n\nAnd this.\n\n{rest}\n\nWho?")]
    history += [said("assistant", talk(talks, history).text), said("user", "Where?")]
    talk(talks, [said("user", f"Another.\n\n{passage(3, 5)}\n\n{text}\n\nWhy?")])
    memory = talks.internals.shared.store.memory
    monkeypatch.setattr(memory, "seconds_to_read", lambda _: 1e9)
    assert talk(talks, history).mode == "recognized:rooted"


def test_a_chat_without_kept_states_is_searched_once() -> None:
    """Its first look tells that nothing can be gained by leaving modules out."""
    searched = []

    class Kept:
        def kept_tokens(self, prompt: Any) -> int:
            searched.append(prompt)
            return 0

    module_row = ModuleRow(NO_DOCUMENT, "digest", "", "", "A text.")
    found = [RecognizedModule(module_row, 0, 7, whole=True)]
    reads = HistoryReads(cast("Any", Kept()))
    for _ in range(2):
        chosen: Any = reads.choose("A text. Who?", 8, found, build=cast("Any", list))
        assert chosen == found
    assert searched == [[]]
