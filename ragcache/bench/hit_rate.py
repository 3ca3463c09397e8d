"""How often documents are found in a cache that holds a tenth of them: our policies, the optimum,
and a prefix cache of the same size fed with the same prompts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragcache.bench.workload import ZipfWorkload
from ragcache.states import KVKey
from ragcache.store.entries import Entries, KVEntry
from ragcache.store.policy import POLICIES, check_policy, choose_victims


def bench_hit_rate(workload: ZipfWorkload) -> dict[str, Any]:
    """hit_rate: the share of documents found, by policy, all of one size; `belady` is the most that
    any policy reaches, `prefix` a radix tree over whole documents, `prefix_sorted` the same where
    every prompt was sorted so that it matches most. seconds_saved: for documents of different
    lengths, the share of the encoding time that the policy saved, a token costing the same."""
    prompts = workload.draw()
    equal = np.ones(workload.documents, np.int64)
    tokens = workload.tokens()
    rates = {policy: _policy(prompts, policy, equal, workload.places) for policy in POLICIES}
    rates["belady"] = belady(prompts, workload.places)
    rates["prefix"] = prefix(prompts, workload.places)
    rates["prefix_sorted"] = prefix(np.sort(prompts, axis=1), workload.places)
    room = int(tokens.sum() * workload.budget)
    saved = {policy: _policy(prompts, policy, tokens, room) for policy in POLICIES}
    return {"hit_rate": rates, "seconds_saved": saved}


def _policy(prompts: np.ndarray, policy: str, sizes: np.ndarray, room: int) -> float:
    """The share of the encoding time saved: of the documents, where all have one size."""
    checked = check_policy(policy)
    keys = [KVKey(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(sizes.size)]
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
    """A radix tree over whole documents: one is found only behind the same ones in the same order.
    The least recently used leaf goes (SGLang's RadixAttention)."""
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
