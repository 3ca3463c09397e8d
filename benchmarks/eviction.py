"""Eviction: how often documents are found in a cache that holds a tenth of them, beside LRU, the
optimum, and a prefix cache of that size; the same in a real store; and the time of a choice.

    python benchmarks/eviction.py --json FILE
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from harness import (
    JsonFile,
    describe_machine,
    made_up_key,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
)

from ragcache.db import Database
from ragcache.states import KVStates
from ragcache.store import EvictionIndex, HostTier, KVStore, Lease, TierEntries
from ragcache.store.memory_tiers import TierIndex


class LruIndex(EvictionIndex):
    """The least recently used states go first."""

    def add(self, key: Any, nbytes: int, last_use: int, *, reused: bool = False) -> bool:  # noqa: ARG002
        return super().add(key, nbytes, last_use, reused=True)


POLICIES: Mapping[str, type[EvictionIndex]] = {"2q": EvictionIndex, "lru": LruIndex}
DRAWS = ("steady", "drifting", "scan")


@dataclass(frozen=True, slots=True)
class ZipfWorkload:
    """prompts of `documents_a_prompt` different documents each, drawn with odds 1 / rank^skew.

    budget: the share of all documents that the cache holds. drift: prompts after which every
    document is one rank further. scan: prompts after which one asks for documents that no other
    prompt asks for.
    """

    documents: int = 2_000
    prompts: int = 10_000
    documents_a_prompt: int = 4
    skew: float = 1.0
    budget: float = 0.1
    drift: int = 16
    scan: int = 3
    seed: int = 1

    @property
    def places(self) -> int:
        """How many documents of equal size the cache holds."""
        return int(self.documents * self.budget)

    def draw(self, kind: str = "steady") -> np.ndarray:
        """[prompts, documents_a_prompt] int64, document numbers in the order of each prompt. kind:
        one of `DRAWS`; the prompts of a scan come in addition.

        The largest of log(odds) + Gumbel noise are a sample without replacement.
        """
        rng = np.random.default_rng(self.seed)
        log_odds = -self.skew * np.log(np.arange(1, self.documents + 1))
        drawn = np.empty((self.prompts, self.documents_a_prompt), np.int64)
        for row in drawn:
            noisy = log_odds + rng.gumbel(size=self.documents)
            best = np.argpartition(noisy, -self.documents_a_prompt)[-self.documents_a_prompt :]
            row[:] = best[np.argsort(-noisy[best])]
        if kind == "drifting":
            return (drawn + np.arange(self.prompts)[:, None] // self.drift) % self.documents
        if kind == "scan":
            passed = self.prompts // self.scan
            fresh = np.arange(passed * self.documents_a_prompt) + self.documents
            places = np.arange(1, passed + 1) * self.scan
            return np.insert(drawn, places, fresh.reshape(passed, -1), axis=0)
        return drawn

    def tokens(self) -> np.ndarray:
        """[documents] int64: lengths between 128 and 2,048 tokens, for caches that weigh them."""
        rng = np.random.default_rng(self.seed + 1)
        return np.exp(rng.uniform(np.log(128), np.log(2048), self.documents)).astype(np.int64)


def bench_hit_rate(workload: ZipfWorkload) -> dict[str, Any]:
    """hit_rate: by draw, the share of documents found, all of one size, under each policy. Of the
    steady draw also `belady`, the most that any policy reaches, `prefix`, a radix tree over whole
    documents, and `prefix_sorted`, the same where every prompt was sorted so that it matches most.
    seconds_saved: for documents of different lengths, the share of the encoding time that the
    policy saved, a token costing the same."""
    tokens = workload.tokens()
    room = int(tokens.sum() * workload.budget)
    rates: dict[str, dict[str, float]] = {}
    saved: dict[str, dict[str, float]] = {}
    for kind in DRAWS:
        prompts = workload.draw(kind)
        equal, sizes = np.ones(prompts.max() + 1, np.int64), np.resize(tokens, prompts.max() + 1)
        each = POLICIES.items()
        rates[kind] = {
            n: encoding_saved(prompts, made(), equal, workload.places) for n, made in each
        }
        saved[kind] = {n: encoding_saved(prompts, made(), sizes, room) for n, made in each}
    prompts = workload.draw()
    rates["steady"] |= {
        "belady": belady(prompts, workload.places),
        "prefix": prefix(prompts, workload.places),
        "prefix_sorted": prefix(np.sort(prompts, axis=1), workload.places),
    }
    return {"hit_rate": rates, "seconds_saved": saved}


def encoding_saved(
    prompts: np.ndarray, entries: EvictionIndex, sizes: np.ndarray, room: int
) -> float:
    """The share of the encoding time saved: of the documents, where all have one size."""
    keys = [made_up_key(number) for number in range(sizes.size)]
    saved = 0
    for tick, prompt in enumerate(prompts.tolist()):
        leased = {keys[number] for number in prompt}
        found = [number for number in prompt if keys[number] in entries]
        for number in found:
            entries.touch(keys[number], tick)
            saved += int(sizes[number])
        for number in set(prompt).difference(found):
            need = entries.used_bytes + int(sizes[number]) - room
            for key in entries.choose_victims(need, leased.__contains__) or ():
                entries.remove(key, remember=True)
            entries.add(keys[number], int(sizes[number]), tick)
    return saved / float(sizes[prompts].sum())


@dataclass(frozen=True, slots=True)
class StoreSetting:
    """A host tier over a disk that has all documents.

    prompts: of the workload at most. pinned: documents that are pinned. open_leases: of the last
    prompts, which hold their documents.
    tokens: the states of a document have this share of its tokens, of 8 bytes each.
    """

    prompts: int = 4_000
    pinned: int = 20
    open_leases: int = 8
    tokens: float = 0.125


class SmallDocuments:
    """Keys and small states of documents of different lengths, by their numbers."""

    def __init__(self, workload: ZipfWorkload, setting: StoreSetting) -> None:
        self.tokens = (workload.tokens() * setting.tokens).astype(int)

    def states(self, number: int) -> KVStates:
        zeros = torch.zeros(1, 1, int(self.tokens[number % len(self.tokens)]), 1)
        return KVStates(zeros, zeros, 0)

    def nbytes(self, number: int) -> int:
        return HostTier(1).size_of(self.states(number))


def bench_store(workload: ZipfWorkload, setting: StoreSetting) -> dict[str, dict[str, float]]:
    """By draw and policy, the share of the bytes of states that leases of a real store find in
    memory; those of a scan's documents are encoded."""
    found: dict[str, dict[str, float]] = {kind: {} for kind in DRAWS}
    workload = replace(workload, prompts=min(setting.prompts, workload.prompts))
    with tempfile.TemporaryDirectory() as folder:
        ingested = Path(folder) / "ingested"
        documents = SmallDocuments(workload, setting)
        with _opened(ingested, 1 << 30) as store, patch("os.fsync"):
            for number in range(workload.documents):
                store.put_states(made_up_key(number), documents.states(number))
        for kind in DRAWS:
            for name, made in POLICIES.items():
                shutil.copytree(ingested, copy := Path(folder) / f"{kind} {name}")
                index = lambda tier, made=made: TierIndex(tier, TierEntries(made()))  # noqa: E731
                with patch("ragcache.store.store.TierIndex", index):
                    found[kind][name] = share_in_memory(copy, workload, setting, kind)
    return found


