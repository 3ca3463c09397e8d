"""Routing: choose the replica that answers a request, by the modules that it reads.

A router that scores prompt prefixes sees only the first module, because modules can appear anywhere
in a prompt. Here a replica costs the seconds to fetch the states that it lacks plus the seconds
that the request waits there. The cheapest replica answers. All functions are pure: the holdings and
loads of the replicas are arguments.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

from ragcache.errors import ConfigurationError
from ragcache.tiers import TIERS

Holdings = Mapping[str, Mapping[str, str]]
"""For each module key, the replicas that have its states in memory, with the tier: `device` or
`host`.
"""

RANDOM_CANDIDATES = 2
_RNG = random.Random()


@dataclass(frozen=True, slots=True)
class RoutedModule:
    """A module that a request reads."""

    key: str
    """Key of the module's states."""
    nbytes: int
    """Size of the states in bytes."""
    tokens: int = 0
    """Length of the module in tokens. 0 if unknown."""


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """Measured costs of transferring states and of waiting. Only the ratios matter.

    Raises:
        ConfigurationError: A value is not positive. Only `owner_credit` may be 0.
    """

    host_bandwidth: float = 50e9
    """Bytes per second from host memory to the device."""
    remote_bandwidth: float = 1.25e9
    """Bytes per second from the remote tier."""
    encode_rate: float = 8_000.0
    """Tokens per second at which a replica encodes modules. It limits the cost of a transfer: a
    replica encodes a module if that is faster.
    """
    slots: int = 16
    """Requests that a replica runs concurrently without slowing them down."""
    service_seconds: float = 0.6
    """Seconds that an answer occupies a slot."""
    bounded_load: float = 1.25
    """Load relative to the mean of all replicas. A replica above it costs more (consistent hashing
    with bounded loads, Mirrokni et al., 2018).
    """
    owner_credit: float = 0.1
    """Fraction of a transfer that is waived for the rendezvous owner of a module while no replica
    has it in memory, so that several routers choose the same replica.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value > 0 or (value == 0 and each.name == "owner_credit")):
                raise ConfigurationError(f"{each.name} is {value}; it must be positive")

    def seconds_to_bring(self, module: RoutedModule, tier: str | None = None) -> float:
        """Return the seconds until attention can read a module's states.

        Args:
            module: The module.
            tier: Memory tier that has the states. By default they are not in memory.
        """
        spec = None if tier is None else TIERS.get(tier)
        if spec is not None and spec.traits.on_gpu:
            return 0.0
        in_memory = spec is not None and not spec.traits.persistent
        bandwidth = self.host_bandwidth if in_memory else self.remote_bandwidth
        seconds = module.nbytes / bandwidth
        return min(seconds, module.tokens / self.encode_rate) if module.tokens else seconds

    def seconds_to_wait(self, load: int, mean: float) -> float:
        """Return the seconds that a request waits at a replica.

        Includes the wait for a slot, and a penalty that grows with the load above `bounded_load`.

        Args:
            load: Requests at the replica.
            mean: Mean load of all replicas.
        """
        queued = max(0, load + 1 - self.slots)
        above = max(0.0, load - self.bounded_load * mean)
        return (queued + above) * self.service_seconds / self.slots


def owner_of(key: str, replicas: Iterable[str]) -> str:
    """Return the rendezvous owner of a key: the replica with the highest hash of both.

    When a replica leaves, only its own keys change owner (Thaler and Ravishankar, 1998).

    Raises:
        ValueError: There are no replicas.
    """
    return max(replicas, key=lambda replica: (_weight(key, replica), replica))


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()


def choose_replica(
    modules: Sequence[RoutedModule],
    loads: Mapping[str, int],
    holds: Holdings,
    costs: RoutingCosts,
    rng: random.Random | None = None,
) -> str:
    """Return the replica that answers a request soonest.

    Candidates are the holders and the owners of the modules, the least loaded replica, and two
    random replicas. Ties go to the less loaded candidate, then to a random one. When the holder of
    a popular module is busy, the module is fetched by another replica, so that popular modules
    spread by cost alone. A request without modules goes to the less loaded of two random replicas.

    Args:
        modules: Distinct modules of the request.
        loads: Number of requests at each available replica.
        holds: States in the memory of the replicas. Unavailable replicas are ignored.
        costs: Costs of transferring and waiting.
        rng: Source of ties and random candidates. Defaults to one of the process.

    Raises:
        ValueError: There are no replicas.

    Example:
        >>> leave = RoutedModule("leave", nbytes=50_000_000, tokens=384)
        >>> holds = {"leave": {"b": "host"}}
        >>> choose_replica([leave], {"a": 0, "b": 1}, holds, RoutingCosts())
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


def held_bytes(modules: Iterable[RoutedModule], holds: Holdings, replica: str) -> tuple[int, int]:
    """Return the bytes of a request's modules in a replica's memory, and the bytes to fetch."""
    held = moved = 0
    for module in modules:
        if replica in holds.get(module.key, {}):
            held += module.nbytes
        else:
            moved += module.nbytes
    return held, moved
