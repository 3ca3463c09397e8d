"""Conversations that outlive the engine's pool: chats and agents, with and without kept states."""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ragcache.bench.harness import Progress
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.params.open import ConversationStorage
from ragcache.pipeline.answer import Answer
from ragcache.rag import RagCache


@dataclass(frozen=True, slots=True)
class SessionKind:
    """Conversations of one kind. Ranges are the least and the most, drawn evenly."""

    sessions: int
    turns: int
    first_tokens: int
    """Tokens before the first message: instructions and tools."""
    new_tokens: tuple[int, int]
    """Tokens that each turn adds: a message, or the result of a tool."""
    answer_tokens: int
    pause: tuple[float, float]
    """Seconds from an answer to the next turn. They decide on the order of turns alone."""

    @property
    def tokens(self) -> float:
        """Mean tokens of a session at its end."""
        return self.first_tokens + self.turns * (sum(self.new_tokens) / 2 + self.answer_tokens)


CHATS = SessionKind(12, 5, 64, (50, 250), 8, (5.0, 120.0))
AGENTS = SessionKind(8, 6, 768, (64, 384), 4, (1.0, 60.0))


_SIDES: tuple[ConversationStorage, ...] = ("none", "memory")


@dataclass(frozen=True, slots=True)
class ConversationsSetting:
    """The conversations, and the pool that holds a part of them."""

    chats: SessionKind = CHATS
    agents: SessionKind = AGENTS
    pool_share: float = 0.1
    """Share of all sessions' tokens that the engine's pool holds."""
    long_tokens: int = 4096
    """Tokens of the conversation whose resumption is timed."""
    runs: int = 5
    """Runs of each timing."""
    seed: int = 7


@dataclass(slots=True)
class _Session:
    tokens: list[int]
    turns: int = 0


@dataclass(slots=True)
class _Play:
    """The turns of one side."""

    history: int = 0
    """Tokens of earlier turns, over all turns but the first."""
    computed: int = 0
    """Number of these tokens that were computed again."""
    seconds: float = 0.0
    answers: list[tuple[int, ...]] = field(default_factory=list)


