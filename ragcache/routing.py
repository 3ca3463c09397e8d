"""Routing: which replica answers a request, by the modules that the request reads.

A router that scores prefixes of prompts sees the first module alone, since modules stand anywhere
in a prompt. Here a replica costs the seconds in which it brings the states that it lacks, and those
in which the request waits there; the cheapest one answers. All is pure: what replicas hold and how
busy they are is given.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

from ragcache.errors import ConfigurationError
from ragcache.tiers import TIERS

Holdings = Mapping[str, Mapping[str, str]]
"""For the key of each module, the replicas that have its states in memory, and in which tier:
`device` or `host`."""

RANDOM_CANDIDATES = 2
_RNG = random.Random()


@dataclass(frozen=True, slots=True)
class RoutedModule:
    """A module that a request reads. key: of its states; nbytes, tokens: their size."""

    key: str
    nbytes: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """What moving states and waiting costs. All are measured on the machine that serves; only
    ratios count.

    Attributes:
        host_bandwidth: Bytes per second from host memory to where attention reads them.
        remote_bandwidth: Bytes per second from the remote tier.
        encode_rate: Tokens per second at which a replica encodes modules: states that are dearer to
            bring than to encode count as encoded.
        slots: Requests that a replica runs at once without slowing them down.
        service_seconds: The time of an answer in a slot.
        bounded_load: The load in means of all replicas from which on being busier than others
            costs (consistent hashing with bounded loads, Mirrokni et al., 2018).
        owner_credit: The share of a transfer that the rendezvous owner of a module is let off while
            nobody has it in memory, so that several routers send it to the same replica.

    Raises:
        ConfigurationError: A value is not positive; `owner_credit` may be 0.
    """

    host_bandwidth: float = 50e9
    remote_bandwidth: float = 1.25e9
    encode_rate: float = 8_000.0
    slots: int = 16
    service_seconds: float = 0.6
    bounded_load: float = 1.25
    owner_credit: float = 0.1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value > 0 or (value == 0 and each.name == "owner_credit")):
                raise ConfigurationError(f"{each.name} is {value}; it must be positive")

    def seconds_to_bring(self, module: RoutedModule, tier: str | None = None) -> float:
        """Seconds until attention can read a module's states. tier: where they are; None for no
        tier in memory."""
        spec = None if tier is None else TIERS.get(tier)
        if spec is not None and spec.traits.on_gpu:
            return 0.0
        in_memory = spec is not None and not spec.traits.persistent
        bandwidth = self.host_bandwidth if in_memory else self.remote_bandwidth
        seconds = module.nbytes / bandwidth
        return min(seconds, module.tokens / self.encode_rate) if module.tokens else seconds

    def seconds_to_wait(self, load: int, mean: float) -> float:
        """Seconds that a request waits at a replica with so many requests, where all have `mean` of
        them: for a slot, and the more the further the replica is above the others."""
        queued = max(0, load + 1 - self.slots)
        above = max(0.0, load - self.bounded_load * mean)
        return (queued + above) * self.service_seconds / self.slots


def owner_of(key: str, replicas: Iterable[str]) -> str:
    """The rendezvous owner of a key: the replica with the highest hash of both (Thaler and
    Ravishankar, 1998). Where one leaves, only what it owned gets another owner.

    Raises:
        ValueError: There are no replicas.
    """
    return max(replicas, key=lambda replica: (_weight(key, replica), replica))


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()


def choose_replica(
    modules: Sequence[RoutedModule], loads: Mapping[str, int], holds: Holdings,
    costs: RoutingCosts, rng: random.Random | None = None,
) -> str:  # fmt: skip
    """The replica that answers a request soonest.

    Candidates are the holders and the owners of the modules, the least loaded replica and
    two at random; among equal ones the less loaded, then any. A module whose holder is busy is
    brought to another replica by this cost alone, so that what many ask for is soon held by many.
    Requests that read no modules go to the less loaded one of two at random.

    Args:
        modules: What the request reads, each once.
        loads: The requests that each replica holds: all that may be chosen.
        holds: Who has which states in memory; others than those of `loads` are left out.
        costs: What moving and waiting costs.
        rng: For ties and candidates; the process's own by default.

    Raises:
        ValueError: There are no replicas.

    Example:
        >>> leave = RoutedModule("leave", nbytes=50_000_000, tokens=384)
        >>> holds = {"leave": {"b": "host"}}
        >>> choose_replica([leave], {"a": 0, "b": 3}, holds, RoutingCosts())
        'b'
    """
    if not loads:
        raise ValueError("there is no replica to choose from")
    rng = rng or _RNG
    names = list(loads)
    some = rng.sample(names, min(RANDOM_CANDIDATES, len(names)))
    if not modules:
        return min(some, key=loads.__getitem__)
    owners = {m.key: owner_of(m.key, names) for m in modules if not holds.get(m.key)}
    candidates = {*some, *owners.values(), min(names, key=loads.__getitem__)}
    for module in modules:
        candidates |= holds.get(module.key, {}).keys() & loads.keys()
    mean = sum(loads.values()) / len(loads)

    def cost(replica: str) -> tuple[float, int, float]:
        seconds = costs.seconds_to_wait(loads[replica], mean)
        for module in modules:
            seconds += costs.seconds_to_bring(module, holds.get(module.key, {}).get(replica))
            if owners.get(module.key) == replica:
                seconds -= costs.owner_credit * costs.seconds_to_bring(module)
        return seconds, loads[replica], rng.random()

    return min(sorted(candidates), key=cost)


def held_bytes(
    modules: Iterable[RoutedModule], holds: Holdings, replica: str
) -> tuple[int, int]:  # fmt: skip
    """The bytes of a request's modules that a replica has in memory, and those it has to bring."""
    held = moved = 0
    for module in modules:
        if replica in holds.get(module.key, {}):
            held += module.nbytes
        else:
            moved += module.nbytes
    return held, moved