def share_in_memory(
    folder: Path, workload: ZipfWorkload, setting: StoreSetting, kind: str
) -> float:
    """The share of the bytes of states that leases find in the host tier of a store."""
    prompts, documents = workload.draw(kind), SmallDocuments(workload, setting)
    sizes = [documents.nbytes(number) for number in range(prompts.max() + 1)]
    numbers = {made_up_key(number): number for number in range(len(sizes))}
    keys = list(numbers)
    room = int(sum(map(documents.nbytes, range(workload.documents))) * workload.budget)
    held: deque[Lease] = deque()
    in_memory = 0
    with _opened(folder, room) as store:
        store.pin([made_up_key(workload.documents // 2 + n) for n in range(setting.pinned)])
        for prompt in prompts.tolist():
            held.append(lease := store.lease([keys[number] for number in prompt]))
            here = (key for key, tier in lease.source.items() if tier == "host")
            in_memory += sum(sizes[numbers[key]] for key in here)
            while missing := lease.claim():
                for key in missing:
                    lease.put(key, documents.states(numbers[key]))
            if len(held) > setting.open_leases:
                held.popleft().release()
        while held:
            held.popleft().release()
    return float(in_memory / np.array(sizes)[prompts].sum())


@contextmanager
def _opened(folder: Path, room: int) -> Iterator[KVStore]:
    folder.mkdir(exist_ok=True)
    database = Database.open(folder / "ledger.sqlite")
    store = KVStore.open(folder, database, room)
    # Jobs own the states: what is opened again would else be removed as left over.
    store.jobs.expect(store.jobs.begin("collection eviction", 0), map(made_up_key, range(20_000)))
    try:
        yield store
    finally:
        store.close()
        database.close()


def belady(prompts: np.ndarray, places: int) -> float:
    """The optimum for documents of one size: what is asked for again latest goes, and what comes in
    does not stay if it is that itself (Belady 1966)."""
    follows = _next_prompts(prompts)
    held: dict[int, int] = {}  # document to the number of the next prompt with it
    hits = 0
    for prompt, following in zip(prompts.tolist(), follows.tolist(), strict=True):
        hits += sum(number in held for number in prompt)
        held.update(zip(prompt, following, strict=True))
        while len(held) > places:
            del held[max(held, key=held.__getitem__)]
    return hits / prompts.size


def _next_prompts(prompts: np.ndarray) -> np.ndarray:
    """For each place, the number of the next prompt with that document; past the last, if none."""
    follows = np.empty_like(prompts)
    upcoming: dict[int, int] = {}
    for row in range(len(prompts) - 1, -1, -1):
        for column, number in enumerate(prompts[row].tolist()):
            follows[row, column] = upcoming.get(number, len(prompts))
        upcoming.update(dict.fromkeys(prompts[row].tolist(), row))
    return follows


def prefix(prompts: np.ndarray, places: int) -> float:
    """Hit rate of a radix tree over whole documents: one is found only behind the same ones in the
    same order. The least recently used leaf goes (SGLang's RadixAttention)."""
    tree: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the path to each node
    hits = 0
    for prompt in prompts.tolist():
        paths = [tuple(prompt[: length + 1]) for length in range(len(prompt))]
        hits += _matched(tree, paths)
        for path in reversed(paths):  # a node is used after those below it, so that leaves go first
            tree[path] = None
            tree.move_to_end(path)
        while len(tree) > places:
            tree.popitem(last=False)
    return hits / prompts.size


def _matched(tree: OrderedDict[tuple[int, ...], None], paths: Sequence[tuple[int, ...]]) -> int:
    for length, path in enumerate(paths):
        if path not in tree:
            return length
    return len(paths)


def bench_victims(entries: int, share: float = 0.01, runs: int = 15) -> float:
    """Milliseconds at the median to choose states of a `share` of the bytes of so many entries, of
    which a tenth is leased or pinned."""
    index, rng = EvictionIndex(), np.random.default_rng(1)
    keys = [made_up_key(number) for number in range(entries)]
    for tick, key in enumerate(keys):
        index.add(key, int(rng.integers(1 << 20, 12 << 20)), tick, reused=bool(rng.random() < 0.9))
    stays = {key for key in keys if rng.random() < 0.1}
    need = int(share * index.used_bytes)
    choose = partial(index.choose_victims, need, stays.__contains__)
    return statistics.median(1000 * seconds(choose) for _ in range(runs))


def main(
    entries: Annotated[int, typer.Option(min=1, help="Entries to choose victims among.")] = 100_000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the Zipf workload.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """Hit rates of eviction policies, alone and in a store, and the time of choosing victims."""
    workload, setting = ZipfWorkload(prompts=prompts), StoreSetting()
    result: dict[str, Any] = run_benchmark(
        lambda _: (
            bench_hit_rate(workload)
            | {"victims_ms": bench_victims(entries), "store": bench_store(workload, setting)}
        )
    )
    result |= {
        "setting": {"workload": asdict(workload), "store": asdict(setting), "entries": entries},
        "machine": describe_machine(),
    }
    table = plain_table("draw", "cache", "documents found", "encoding saved", "in a store")
    for kind in DRAWS:
        for policy, rate in result["hit_rate"][kind].items():
            saved, stored = (result[name][kind].get(policy) for name in ("seconds_saved", "store"))
            figures = (
                "" if each is None else f"{100 * each:.1f}%" for each in (rate, saved, stored)
            )
            table.add_row(kind, policy.replace("_", ", "), *figures)
    chosen = f"Victims among {entries:,} entries are chosen in {result['victims_ms']:.2f} ms."
    print_figures([table, chosen], result, json_file)


if __name__ == "__main__":
    typer.run(main)
