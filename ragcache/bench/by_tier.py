"""Time to first token with the modules in each tier, beside computing them."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ragcache.bench.shapes import LlamaShape
from ragcache.engine import EncodeJob, Request, Segment, assemble, complete, encode
from ragcache.models import LanguageModel, wrap_causal
from ragcache.planning import (
    break_even_bandwidth,
    break_even_tokens,
    drop_pages,
    median_seconds,
)
from ragcache.states import KVKey, KVStates
from ragcache.store import (
    Database,
    DeviceTier,
    DiskTier,
    HostTier,
    KVStore,
    Ledger,
    RemoteTier,
    Tier,
)

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ByTierSetting:
    """The prompt, how often it is answered from each tier, and the lengths of the break-even."""

    modules: int = 4
    module_tokens: int = 1024
    preamble_tokens: int = 32
    question_tokens: int = 48
    runs: int = 5
    lengths: tuple[int, ...] = (16, 64, 256, 1024)


def bench_by_tier(
    folder: Path, shape: LlamaShape, setting: ByTierSetting, progress: Progress
) -> dict[str, Any]:
    """ttft_by_tier: median seconds from the request to its first token, states leased from each
    tier, and `computed` with nothing cached, once. by_tier: the part of it that makes states ready,
    and for each length the seconds of computing one module and of making it ready, with the length
    from which on that is quicker and the bandwidth below which it never is.

    `device` is measured where CUDA is; `remote` is `file://` on the same disk, and stands for the
    work of the protocol, not for a network. Files are dropped from the page cache before each run,
    where the system does that.
    """
    progress("building the model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = wrap_causal(shape.build(torch.bfloat16).to(device))
    draw = random.Random(1)
    preamble, question, *modules = (
        [draw.randrange(shape.vocabulary) for _ in range(length)]
        for length in (
            setting.preamble_tokens, setting.question_tokens,
            *[setting.module_tokens] * setting.modules,
        )
    )  # fmt: skip
    progress("encoding the modules")
    [root] = encode(model, [EncodeJob(preamble)])
    prompt = dict(zip(_keys("module", modules), modules, strict=True))
    cuts = {_key("cut", n): modules[0][:n] for n in setting.lengths}
    states = {_key("root", 0): root}
    for key, tokens in (prompt | cuts).items():
        states[key] = _encode(model, root, tokens)
    progress("computing modules of several lengths")
    computing = {
        key: median_seconds(model, partial(_encode, model, root, tokens))
        for key, tokens in cuts.items()
    }
    bench = _Bench(model, _store(folder, model, states), states, setting.runs)
    try:
        progress("first tokens from each tier")
        order = [_key("root", 0), *reversed(prompt)]
        ready, ttft = bench.first_tokens(order, question)
        whole = [*preamble, *(t for key in order[1:] for t in prompt[key]), *question]
        progress("the first token with nothing cached (tens of seconds on a processor)")
        ttft["computed"] = _timed(lambda: _first_token(model, (), whole))[0]
        progress("modules of several lengths from each tier")
        even = bench.break_even(cuts, computing)
    finally:
        bench.close()
    details = {"device": device, "runs": setting.runs, "ready_s": ready, **even}
    return {"ttft_by_tier": ttft, "by_tier": details}


class _Bench:
    """A store that holds the same states in every tier."""

    def __init__(
        self, model: LanguageModel, store: KVStore, states: dict[KVKey, KVStates], runs: int
    ) -> None:
        self.model, self.store, self.states, self.runs = model, store, states, runs
        self.tiers = [shelf.name for shelf in store.holdings.every]

    def first_tokens(
        self, keys: Sequence[KVKey], question: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds to ready states, and to the first token, by tier."""
        ready: dict[str, float] = {}
        total: dict[str, float] = {}
        tokens = set()
        _first_token(self.model, [self.states[key] for key in keys], question)  # kernels are made
        for tier in self.tiers:
            pairs = []
            for _ in range(self.runs):
                self._only_from(tier, keys)
                begin = time.perf_counter()
                with self.store.lease(keys, _nothing) as lease:
                    leased = time.perf_counter() - begin
                    tokens.add(_first_token(self.model, lease.states, question))
                    pairs.append((leased, time.perf_counter() - begin))
                    assert set(lease.source.values()) == {tier}, lease.source
            ready[tier], total[tier] = map(statistics.median, zip(*pairs, strict=True))
        assert len(tokens) == 1, "every tier holds the same states"
        return ready, total

    def break_even(
        self, cuts: dict[KVKey, list[int]], computing: dict[KVKey, float]
    ) -> dict[str, Any]:
        rows = []
        for key, tokens in cuts.items():
            row: dict[str, Any] = {"tokens": len(tokens), "nbytes": self.states[key].nbytes}
            row["computed"] = computing[key]
            for tier in self.tiers:
                row[tier] = statistics.median(self._ready(tier, key) for _ in range(self.runs))
            row["break_even_bandwidth"] = break_even_bandwidth(row["nbytes"], row["computed"])
            rows.append(row)
        lengths = [row["tokens"] for row in rows]
        compute = [row["computed"] for row in rows]
        even = {
            tier: break_even_tokens(lengths, compute, [row[tier] for row in rows])
            for tier in self.tiers
        }
        return {"lengths": rows, "break_even_tokens": even}

    def close(self) -> None:
        self.store.close()
        self.store.ledger.database.close()

    def _ready(self, tier: str, key: KVKey) -> float:
        self._only_from(tier, [key])
        seconds, lease = _timed(lambda: self.store.lease([key], _nothing))
        assert lease.source[key] == tier, lease.source
        lease.release()
        return seconds

    def _only_from(self, tier: str, keys: Sequence[KVKey]) -> None:
        """Takes states out of the tiers above one, and its files out of the page cache."""
        for above in self.tiers[: self.tiers.index(tier)]:
            self.store.evict(keys, above)
        shared = self.store.shared.shelf(tier)
        if shared is not None and isinstance(shared.tier, DiskTier | RemoteTier):
            for key in keys:
                drop_pages(Path(shared.tier.path(key)))


