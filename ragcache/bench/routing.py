"""Routing, simulated: which share of the memory hits of one big machine several replicas keep, and
what a request waits for its first token, by the policy that chooses the replica.

Replicas have a device and a host tier (LRU in bytes, admission on the second use as in the store),
slots, and the time that moving states takes. The *ideal* is one machine with the slots and tiers of
all of them. `modules` runs `choose_replica` itself, on holdings that are `delay` seconds old.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragcache.bench.harness import Progress, draw_bars, new_figure
from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.errors import ConfigurationError
from ragcache.machine import describe_machine
from ragcache.retrieval import CollectionIndex
from ragcache.routing import (
    Holdings,
    RoutedModule,
    RoutingCosts,
    RoutingPolicy,
    choose_replica,
    owner_of,
)

_DEVICE, _HOST = 1, 2  # bits of where states are
_FIRST_TOKEN = 0.03  # seconds of computing a question
_ADMISSION_WINDOW = 10_000  # uses, as the store's
_TOKEN_BYTES = 131_072  # of an 8B Llama in bfloat16
_MEAN_BYTES = 384.0 * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class RoutingWorkload:
    """nbytes: [modules] of states. requests: the modules that each reads, in the prompt's order."""

    nbytes: Sequence[float]
    requests: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class RoutingSetting:
    """The replicas. device_share, host_share: of the corpus, what all replicas' tiers hold
    together. load: the share of the ideal's capacity at which requests arrive (Poisson). delay: the
    age of what routers know, in seconds. The first third of all requests warms the tiers."""

    replicas: int = 8
    load: float = 0.7
    device_share: float = 0.25
    host_share: float = 1.0
    delay: float = 1.0
    seed: int = 1
    costs: RoutingCosts = field(default_factory=RoutingCosts)

    def __post_init__(self) -> None:
        if self.replicas < 1 or not 0 < self.load < 1:
            raise ConfigurationError(
                f"{self.replicas} replicas at a load of {self.load}: give one replica or more, and "
                "a load between 0 and 1"
            )


HALVES = RoutingSetting(3, 0.1, device_share=1.5, host_share=1.5)
"""Three replicas that are rarely busy, each of which holds half of the corpus."""


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """device, memory: shares of the bytes read that were on the device, and in either tier of
    memory. first_token_p50, first_token_p99: seconds. service: mean seconds in a slot.
    imbalance: the busiest replica's work over the mean."""

    device: float
    memory: float
    first_token_p50: float
    first_token_p99: float
    service: float
    imbalance: float


def zipf_workload(
    replicas: int, zipf: float = 0.9, modules: int = 2000, requests: int = 6000, k: int = 4,
    local: float = 0.7, cluster: int = 12, seed: int = 7,
) -> RoutingWorkload:  # fmt: skip
    """Requests for a module by Zipf's law and for `k - 1` others, which are with a probability of
    `local` of the same cluster. modules, requests: for each replica. Sizes are lognormal."""
    rng = np.random.default_rng(seed)
    count, number = modules * replicas, requests * replicas
    nbytes = rng.lognormal(0, 0.5, count)
    nbytes *= _MEAN_BYTES / nbytes.mean()
    shares = np.arange(1, count + 1) ** -zipf
    ranked = rng.permutation(count)  # popularity is no order of ids
    drawn = ranked[rng.choice(count, (number, k), p=shares / shares.sum())]  # [requests, k]
    first = drawn[:, :1]
    near = first // cluster * cluster + rng.integers(0, cluster, (number, k))
    chosen = np.where(rng.random((number, k)) < local, np.minimum(near, count - 1), drawn)
    chosen[:, 0] = first[:, 0]
    rng.permuted(chosen, axis=1, out=chosen)
    return RoutingWorkload(nbytes.tolist(), [list(dict.fromkeys(row)) for row in chosen.tolist()])


