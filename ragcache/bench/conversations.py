"""Conversations that outlive the engine's pool: chats and agents, with and without kept states."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ragcache.bench.conversation_turns import (
    AGENTS,
    CHATS,
    FEW_AGENTS,
    FEW_CHATS,
    Session,
    SessionKind,
    Trace,
)
from ragcache.bench.harness import Progress
from ragcache.documents import SourceDocument
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.params.open import ConversationStorage
from ragcache.pipeline.answer import Answer
from ragcache.rag import RagCache
from ragcache.store.admin import move

_SIDES: tuple[ConversationStorage, ...] = ("none", "memory")


@dataclass(frozen=True, slots=True)
class ConversationsSetting:
    """The conversations, and the memory for their states."""

    chats: SessionKind = CHATS
    agents: SessionKind = AGENTS
    pool_share: float = 0.1
    """Share of all sessions' tokens that the engine's pool holds."""
    concurrent: int = 8
    """Sessions that are answered at once."""
    long_tokens: int = 8192
    """Tokens of the conversation whose resumption is timed."""
    next_tokens: int = 256
    """Tokens of the turn that resumes it."""
    runs: int = 5
    """Runs of each timing."""
    host_bytes: int | str = "2GiB"
    """Budget of the host tier, all of which conversations may take."""
    device_bytes: int | str | None = None
    """Budget of the device tier. Defaults to the memory that the engine leaves free."""
    parts: tuple[str, ...] = ("chats", "agents", "resume", "restart", "decode")
    """Parts that are measured."""
    seed: int = 7

    @classmethod
    def reduced(cls, **given: Any) -> ConversationsSetting:
        """Return a setting of some minutes on a CPU."""
        few: dict[str, Any] = {"chats": FEW_CHATS, "agents": FEW_AGENTS, "long_tokens": 4096}
        return cls(**few | given)


@dataclass(slots=True)
class _Play:
    """The turns of one side."""

    history: int = 0
    """Tokens of earlier turns, over all turns but the first."""
    computed: int = 0
    """Number of these tokens that were computed again."""
    seconds: float = 0.0
    turns: int = 0
    by_turn: dict[int, list[int]] = field(default_factory=dict)
    """For each turn of a session, `history` and `computed`."""
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def count(self, session: Session, answer: Answer) -> None:
        """Count the answer to a session's last message, and add it to the session."""
        reuse, tokens = answer.reuse, answer.choices[0].token_ids
        again = max(0, session.history - (reuse.prompt_tokens - reuse.computed_tokens))
        for sums in (self.by_turn.setdefault(session.turns, [0, 0]),):
            sums[0] += session.history
            sums[1] += again
        self.history += session.history
        self.computed += again
        self.turns += 1
        self.answers.append(tokens)
        session.tokens += tokens
        session.history = reuse.prompt_tokens + len(tokens)
        session.turns += 1

    def figures(self) -> dict[str, Any]:
        """Return the share of history that was computed again, by turn, and turns a second."""
        shares = [computed / max(history, 1) for history, computed in self.by_turn.values()]
        return {"computed_share_by_turn": shares, "turns_per_second": self.turns / self.seconds}


