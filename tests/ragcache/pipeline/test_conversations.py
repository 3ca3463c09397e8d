"""A chat's next turn starts from the states that its earlier turns left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import Answer, GenerationParams, RagCache, SourceDocument
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel, wrap_causal
from ragcache.pipeline import Keeper
from ragcache.pipeline.conversations import BLOCK, PrefixRun, worth_reading
from ragcache.states import KVKey
from ragcache.store.verify import verify
from tests.conftest import scaled
from tests.ragcache.pipeline.test_observed import counted_work
from tests.ragcache.store.test_processes import run_and_kill
from tests.ragcache.test_recurrence import passage
from tests.tiny_models import tiny_model

FREE = GenerationParams(max_tokens=80, ignore_eos=True, first_logprobs=True)
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(reader: LoadedModel) -> LoadedModel:
    """A tiny random model with a window for several turns."""
    size = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    return LoadedModel("tiny", wrap_causal(tiny_model("llama", **size)), reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with opened(tmp_path / "state", model) as folder:
        yield folder


def opened(folder: Path, model: LoadedModel, **options: Any) -> RagCache:
    return RagCache.open(
        folder, model, force_modes=True, recognize_recurring=False, dtype="float32", **options
    )


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def turn(rag: RagCache, messages: Messages, **options: Any) -> Answer:
    """Answer the last message, and wait until the conversation is kept."""
    answer = rag.chat(messages, generation=FREE.replace(**options))
    rag.internals.shared.keeping.submit(lambda: None).result()
    return answer


def conversation(*seeds: int) -> Messages:
    """Messages of a user and an assistant in turn, the user's last."""
    roles = ["user", "assistant"] * len(seeds)
    return [said(role, passage(seed, 9)) for role, seed in zip(roles, seeds, strict=False)]


def resumed(answer: Answer) -> int:
    return sum(answer.reuse.resumed_tokens.values())


