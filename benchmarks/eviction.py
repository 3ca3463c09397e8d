"""Eviction: how often documents are found in a cache that holds a tenth of them, under each policy,
the optimum, and a prefix cache of that size; and how long choosing victims takes.

    python benchmarks/eviction.py --json FILE
"""

from __future__ import annotations

import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
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

from ragcache.store.eviction import POLICIES, Entries, KVEntry, check_policy, choose_victims


@dataclass(frozen=True, slots=True)
class ZipfWorkload:
    """prompts of `documents_a_prompt` different documents each, drawn with odds 1 / rank^skew.

    budget: the share of all documents that the cache holds.
    """

    documents: int = 2_000
    prompts: int = 10_000
    documents_a_prompt: int = 4
    skew: float = 1.0
    budget: float = 0.1
    seed: int = 1

    @property
    def places(self) -> int:
        """How many documents of equal size the cache holds."""
        return int(self.documents * self.budget)

    def draw(self) -> np.ndarray:
        """[prompts, documents_a_prompt] int64, document numbers in the order of each prompt.

        The largest of log(odds) + Gumbel noise are a sample without replacement.
        """
        rng = np.random.default_rng(self.seed)
        log_odds = -self.skew * np.log(np.arange(1, self.documents + 1))
        drawn = np.empty((self.prompts, self.documents_a_prompt), np.int64)
        for row in drawn:
            noisy = log_odds + rng.gumbel(size=self.documents)
            best = np.argpartition(noisy, -self.documents_a_prompt)[-self.documents_a_prompt :]
            row[:] = best[np.argsort(-noisy[best])]
        return drawn

    def tokens(self) -> np.ndarray:
        """[documents] int64: lengths between 128 and 2,048 tokens, for caches that weigh them."""
        rng = np.random.default_rng(self.seed + 1)
        return np.exp(rng.uniform(np.log(128), np.log(2048), self.documents)).astype(np.int64)


def bench_hit_rate(workload: ZipfWorkload) -> dict[str, Any]:
    """hit_rate: the share of documents found, by policy, all of one size; `belady` is the most that
    any policy reaches, `prefix` a radix tree over whole documents, `prefix_sorted` the same where
    every prompt was sorted so that it matches most. seconds_saved: for documents of different
    lengths, the share of the encoding time that the policy saved, a token costing the same."""
    prompts = workload.draw()
    equal = np.ones(workload.documents, np.int64)
    tokens = workload.tokens()
    rates = {policy: encoding_saved(prompts, policy, equal, workload.places) for policy in POLICIES}
    rates["belady"] = belady(prompts, workload.places)
    rates["prefix"] = prefix(prompts, workload.places)
    rates["prefix_sorted"] = prefix(np.sort(prompts, axis=1), workload.places)
    room = int(tokens.sum() * workload.budget)
    saved = {policy: encoding_saved(prompts, policy, tokens, room) for policy in POLICIES}
    return {"hit_rate": rates, "seconds_saved": saved}


def encoding_saved(prompts: np.ndarray, policy: str, sizes: np.ndarray, room: int) -> float:
    """The share of the encoding time saved: of the documents, where all have one size."""
    checked = check_policy(policy)
    keys = [made_up_key(number) for number in range(sizes.size)]
    cost = sizes.astype(float)
    entries = Entries()
    clock, saved = 0.0, 0.0
    for tick, prompt in enumerate(prompts.tolist()):
        missing = []
        for number in prompt:
            if keys[number] in entries:
                entries.touch(keys[number], tick, clock)
                entries.lease(keys[number])
                saved += cost[number]
            else:
                missing.append(number)
        for number in missing:
            need = entries.used_bytes + int(sizes[number]) - room
            victims = choose_victims(entries, need, checked, clock=clock)
            clock = victims.clock
            for key in victims.keys:
                entries.remove(key)
            size, price = int(sizes[number]), float(cost[number])
            entries.add(KVEntry(keys[number], size, tick, leased=True, cost=price, clock=clock))
        for number in prompt:
            entries.release(keys[number])
    return saved / float(cost[prompts].sum())


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


def bench_victims(entries: int, share: float = 0.01, runs: int = 15) -> dict[str, float]:
    """Milliseconds by policy at the median, to free a `share` of the bytes of so many entries that
    were all encoded after one root."""
    table = _tier(entries)
    need = int(share * table.used_bytes)
    medians = {}
    for policy in POLICIES:
        checked, times = check_policy(policy), []
        for _ in range(runs):
            times.append(1000 * seconds(partial(choose_victims, table, need, checked)))
        medians[policy] = statistics.median(times)
    return medians


def _tier(entries: int) -> Entries:
    rng = random.Random(1)
    keys = [made_up_key(number) for number in range(entries)]
    table = Entries()
    for number, key in enumerate(keys):
        table.add(
            KVEntry(
                key,
                nbytes=rng.randrange(1 << 20, 12 << 20),
                last_use=rng.randrange(entries),
                hits=rng.randrange(50),
                cost=rng.random(),
                root=keys[0] if number else None,
            )
        )
    return table


def main(
    entries: Annotated[int, typer.Option(min=1, help="Entries to choose victims among.")] = 100_000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the Zipf workload.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """Hit rates of eviction policies, and the time of choosing victims."""
    workload = ZipfWorkload(prompts=prompts)
    result = run_benchmark(lambda _: bench_hit_rate(workload) | {"victims": bench_victims(entries)})
    result |= {
        "victims_ms": max(result["victims"].values()),
        "setting": {"workload": asdict(workload), "entries": entries},
        "machine": describe_machine(),
    }
    table = plain_table("cache", "documents found", "encoding saved", "victims chosen in")
    for policy, rate in result["hit_rate"].items():
        saved, chosen = result["seconds_saved"].get(policy), result["victims"].get(policy)
        table.add_row(
            policy.replace("_", ", "),
            f"{100 * rate:.1f}%",
            "" if saved is None else f"{100 * saved:.1f}%",
            "" if chosen is None else f"{chosen:.1f} ms",
        )
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