def _store(folder: Path, model: LanguageModel, states: dict[KVKey, KVStates]) -> KVStore:
    """Without the threads of an open store, which would copy what is read from a remote to the disk
    while it is timed."""
    room = 2 * sum(each.nbytes for each in states.values()) + 2**24
    memory: list[Tier] = [HostTier(room)]
    if model.device.type == "cuda":
        memory.insert(0, DeviceTier(room, model.device))
    remote = RemoteTier.open(f"file://{folder / 'remote'}")
    database = Database.open(folder / "ledger.sqlite")
    shared: list[Tier] = [DiskTier(folder / "states"), remote]
    store = KVStore(Ledger(database), memory, shared)
    store.ledger.begin()
    for key, each in states.items():
        store.put(key, each)
        for shelf in store.holdings.shelves[1:]:
            store.holdings.place(shelf, key, each, 0, admitted=True)
    return store


def _first_token(model: LanguageModel, states: Sequence[KVStates], own: Sequence[int]) -> int:
    context = assemble(states, own, window=model.window, max_new_tokens=1)
    [completion] = complete(model, [Request(context, 1)])
    return completion.token_ids[0]


def _encode(model: LanguageModel, root: KVStates, tokens: Sequence[int]) -> KVStates:
    [states] = encode(model, [EncodeJob(tokens, root.length, Segment(root, 0))])
    return states


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def _nothing(missing: Sequence[KVKey]) -> list[KVStates]:
    raise AssertionError(f"some tier should hold {missing}")


def _keys(kind: str, modules: Sequence[object]) -> list[KVKey]:
    return [_key(kind, number) for number in range(len(modules))]


def _key(kind: str, number: int) -> KVKey:
    return KVKey(hashlib.sha256(f"{kind} {number}".encode()).hexdigest())
