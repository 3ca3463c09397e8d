"""Admission of requests: who runs now, who waits, and who is told to come again later.

Callers take turns: a request's place depends on how many of its own caller wait, so that a caller
with a thousand requests delays one with a single request by one request (start-time fair queueing,
Goyal et al., 1996). A request that would wait too long is refused at once. How long follows from
its place and from the time that requests took while others waited. Each caller's refused requests
are told times to come again at its share of that rate, so that they do not all come at once.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache.errors import QueueFull
from ragcache_api.http.errors import HTTPProblem

LOOKAHEAD = 0.25
"""Requests that are let in beyond those that the engine runs, as a share. They retrieve and lease
states meanwhile, so that the engine does not run empty."""
_MEASURED = 128  # latest ended requests that the rate is measured over
_FEWEST = 8  # ended requests from which a first rate is known
_KEPT_CALLERS = 1024
_LONGEST_RETRY = 60.0  # seconds, since many refused requests do not come again

Clock = Callable[[], float]
"""Returns seconds, as `time.monotonic`."""


@dataclass(order=True, slots=True)
class Ticket:
    """The place of one request."""

    start: float
    """Turn of the request, in the virtual time in which all callers advance equally."""
    number: int
    """Order of arrival, among equal turns."""
    caller: str = field(compare=False)
    weight: int = field(compare=False)
    """Number of choices of all prompts."""
    started: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set when the request may run."""
    begun: float = field(default=0.0, compare=False)
    """Time at which it was set."""


class ServiceRate:
    """Rate at which a full service ends choices: its slots divided by their mean duration.

    The law is Little's. Requests that began together end together, and a count of ends would show
    long pauses and short peaks.
    """

    def __init__(self, slots: int) -> None:
        """Make a rate that is not known yet. slots: choices that run at once."""
        self.per_second: float | None = None
        """Choices per second. None until enough requests have ended."""
        self._slots = slots
        self._ended: deque[tuple[float, int]] = deque(maxlen=_MEASURED)

    def record(self, seconds: float, weight: int) -> None:
        """Record the duration of a request that has ended while others wait."""
        self._ended.append((seconds * weight, weight))
        total = sum(each for each, _ in self._ended)
        if len(self._ended) >= _FEWEST and total > 0:
            self.per_second = self._slots * sum(weight for _, weight in self._ended) / total


class AdmissionQueue:
    """Lets requests in, for use in the service's event loop.

    Example:
        >>> queue = AdmissionQueue(slots=1)
        >>> first, second = queue.enter("ada"), queue.enter("bob")
        >>> queue.leave(first)
        >>> second.started.is_set()
        True
    """

    def __init__(
        self,
        slots: int = sys.maxsize,
        seconds: float = math.inf,
        places: int = sys.maxsize,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make an empty queue.

        Args:
            slots: Most choices that run at once.
            seconds: Longest expected wait of an accepted request.
            places: Most requests that wait.
            clock: The clock of the measured rate.
        """
        self._slots, self._seconds, self._places, self._clock = slots, seconds, places, clock
        self._waiting: list[Ticket] = []
        self._running = 0
        self._number = 0
        self._turn = 0.0  # of the last request that was let in
        self._next_turn: dict[str, float] = {}  # of each caller's next request
        self._rate = ServiceRate(slots)
        self._promised: dict[str, float] = {}  # when each caller's next refused one may come again
        self.refused = 0
        """Number of requests that would have waited too long."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def enter(self, caller: str, weight: int = 1) -> Ticket:
        """Take a place for a request, whose `Ticket.started` is set at its turn.

        Args:
            caller: Name of the caller, such as the id of its key.
            weight: Number of choices of all prompts.

        Raises:
            HTTPProblem: (503) The request would wait longer than `seconds`.
            QueueFull: As many requests wait as the queue has places.
        """
        start = max(self._turn, self._next_turn.get(caller, 0.0))
        ticket = Ticket(start, self._number, caller, weight)
        if self._waiting or self._running >= self._slots:
            self._check_wait(ticket)
        self._number += 1
        self._next_turn[caller] = start + weight
        insort(self._waiting, ticket)
        self._let_in()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Free the place of a request that has ended, or whose client has left."""
        if not ticket.started.is_set():
            self._waiting.remove(ticket)
            return
        self._running -= ticket.weight
        if self._waiting:
            self._rate.record(self._clock() - ticket.begun, ticket.weight)
        self._let_in()

    def expected_wait(self, ticket: Ticket) -> float:
        """Return the seconds until a request's turn, or 0 while no rate is known."""
        rate = self._rate.per_second
        ahead = sum(other.weight for other in self._waiting if other < ticket)
        return 0.0 if rate is None else (ahead + 1) / rate

    def _check_wait(self, ticket: Ticket) -> None:
        if len(self._waiting) >= self._places:
            raise QueueFull(f"{len(self._waiting)} requests wait already; try again later")
        wait = self.expected_wait(ticket)
        if wait > self._seconds:
            self.refused += 1
            retry = self._promise(wait - self._seconds, ticket)
            raise HTTPProblem(
                503,
                "overloaded",
                f"the request would wait {wait:.0f} s for its turn, and at most "
                f"{self._seconds:g} s are allowed (setting queue_seconds); try again in {retry} s",
                {"Retry-After": str(retry)},
            )

    def _promise(self, excess: float, ticket: Ticket) -> int:
        """Return the seconds after which a refused request finds a place.

        That is when its expected wait has fallen by `excess` seconds, and after all requests of its
        caller that were refused before it have come again.
        """
        now, caller = self._clock(), ticket.caller
        at = max(self._promised.get(caller, 0.0), now + excess)
        callers = len({each.caller for each in self._waiting} | {caller})
        following = at + ticket.weight * callers / (self._rate.per_second or 1.0)
        self._promised[caller] = min(following, now + _LONGEST_RETRY)
        self._promised = _latest(self._promised, now)
        return max(1, math.ceil(min(at - now, _LONGEST_RETRY)))

    def _let_in(self) -> None:
        while self._waiting and self._running < self._slots:
            ticket = self._waiting.pop(0)
            self._turn = ticket.start
            self._running += ticket.weight
            ticket.begun = self._clock()
            ticket.started.set()
        self._next_turn = _latest(self._next_turn, self._turn)


def _latest(times: dict[str, float], now: float) -> dict[str, float]:
    """Return the times of callers. Of many callers, only times after `now`."""
    if len(times) <= _KEPT_CALLERS:
        return times
    return {caller: time for caller, time in times.items() if time > now}