def bench_conversations(
    setting: ConversationsSetting, model: LoadedModel, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Play the same conversations with kept states and without, and time their resumption.

    Conversations are token ids, so that each turn begins with the tokens of the turn before it.

    Returns:
        `recomputed_share_chats`, `recomputed_share_agents`: share of the earlier turns' tokens that
        are computed again, and the same without kept states as `pool_share_…`.
        `agents_rate_ratio`: ratio of the times of all turns of the agents.
        `resume_host_ms_over_pool`: milliseconds by which the first token after `long_tokens` comes
        later from the host tier than from the pool. `resume_disk_speedup`: ratio of its time,
        computed, to its time from disk after a restart. `decode_step_ratio`: ratio of a stream's
        time beside conversations that are kept to its time beside ones that are not.
        `restart_resumed_share`: share of conversations that start from their states after a
        restart. `equal_answers_share`: share of equal answers of both sides.
    """
    results: dict[str, Any] = {}
    for name, kind in (("chats", setting.chats), ("agents", setting.agents)):
        plays = {}
        for storage in _SIDES:
            progress(f"{name}, storage {storage}")
            with _opened(model, storage, _pool_bytes(setting, kind, model)) as rag:
                plays[storage] = _play(rag, kind, setting.seed)
        kept, lost = plays["memory"], plays["none"]
        results[f"recomputed_share_{name}"] = kept.computed / kept.history
        results[f"pool_share_{name}"] = lost.computed / lost.history
        results[f"{name}_rate_ratio"] = lost.seconds / kept.seconds
        equal = [one == other for one, other in zip(kept.answers, lost.answers, strict=True)]
        results[f"equal_answers_share_{name}"] = statistics.mean(equal)
    progress("resuming a long conversation")
    results |= _resumption(setting, model)
    progress("restarting")
    results |= _restart(setting, model)
    progress("a stream beside kept conversations")
    results["decode_step_ratio"] = _decode_ratio(setting, model)
    context = {"model": model.name, "setting": asdict(setting), "machine": describe_machine()}
    return results | context


@contextmanager
def _opened(
    model: LoadedModel,
    storage: ConversationStorage,
    pool_bytes: int | None = None,
    folder: Path | None = None,
) -> Iterator[RagCache]:
    with (
        TemporaryDirectory() as made,
        RagCache.open(
            folder or Path(made),
            model,
            embedding="none",
            force_modes=True,
            recognize_recurring=False,
            conversation_storage=storage,
            conversation_bytes="2GiB",
            private_bytes=pool_bytes,
        ) as rag,
    ):
        yield rag


def _pool_bytes(setting: ConversationsSetting, kind: SessionKind, model: LoadedModel) -> int:
    """Return the size of a pool for a share of the sessions, and for the longest of them."""
    most = kind.first_tokens + kind.turns * (kind.new_tokens[1] + kind.answer_tokens) + 64
    tokens = max(2 * most, setting.pool_share * kind.sessions * kind.tokens)
    return int(tokens * model.causal.computed_bytes_per_token)


def _play(rag: RagCache, kind: SessionKind, seed: int) -> _Play:
    """Answer all turns, in the order in which their pauses end."""
    rng, play = random.Random(seed), _Play()
    vocabulary = rag.internals.shared.model.causal.vocabulary

    def draw(count: int) -> list[int]:
        return [rng.randrange(100, vocabulary - 100) for _ in range(count)]

    first = draw(kind.first_tokens)
    due = [(rng.uniform(*kind.pause), n, _Session([*first])) for n in range(kind.sessions)]
    heapq.heapify(due)
    while due:
        now, number, session = heapq.heappop(due)
        history = len(session.tokens) if session.turns else 0
        session.tokens += draw(rng.randint(*kind.new_tokens))
        begun = time.perf_counter()
        answer = _answer(rag, session.tokens, kind.answer_tokens)
        play.seconds += time.perf_counter() - begun
        read = answer.reuse.prompt_tokens - answer.reuse.computed_tokens
        play.history += history
        play.computed += max(0, history - read)
        play.answers.append(answer.choices[0].token_ids)
        session.tokens += answer.choices[0].token_ids
        session.turns += 1
        if session.turns < kind.turns:
            heapq.heappush(due, (now + rng.uniform(*kind.pause), number, session))
    return play


def _answer(rag: RagCache, tokens: Sequence[int], count: int, *, store: bool = True) -> Answer:
    generation = GenerationParams(
        max_tokens=count, ignore_eos=True, extractive=False, confidence=False, store=store
    )
    return rag.chat([*tokens], generation=generation)


def _wait(rag: RagCache) -> None:
    """Wait until all conversations are stored."""
    rag.internals.shared.keeping.submit(lambda: None).result()


def _long(setting: ConversationsSetting, model: LoadedModel) -> list[int]:
    rng = random.Random(setting.seed)
    window = model.causal.window - 64
    return [
        rng.randrange(100, model.causal.vocabulary - 100)
        for _ in range(min(setting.long_tokens, window))
    ]


def _resumption(setting: ConversationsSetting, model: LoadedModel) -> dict[str, float]:
    """Time the first token behind a long conversation: from the pool, and from the host tier."""
    tokens, times = _long(setting, model), dict[str, list[float]]()
    for _ in range(setting.runs):
        for storage in _SIDES:
            with _opened(model, storage) as rag:
                computed = _answer(rag, tokens, 1)
                _wait(rag)
                resumed = _answer(rag, [*tokens, 101, 102], 1)
            times.setdefault(storage, []).append(resumed.timings.first_token)
            times.setdefault("computed", []).append(computed.timings.first_token)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "resume_host_ms_over_pool": 1000 * (medians["memory"] - medians["none"]),
        "resume_host_speedup": medians["computed"] / medians["memory"],
    }


def _restart(setting: ConversationsSetting, model: LoadedModel) -> dict[str, float]:
    """Time the first token of a long conversation after a restart, and count resumed ones."""
    tokens, ratios, resumed = _long(setting, model), list[float](), list[bool]()
    with TemporaryDirectory() as made:
        for number in range(setting.runs):
            long = [103 + number, *tokens]
            with _opened(model, "disk", folder=Path(made)) as rag:
                computed = _answer(rag, long, 1)
            with _opened(model, "disk", folder=Path(made)) as rag:
                again = _answer(rag, [*long, 101, 102], 1)
            ratios.append(computed.timings.first_token / again.timings.first_token)
            resumed.append(again.reuse.resumed_tokens.get("disk", 0) > len(tokens) - 2 * 64)
    return {
        "resume_disk_speedup": statistics.median(ratios),
        "restart_resumed_share": statistics.mean(resumed),
    }


def _decode_ratio(setting: ConversationsSetting, model: LoadedModel) -> float:
    """Return the ratio of a stream's time beside kept and beside other short conversations."""
    rng, ratios = random.Random(setting.seed), list[float]()
    with _opened(model, "memory") as rag:
        for number in range(2 * setting.runs):
            seconds = {}
            for store in sorted((True, False), reverse=number % 2 == 1):
                prompt = [rng.randrange(100, model.causal.vocabulary - 100) for _ in range(512)]
                stream = rag.stream_chat(
                    [*prompt[:16]],
                    generation=GenerationParams(
                        max_tokens=64, ignore_eos=True, extractive=False, store=False
                    ),
                )
                begun = time.perf_counter()
                _answer(rag, prompt, 8, store=store)
                list(stream)
                seconds[store] = time.perf_counter() - begun
            ratios.append(seconds[True] / seconds[False])
    return statistics.median(ratios)