def topic_workload(
    topics: int = 12, size: int = 8, requests: int = 1800, k: int = 4, within: float = 0.95,
    seed: int = 7,
) -> RoutingWorkload:  # fmt: skip
    """Requests for `k` modules of one topic, each with a probability of `within`, else of any."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, topics, (requests, 1))
    inside = topic * size + np.argsort(rng.random((requests, size)), axis=1)[:, :k]
    anywhere = rng.integers(0, topics * size, (requests, k))
    chosen = np.where(rng.random((requests, k)) < within, inside, anywhere)
    sets = [list(dict.fromkeys(row)) for row in chosen.tolist()]
    return RoutingWorkload([_MEAN_BYTES] * (topics * size), sets)


def question_workload(
    texts: Sequence[str],
    questions: Sequence[str],
    k: int = DEFAULT_K,
    times: int = 12,
    seed: int = 7,
) -> RoutingWorkload:
    """Requests for the texts that BM25 finds for questions, each of which is asked so many times.
    As by default, those far below the best one's score are left out."""
    index = CollectionIndex(np.arange(len(texts), dtype=np.int64), texts)
    asked: list[list[int]] = []
    for ranking in (index.search_sparse(each, k) for each in questions):
        least = DEFAULT_RELATIVE_THRESHOLD * ranking[0][1] if ranking else 0.0
        asked += [[number for number, score in ranking if score >= least]] * bool(ranking)
    asked *= times
    random.Random(seed).shuffle(asked)
    return RoutingWorkload([_MEAN_BYTES] * len(texts), asked)


class _LruTier:
    """A tier of one replica. A first use takes free room alone; a second one within the window
    pushes out what was not used for longest."""

    def __init__(self, capacity: float, window: int) -> None:
        self.states: dict[int, float] = {}
        self._room, self._window = capacity, window
        self._seen: dict[int, int] = {}
        self._tick = 0

    def use(self, module: int, nbytes: float) -> list[int]:
        """Reads a module; returns what had to go."""
        self._tick += 1
        if module in self.states:
            self.states[module] = self.states.pop(module)
            return []
        last = self._seen.get(module)
        self._seen[module] = self._tick
        again = last is not None and self._tick - last <= self._window
        if nbytes > self._room and not again:
            return []
        gone: list[int] = []
        while nbytes > self._room and self.states:
            victim = next(iter(self.states))
            self._room += self.states.pop(victim)
            gone.append(victim)
        self.states[module] = nbytes
        self._room -= nbytes
        return gone


class _Replica:
    """A simulated replica: two tiers, slots, and the ends of the requests that it holds."""

    def __init__(self, setting: RoutingSetting, device: float, host: float, times: int) -> None:
        window = _ADMISSION_WINDOW * times
        self.tiers = {_DEVICE: _LruTier(device, window), _HOST: _LruTier(host, window)}
        self.slots = [0.0] * (setting.costs.slots * times)
        self.ends: list[float] = []
        self.busy = 0.0

    def load(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)

    def where(self, module: int) -> int:
        """The bits of the tiers that hold a module."""
        return sum(bit for bit, tier in self.tiers.items() if module in tier.states)

    def run(self, now: float, seconds: float) -> float:
        """Takes a slot for so long, and returns the wait for it."""
        start = max(now, heapq.heappop(self.slots))
        heapq.heappush(self.slots, start + seconds)
        heapq.heappush(self.ends, start + seconds)
        self.busy += seconds
        return start - now


class _Residency:
    """What routers know of the replicas' memory: changes, `delay` seconds after they happened."""

    def __init__(self, delay: float) -> None:
        self.holds: dict[str, dict[str, str]] = {}
        self._delay = delay
        self._changes: deque[tuple[float, int, str, int]] = deque()

    def note(self, now: float, module: int, replica: str, bits: int) -> None:
        self._changes.append((now, module, replica, bits))

    def advance(self, now: float) -> None:
        while self._changes and self._changes[0][0] <= now - self._delay:
            _, module, replica, bits = self._changes.popleft()
            held = self.holds.setdefault(str(module), {})
            if bits:
                held[replica] = "device" if bits & _DEVICE else "host"
            else:
                held.pop(replica, None)