def same_answers(one: Answer, other: Answer) -> bool:
    logits = [each.choices[0].first_logprobs for each in (one, other)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    return one.choices[0].token_ids == other.choices[0].token_ids


def test_a_turn_reads_the_states_of_the_turns_before(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    first = turn(rag, conversation(1))
    second = turn(rag, conversation(1, 2, 3))
    third = turn(rag, conversation(1, 2, 3, 4, 5))
    assert resumed(first) == 0
    assert resumed(second) >= first.reuse.prompt_tokens - 2 * BLOCK
    assert resumed(third) >= second.reuse.prompt_tokens - 2 * BLOCK
    assert set(third.reuse.resumed_tokens) == {"host"}
    assert third.reuse.cached_tokens == resumed(third)
    with opened(tmp_path / "other", model, conversation_storage="none") as other:
        computed = turn(other, conversation(1, 2, 3, 4, 5))
    assert resumed(computed) == 0
    assert same_answers(third, computed)


def test_the_states_of_an_answer_are_read(rag: RagCache) -> None:
    question = rag.internals.shared.model.encode(passage(1, 9))
    first = rag.chat(question, generation=FREE.replace(max_tokens=200))
    rag.internals.shared.keeping.submit(lambda: None).result()
    longer = [*question, *first.choices[0].token_ids, 17]
    second = rag.chat(longer, generation=FREE)
    assert resumed(second) == (len(longer) - 2) // BLOCK * BLOCK


def test_a_regenerated_answer_starts_from_the_prompt(rag: RagCache) -> None:
    first = turn(rag, conversation(1, 2, 3))
    again = turn(rag, conversation(1, 2, 3))
    assert resumed(again) >= first.reuse.prompt_tokens - BLOCK
    assert same_answers(first, again)


def test_a_conversation_over_documents_reads_both(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    def with_document(folder: RagCache, *seeds: int) -> Answer:
        folder.ingest("texts", [SourceDocument("one", passage(50, 5))])
        first = conversation(*seeds)
        first[0]["content"] += "\n\n" + passage(50, 5) + "\n\nWhat does it say?"
        return turn(folder, first)

    with_document(rag, 1)
    second = with_document(rag, 1, 2, 3)
    assert second.mode == "recognized:rooted"
    assert resumed(second) > 2 * BLOCK
    assert second.reuse.cached_tokens > resumed(second)
    with opened(tmp_path / "other", model, conversation_storage="none") as other:
        assert same_answers(second, with_document(other, 1, 2, 3))


def test_other_documents_before_a_message_give_other_states(rag: RagCache) -> None:
    rag.ingest("texts", [SourceDocument(str(seed), passage(seed, 5)) for seed in (50, 51)])
    for seed in (50, 51):
        messages = [said("user", passage(seed, 5) + "\n\n" + passage(1, 5))]
        assert resumed(turn(rag, messages)) == 0


def test_nothing_is_kept_of_a_chat_that_stores_nothing(rag: RagCache) -> None:
    turn(rag, conversation(1), store=False)
    assert resumed(turn(rag, conversation(1, 2, 3), share=False)) == 0
    assert resumed(turn(rag, conversation(1, 2, 3))) == 0


def test_short_chats_are_not_kept(rag: RagCache) -> None:
    short = [said("user", "How many days are there in a week?")]
    turn(rag, short, max_tokens=8)
    assert rag.modules.conversations.sizes() == {}


def test_a_canceled_answer_is_not_kept(rag: RagCache) -> None:
    stream = rag.stream_chat(conversation(1), generation=FREE.replace(max_tokens=400))
    next(iter(stream))
    stream.close()
    assert resumed(turn(rag, conversation(1, 2, 3), store=False)) == 0
    assert rag.modules.conversations.sizes() == {}


def test_nothing_of_another_namespace_changes_the_work(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a turn must not tell which conversations another namespace has had."""
    done = counted_work(monkeypatch)
    work: list[list[Any]] = []
    for other in (0, 50):  # the conversation of the other namespace is the same, or another one
        with opened(tmp_path / str(other), model) as rag:
            for seeds in ((1,), (1, 2, 3)):
                turn(rag.within("red"), conversation(*(seed + other for seed in seeds)))
            own = []
            for seeds in ((1,), (1, 2, 3), (1, 2, 3)):
                done.clear()
                answer = turn(rag.within("blue"), conversation(*seeds))
                own.append((answer.reuse, answer.choices[0].token_ids, dict(done)))
            work.append(own)
    assert work[0] == work[1]
    assert [sum(reuse.resumed_tokens.values()) > 0 for reuse, *_ in work[0]] == [False, True, True]


def test_conversations_survive_a_restart_on_disk(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model, conversation_storage="disk") as first:
        turn(first, conversation(1))
    with opened(tmp_path / "state", model, conversation_storage="disk") as second:
        answer = turn(second, conversation(1, 2, 3))
    assert resumed(answer) > 2 * BLOCK
    assert set(answer.reuse.resumed_tokens) == {"disk"}


def test_another_process_over_the_disk_resumes_a_conversation(
    tmp_path: Path, model: LoadedModel
) -> None:
    """It opened the folder before the conversation began, and knows of no state of it."""
    folder = tmp_path / "state"
    with (
        opened(folder, model, conversation_storage="disk") as one,
        opened(folder, model, conversation_storage="disk") as other,
    ):
        turn(one, conversation(1))
        first = turn(other, conversation(1, 2, 3), store=False)
        turn(one, conversation(1, 2, 3))
        second = turn(other, conversation(1, 2, 3, 4, 5), store=False)
    assert set(first.reuse.resumed_tokens) == {"disk"}
    assert resumed(second) > resumed(first) > 2 * BLOCK


def test_memory_keeps_nothing_of_a_conversation_on_disk(rag: RagCache) -> None:
    for _ in range(3):
        turn(rag, conversation(1, 2, 3))
        rag.internals.shared.store.sweep()
    assert set(rag.modules.conversations.sizes()) == {"host"}
    kept = set(rag.internals.shared.store.disk.scan())
    assert kept.isdisjoint(rag.internals.shared.store.memory.top.entries)


def test_a_deleted_conversation_is_gone_from_every_tier(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model, conversation_storage="disk") as rag:
        turn(rag, conversation(1), prompt_cache_key="mine")
        turn(rag, conversation(7), prompt_cache_key="other")
        kept = rag.modules.conversations
        foreseen = kept.delete("mine", dry_run=True)
        assert (foreseen.conversations, foreseen.keys) == (1, ())
        assert foreseen.freed["disk"] > 0
        assert resumed(turn(rag, conversation(1, 2, 3), store=False)) > 0
        assert kept.delete("mine").freed == foreseen.freed
        assert resumed(turn(rag, conversation(1, 2, 3), store=False)) == 0
        assert resumed(turn(rag, conversation(7, 2, 3), store=False)) > 0
        kept.delete()
        assert kept.sizes() == {}


def paused(rag: RagCache, budget: int | None, **options: Any) -> int:
    """Return the resumed tokens of an agent that comes back after other conversations."""
    messages, keeper = conversation(1), Keeper("agent", budget)
    for _ in range(2):
        rag.chat(messages, keeper=keeper, generation=FREE.replace(**options))
        rag.internals.shared.keeping.submit(lambda: None).result()
    for seed in range(20, 27):
        turn(rag, conversation(seed))
        turn(rag, conversation(seed))
    return resumed(turn(rag, conversation(1, 2, 3)))


@pytest.mark.slow
def test_a_retained_conversation_outlives_others(tmp_path: Path, model: LoadedModel) -> None:
    """Without the wish, and beyond the budget, the conversations after it push it out."""
    found = {}
    for name, budget, wish in (
        ("wished", 1 << 20, "1h"),
        ("over the budget", 1000, "1h"),
        ("no wish", 1 << 20, "in_memory"),
    ):
        sizes = {"host_bytes": "1MiB", "conversation_bytes": "512KiB", "private_bytes": "1MiB"}
        with opened(tmp_path / name, model, **sizes) as rag:
            found[name] = paused(rag, budget, prompt_cache_retention=wish)
    assert found["wished"] > 2 * BLOCK
    assert found["over the budget"] == found["no wish"] == 0


def test_retained_conversations_stay_within_their_share(rag: RagCache) -> None:
    kept = rag.modules.conversations.retentions
    memory = rag.internals.shared.store.memory
    share = memory.conversation_share(memory.indexes[-1])
    one, other = KVKey("one"), KVKey("other")
    assert kept.add({one: share // 2}, 60.0, Keeper())
    assert not kept.add({other: share}, 60.0, Keeper())
    assert kept.add({one: share // 2}, 600.0, Keeper("another", 1000)), "nothing is added"
    assert set(memory.retained) == {one}
    kept.store.sweep()
    assert set(memory.retained) == {one}
    memory.forget_expirations(time.time() + 601.0)
    assert not memory.retained


def test_a_wish_lengthens_the_life_of_a_conversation(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "state", model, conversation_seconds=60.0) as rag:
        turn(rag, conversation(1), prompt_cache_retention=600)
        turn(rag, conversation(7))
        later = time.time() + 120.0
        monkeypatch.setattr("ragcache.db.references.time.time", lambda: later)
        rag.internals.shared.store.sweep()
        assert resumed(turn(rag, conversation(1, 2, 3), store=False)) > 0
        assert resumed(turn(rag, conversation(7, 2, 3), store=False)) == 0


@pytest.mark.parametrize("given", ["5 minutes", 0, -1, 10**9, "nan"])
def test_times_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt_cache_retention"):
        GenerationParams(prompt_cache_retention=given)
    assert GenerationParams(prompt_cache_retention="24h").retention_seconds == 86_400
    assert GenerationParams(prompt_cache_retention="in_memory").retention_seconds is None


def test_a_deletion_reaches_other_processes(tmp_path: Path, model: LoadedModel) -> None:
    folder = tmp_path / "state"
    with (
        opened(folder, model, conversation_storage="disk") as one,
        opened(folder, model, conversation_storage="disk") as other,
    ):
        turn(one, conversation(1))
        assert resumed(turn(other, conversation(1, 2, 3), store=False)) > 0
        assert one.modules.conversations.delete().conversations == 1
        other.internals.shared.store.sweep()
        assert resumed(turn(other, conversation(1, 2, 3), store=False)) == 0
        assert other.modules.conversations.sizes() == {}


def test_states_that_are_slow_to_read_are_computed() -> None:
    """A slow run is read if faster ones behind it are worth it."""
    runs = [PrefixRun(KVKey(str(n)), 64 * n, 64 * (n + 1)) for n in range(5)]

    def worth(*seconds: float, rate: float = 64.0) -> int:
        read = worth_reading(runs, lambda key: seconds[int(key)], rate)
        assert read == runs[: len(read)]
        return len(read)

    assert worth(0, 0, 0, 0, 0) == 5
    assert worth(2, 2, 2, 2, 2) == 0
    assert worth(0, 0, 2, 2, 2) == 2
    assert worth(2, 0, 0, 0, 9) == 4
    assert worth(2, 2, 2, 2, 2, rate=0.0) == 5, "nothing is known of the engine yet"


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model, conversation_storage="disk") as rag:
        turn(rag, conversation(1))
    with opened(tmp_path / "state", model, conversation_storage="disk") as rag:
        counters = rag.internals.shared.store.counters
        turn(rag, conversation(7), store=False)
        counters.read_bytes["disk"], counters.read_seconds["disk"] = 1, 60.0
        assert resumed(turn(rag, conversation(1, 2, 3), store=False)) == 0
        counters.read_seconds["disk"] = 1e-9
        assert resumed(turn(rag, conversation(1, 2, 3), store=False)) > 2 * BLOCK


@pytest.mark.slow
def test_branches_evictions_and_deletions_change_no_answer(
    tmp_path: Path, model: LoadedModel
) -> None:
    """Random turns of branching conversations, beside a folder that keeps nothing of them."""
    rng, resumptions = random.Random(7), 0
    kept = opened(
        tmp_path / "kept", model, conversation_storage="disk", private_bytes="1MiB",
        host_bytes="2MiB", disk_bytes="8MiB", conversation_bytes="1MiB",
    )  # fmt: skip
    with kept, opened(tmp_path / "computed", model, conversation_storage="none") as computed:
        for rag in (kept, computed):
            rag.ingest("texts", [SourceDocument(str(seed), passage(seed, 5)) for seed in (50, 51)])
        branches = [conversation(1)]
        for _ in range(scaled(80)):
            messages = list(rng.choice(branches))
            if rng.random() < 0.7:  # goes on; otherwise the last message is asked again
                text = passage(rng.choice((50, 51)), 5) if rng.random() < 0.3 else ""
                messages += [
                    said("assistant", passage(rng.randrange(5), 5)),
                    said("user", text + passage(rng.randrange(5), rng.randrange(1, 9))),
                ]
            options = {"n": rng.choice((1, 1, 3)), "max_tokens": rng.choice((1, 70))}
            name = rng.choice((None, "one", "two"))
            answer = turn(kept, messages, prompt_cache_key=name, **options)
            assert same_answers(answer, turn(computed, messages, **options))
            resumptions += resumed(answer) > 0
            if answer.reuse.prompt_tokens < 2500:
                branches.append(messages)
            match rng.randrange(8):
                case 0:
                    kept.modules.conversations.delete(rng.choice((None, "one")))
                case 1:
                    kept.internals.shared.store.evict(
                        list(kept.internals.shared.store.memory.top.entries)
                    )
                case 2:
                    kept.modules.evict("texts", tier=rng.choice((None, "host", "disk")))
        for index in kept.internals.shared.store.memory.every:
            assert index.tier.used_bytes <= (index.tier.budget_bytes or 0)
        assert verify(kept.internals.shared.store).found == ()
    assert resumptions > scaled(80) / 3


def run_turns(folder: Path, model: LoadedModel, kill: int, tell: Callable[[str], None]) -> None:
    """Go on with conversations until killed. Tells each turn that has been answered."""
    with opened(folder, model, conversation_storage="disk") as rag:
        for number in range(1000):
            seeds = [100 * kill + number // 3 * 10 + each for each in range(2 * (number % 3) + 1)]
            answer = rag.chat(conversation(*seeds), generation=FREE.replace(max_tokens=2))
            tell(f"{seeds[0]} {resumed(answer)}")


@pytest.mark.slow
def test_conversations_of_killed_processes_are_whole_or_gone(
    tmp_path: Path, model: LoadedModel
) -> None:
    """Fifty kills under the profile `full`."""
    rng, state, told = random.Random(44), tmp_path / "state", 0
    with opened(tmp_path / "computed", model, conversation_storage="none") as computed:
        expected = turn(computed, conversation(1, 2, 3))
    for kill in range(1, scaled(50) + 1):
        work = partial(run_turns, state, model, kill)
        lines = run_and_kill(work, rng.uniform(0.0, 0.5), rng.choice((1, 2, 4)))
        assert not [line for line in lines if line.startswith("failed")], lines
        told += len(lines)
        with opened(state, model, conversation_storage="disk") as rag:
            store = rag.internals.shared.store
            assert verify(store).found == ()
            assert set(store.disk.keys()) == store.ledger.keys("disk")
            seed = int(lines[-1].split()[0])
            turn(rag, conversation(seed, seed + 1, seed + 2), store=False)
            if kill == 1:
                turn(rag, conversation(1))
            assert same_answers(turn(rag, conversation(1, 2, 3)), expected)
    assert told > 0