@dataclass(frozen=True, slots=True)
class _Bench:
    """The parts of the benchmark over one model."""

    setting: ConversationsSetting
    model: LoadedModel
    words: tuple[int, ...]
    """Tokens whose texts are words. A text of them has the same tokens again."""
    progress: Progress

    def play_kind(self, name: str, kind: SessionKind) -> dict[str, Any]:
        """Play the same sessions with kept states and without."""
        plays = {}
        for storage in _SIDES:
            self.progress(f"{name}, storage {storage}")
            with self.opened(storage, pool_bytes=self._pool_bytes(kind)) as rag:
                plays[storage] = self._play(rag, kind)
        lost, kept = plays["none"], plays["memory"]
        pairs = zip(kept.answers, lost.answers, strict=True)
        equal = [one == other for one, other in pairs]
        return {
            f"recomputed_share_{name}": kept.computed / kept.history,
            f"pool_share_{name}": lost.computed / lost.history,
            f"{name}_rate_ratio": lost.seconds / kept.seconds,
            f"equal_answers_share_{name}": statistics.mean(equal),
            f"{name}_by_storage": {side: play.figures() for side, play in plays.items()},
        }

    def chats(self) -> dict[str, Any]:
        return self.play_kind("chats", self.setting.chats.within(self._window))

    def agents(self) -> dict[str, Any]:
        return self.play_kind("agents", self.setting.agents.within(self._window))

    def resume(self) -> dict[str, Any]:
        """Time the first token behind a long conversation: from the pool, and from each tier."""
        tokens, new = self._long(), self._draw(self.setting.next_tokens)
        seconds: dict[str, list[float]] = {}
        ways: Sequence[tuple[ConversationStorage, bool]]
        ways = (("none", False), ("memory", False), ("memory", True))
        for storage, moves in ways:
            with self.opened(storage, pool_bytes=self._long_pool_bytes) as rag:
                if moves and rag.internals.shared.store.memory.top.name == "host":
                    continue
                for number in range(self.setting.runs + 1):
                    long = [self.words[number], *tokens]
                    computed = _answer(rag, long, 1)
                    _wait(rag)
                    if moves:
                        _move_to_host(rag)
                    resumed = _answer(rag, [*long, *new], 1)
                    if number:  # the first run warms up
                        tier = next(iter(resumed.reuse.resumed_tokens), "pool")
                        for name, answer in (("computed", computed), (tier, resumed)):
                            seconds.setdefault(name, []).append(answer.timings.first_token)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        return {
            "resume_host_ms_over_pool": 1000 * (medians["host"] - medians["pool"]),
            "resume_host_speedup": medians["computed"] / medians["host"],
            "resume_seconds": medians,
        }

    def restart(self) -> dict[str, Any]:
        """Time a long conversation's first token after a restart, and count resumed ones."""
        tokens, ratios, resumed = self._long(), list[float](), list[bool]()
        with TemporaryDirectory() as made:
            for number in range(self.setting.runs):
                long = [self.words[number], *tokens]
                with self.opened("disk", folder=Path(made)) as rag:
                    computed = _answer(rag, long, 1)
                with self.opened("disk", folder=Path(made)) as rag:
                    again = _answer(rag, [*long, *self.words[-2:]], 1)
                ratios.append(computed.timings.first_token / again.timings.first_token)
                resumed.append(again.reuse.resumed_tokens.get("disk", 0) > len(tokens) - 2 * 64)
        return {
            "resume_disk_speedup": statistics.median(ratios),
            "restart_resumed_share": statistics.mean(resumed),
        }

    def decode(self) -> dict[str, Any]:
        """Time a stream alone, beside chats that are kept, and beside chats that are not.

        The ratio is the stream's time alone with what keeping adds, over its time alone.
        """
        ratios, shares = list[float](), list[float]()
        with self.opened("memory", pool_bytes=self._long_pool_bytes) as rag:
            for number in range(2 * self.setting.runs + 1):
                seconds = {"alone": self._stream(rag, None)}
                for store in sorted((True, False), reverse=number % 2 == 1):
                    seconds[str(store)] = self._stream(rag, store)
                if number:  # the first run warms up
                    added = seconds["True"] - seconds["False"]
                    ratios.append(1 + added / seconds["alone"])
                    shares.append(seconds["True"] / seconds["False"])
        return {
            "decode_step_ratio": statistics.median(ratios),
            "decode_stream_ratio": statistics.median(shares),
        }

    def _stream(self, rag: RagCache, store: bool | None) -> float:
        """Return the seconds of a stream. `store`: whether the chats beside it are kept."""
        generation = _generation(256, store=False)
        chats = [] if store is None else [self._draw(512) for _ in range(4)]
        stream = rag.stream_chat(self._draw(16), generation=generation)
        begun = time.perf_counter()
        for chat in chats:
            _answer(rag, chat, 8, store=bool(store))
        list(stream)
        seconds = time.perf_counter() - begun
        _wait(rag)
        return seconds

    @contextmanager
    def opened(
        self,
        storage: ConversationStorage,
        *,
        pool_bytes: int | None = None,
        folder: Path | None = None,
    ) -> Iterator[RagCache]:
        """Open a folder, in which all memory may have conversations."""
        setting = self.setting
        with (
            TemporaryDirectory() as made,
            RagCache.open(
                folder or Path(made),
                self.model,
                embedding="none",
                force_modes=True,
                recognize_recurring=False,
                conversation_storage=storage,
                conversation_bytes=setting.host_bytes,
                host_bytes=setting.host_bytes,
                device_bytes=setting.device_bytes,
                device=str(self.model.causal.device),
                private_bytes=pool_bytes,
            ) as rag,
        ):
            yield rag

    @property
    def _window(self) -> int:
        return self.model.causal.window - 64

    @property
    def _long_pool_bytes(self) -> int:
        """Bytes of a pool that retains the long conversation in a half."""
        tokens = 2 * (self.setting.long_tokens + self.setting.next_tokens) + 4096
        return tokens * self.model.causal.computed_bytes_per_token

    def _pool_bytes(self, kind: SessionKind) -> int:
        """Return the size of a pool for a share of the sessions, and for the longest of them."""
        share = self.setting.pool_share * kind.sessions * kind.tokens
        tokens = max(kind.most_tokens + 64, share)
        return int(tokens * self.model.causal.computed_bytes_per_token)

    def _play(self, rag: RagCache, kind: SessionKind) -> _Play:
        """Answer all turns, in the order in which their pauses end."""
        trace, play = Trace(kind, self.words, self.setting.seed), _Play()
        decode = self.model.tokenizer.decode
        texts = [
            decode(trace.document(number)).strip()
            for number in range(2 * kind.documents * kind.collections)
        ]
        if texts:
            named = enumerate(texts)
            rag.ingest("documents", [SourceDocument(str(name), text) for name, text in named])

        def prompt(session: Session) -> Sequence[int] | str:
            if not session.documents:
                return session.tokens
            read = "\n\n".join(texts[number] for number in session.documents)
            return f"{read}\n\n{decode(session.tokens)}"

        total = kind.sessions * kind.turns
        for wave in trace.waves(self.setting.concurrent):
            prompts = [prompt(session) for session in wave]
            begun = time.perf_counter()
            answers = rag.chat_batch(prompts, generation=_generation(kind.answer_tokens))
            play.seconds += time.perf_counter() - begun
            for session, answer in zip(wave, answers, strict=True):
                play.count(session, answer)
            if play.turns * 20 // total > (play.turns - len(wave)) * 20 // total:
                share = play.computed / max(play.history, 1)
                done = f"{play.turns} of {total} turns in {play.seconds:.0f} s"
                self.progress(f"{done}, {100 * share:.1f}% computed again")
        return play

    def _draw(self, count: int) -> list[int]:
        return random.choices(self.words, k=count)

    def _long(self) -> list[int]:
        rng, setting = random.Random(self.setting.seed), self.setting
        most = min(setting.long_tokens, self._window - setting.next_tokens - 2)
        return rng.choices(self.words, k=most)