@dataclass(slots=True)
class _Counted:
    """What has been measured of the requests after the warm-up."""

    first_tokens: list[float] = field(default_factory=list)
    service: float = 0.0
    nbytes: float = 0.0
    device: float = 0.0
    memory: float = 0.0

    def figures(self, busy: Sequence[float]) -> RoutingFigures:
        p50, p99 = np.percentile(self.first_tokens, (50, 99))
        return RoutingFigures(
            self.device / self.nbytes, self.memory / self.nbytes, float(p50), float(p99),
            self.service / len(self.first_tokens), max(busy) * len(busy) / sum(busy),
        )  # fmt: skip


class _Simulation:
    """Replicas under one policy."""

    def __init__(self, workload: RoutingWorkload, setting: RoutingSetting, policy: str) -> None:
        self._costs, self._rng = setting.costs, random.Random(setting.seed)
        self._modules = [
            RoutedModule(str(number), int(nbytes), int(nbytes) // _TOKEN_BYTES)
            for number, nbytes in enumerate(workload.nbytes)
        ]
        times = setting.replicas if policy == "ideal" else 1
        each = sum(workload.nbytes) / setting.replicas * times
        device, host = each * setting.device_share, each * setting.host_share
        self.replicas = {
            str(number): _Replica(setting, device, host, times)
            for number in range(setting.replicas // times)
        }
        self._residency = _Residency(setting.delay)
        self._policy = policy

    def send(self, now: float, read: Sequence[int], counted: _Counted | None) -> None:
        """A request arrives, is routed and runs."""
        self._residency.advance(now)
        name = self._route([self._modules[number] for number in read], now)
        replica, moving = self.replicas[name], 0.0
        for number in read:
            module, bits = self._modules[number], replica.where(number)
            tier = "device" if bits & _DEVICE else "host" if bits else None
            moving += self._costs.seconds_to_bring(module, tier)
            if counted is not None:
                counted.nbytes += module.nbytes
                counted.device += module.nbytes * bool(bits & _DEVICE)
                counted.memory += module.nbytes * bool(bits)
            self._use(name, number, now)
        seconds = self._costs.service_seconds + moving
        waited = replica.run(now, seconds)
        if counted is not None:
            counted.first_tokens.append(waited + moving + _FIRST_TOKEN)
            counted.service += seconds

    def _use(self, name: str, number: int, now: float) -> None:
        replica, changed = self.replicas[name], {number}
        for tier in replica.tiers.values():
            changed |= set(tier.use(number, self._modules[number].nbytes))
        for each in changed:
            self._residency.note(now, each, name, replica.where(each))

    def _route(self, modules: Sequence[RoutedModule], now: float) -> str:
        if self._policy == "ideal":
            return "0"
        loads = {name: each.load(now) for name, each in self.replicas.items()}
        choose = POLICIES[self._policy]
        return choose(modules, loads, self._residency.holds, self._costs, self._rng)


def _choose_by_prefix(
    modules: Sequence[RoutedModule], loads: Mapping[str, int], holds: Holdings,
    costs: RoutingCosts, rng: random.Random,
) -> str:  # fmt: skip
    """The rendezvous owner of the first module among those below a bound of the mean load."""
    if not modules:
        return _choose_of_two(modules, loads, holds, costs, rng)
    most = costs.bounded_load * (sum(loads.values()) + 1) / len(loads)
    free = [replica for replica, load in loads.items() if load < most]
    return owner_of(modules[0].key, free or loads)


def _choose_of_two(
    modules: Sequence[RoutedModule], loads: Mapping[str, int], holds: Holdings,  # noqa: ARG001
    costs: RoutingCosts, rng: random.Random,
) -> str:  # fmt: skip
    return choose_replica((), loads, {}, costs, rng)


def _choose_any(
    modules: Sequence[RoutedModule], loads: Mapping[str, int], holds: Holdings,  # noqa: ARG001
    costs: RoutingCosts, rng: random.Random,  # noqa: ARG001
) -> str:  # fmt: skip
    return rng.choice(list(loads))


POLICIES: Mapping[str, RoutingPolicy] = {
    "modules": choose_replica, "prefix": _choose_by_prefix, "two choices": _choose_of_two,
    "random": _choose_any,
}  # fmt: skip
"""What is compared: `choose_replica`; the rendezvous owner of a prompt's first module, with bounded
loads, as routers of prefix caches have it; the less loaded one of two; any."""


def simulate_routing(
    workload: RoutingWorkload, setting: RoutingSetting, policy: str, service: float | None = None
) -> RoutingFigures:
    """Sends a workload to simulated replicas.

    Args:
        policy: One of `POLICIES`, or `ideal`: one machine with the slots and tiers of all.
        service: The ideal's mean seconds in a slot, of which the rate of arrivals follows.
    """
    rng = random.Random(setting.seed)
    simulation = _Simulation(workload, setting, policy)
    rate = setting.load * setting.replicas * setting.costs.slots
    rate /= service or setting.costs.service_seconds
    now, counted = 0.0, _Counted()
    for number, read in enumerate(workload.requests):
        now += rng.expovariate(rate)
        simulation.send(now, read, counted if 3 * number >= len(workload.requests) else None)
    return counted.figures([each.busy for each in simulation.replicas.values()])


def compare_routing(
    workload: RoutingWorkload, setting: RoutingSetting, policies: Sequence[str] = tuple(POLICIES),
    progress: Progress = lambda _: None,
) -> dict[str, RoutingFigures]:  # fmt: skip
    """The figures of each policy and of the ideal, under the same arrivals."""
    progress("ideal")
    first = simulate_routing(workload, setting, "ideal")
    figures = {"ideal": simulate_routing(workload, setting, "ideal", first.service)}
    for policy in policies:
        progress(policy)
        service = figures["ideal"].service
        figures[policy] = simulate_routing(workload, setting, policy, service)
    return figures


def bench_routing(
    workloads: Mapping[str, tuple[RoutingWorkload, RoutingSetting]],
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Compares the policies on workloads by their names. Hits are shares of the ideal's, too."""
    runs = {}
    for name, (workload, setting) in workloads.items():
        telling = lambda policy, name=name: progress(f"{name}: {policy}")  # noqa: E731
        figures = compare_routing(workload, setting, progress=telling)
        rows = {policy: _row(each, figures["ideal"]) for policy, each in figures.items()}
        runs[name] = {"setting": asdict(setting), "policies": rows}
    return {"machine": describe_machine(), "runs": runs}


def standard_workloads(
    replicas: int = 8, zipf: float = 0.9, requests: int = 6000, seed: int = 7
) -> dict[str, tuple[RoutingWorkload, RoutingSetting]]:
    """Zipf's law at 70 and at 90 % load, and twelve topics of eight modules, half of which fits
    into each of three replicas. requests: for each replica."""
    skewed = zipf_workload(replicas, zipf, requests=requests, seed=seed)
    topics = topic_workload(requests=requests, seed=seed)
    named = {f"Zipf {zipf}, load {load:.0%}": (skewed, RoutingSetting(replicas, load))
             for load in (0.7, 0.9)}  # fmt: skip
    return named | {"12 topics of 8, 3 replicas": (topics, HALVES)}


def plot_routing(result: Mapping[str, Any], file: Path) -> None:
    """Hits on the device and first tokens of each workload, by policy. Raises `MissingExtra`
    without matplotlib."""
    figure, axes = new_figure(2 * len(result["runs"]))
    for number, (name, run) in enumerate(result["runs"].items()):
        hits, tokens = axes[2 * number : 2 * number + 2]
        rows = run["policies"].items()
        draw_bars(hits, f"{name}: hits, of the ideal's", {k: v["device_of_ideal"] for k, v in rows})
        draw_bars(tokens, "seconds to the first token, p99",
                  {k: v["first_token_p99"] for k, v in rows})  # fmt: skip
    figure.savefig(file)


def _row(figures: RoutingFigures, ideal: RoutingFigures) -> dict[str, float]:
    shares = {
        "device_of_ideal": figures.device / ideal.device,
        "memory_of_ideal": figures.memory / ideal.memory,
    }
    return asdict(figures) | shares