def bench_conversations(
    setting: ConversationsSetting, model: LoadedModel, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Play the same conversations with kept states and without, and time their resumption.

    Returns:
        `recomputed_share_chats`, `recomputed_share_agents`: share of the earlier turns' tokens that
        are computed again, and the same without kept states as `pool_share_…`.
        `agents_rate_ratio`: ratio of the times of all turns of the agents.
        `resume_host_ms_over_pool`: milliseconds by which the first token after `long_tokens` comes
        later from the host tier than from the pool. `resume_disk_speedup`: ratio of its time,
        computed, to its time from disk after a restart. `decode_step_ratio`: time of a stream's
        steps while other chats are kept, over its time without, as `_Bench.decode` says.
        `restart_resumed_share`: share of conversations that start from their states after a
        restart. `equal_answers_share_…`: share of equal answers of both sides.
    """
    bench = _Bench(setting, model, words_of(model.decode, model.causal.vocabulary), progress)
    parts: Mapping[str, Callable[[], dict[str, Any]]] = {
        "chats": bench.chats,
        "agents": bench.agents,
        "resume": bench.resume,
        "restart": bench.restart,
        "decode": bench.decode,
    }
    results: dict[str, Any] = {}
    for name in setting.parts:
        progress(name)
        results |= parts[name]()
    return results | {
        "model": model.name,
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def words_of(decode: Callable[[list[int]], str], vocabulary: int) -> tuple[int, ...]:
    """Return tokens whose texts are a blank and a lower-case word.

    Args:
        decode: Returns the text of tokens.
        vocabulary: Number of tokens of the model.
    """
    texts = ((token, decode([token])) for token in range(min(vocabulary, 32_000)))
    words = ((token, text[1:]) for token, text in texts if text[:1] == " ")
    found = (token for token, word in words if word.isascii() and word.isalpha() and word.islower())
    return tuple(islice(found, 8192))


def _generation(count: int, *, store: bool = True) -> GenerationParams:
    return GenerationParams(
        max_tokens=count, ignore_eos=True, extractive=False, confidence=False, store=store
    )


def _answer(rag: RagCache, tokens: Sequence[int], count: int, *, store: bool = True) -> Answer:
    return rag.chat([*tokens], generation=_generation(count, store=store))


def _wait(rag: RagCache) -> None:
    """Wait until all conversations are stored."""
    rag.internals.shared.keeping.submit(lambda: None).result()


def _move_to_host(rag: RagCache) -> None:
    """Move all conversations from the device to the host tier."""
    store = rag.internals.shared.store
    move(store, list(store.memory.top.entries.conversations), "host")
