"""Admission of requests: who runs now, who waits, and who is told to come again later.

Callers take turns: a request's place depends on how many of its own caller wait, so that a caller
with a thousand requests delays one with a single request by one request (start-time fair queueing,
Goyal et al., 1996). A request that would wait too long is refused at once. How long follows from
its place and from the rate at which requests ended while others waited. Refused requests are told
times to come again at that rate, one after another, so that they do not all come at once.
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
from itertools import islice

from ragcache.errors import QueueFull
from ragcache_api.http.errors import HTTPProblem

LOOKAHEAD = 0.25
"""Requests that are let in beyond those that the engine runs, as a share. They retrieve and lease
states meanwhile, so that the engine does not run empty."""
_MEASURED = 128  # latest ended requests that the rate is measured over, or four times the slots
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


class ServiceRate:
    """Rate at which the service ends requests while others wait: its capacity.

    Requests that began together end together. So a rate that is known stays until as many choices
    as run at once have ended: the first few of them would make the service look slow.
    """

    def __init__(self, slots: int) -> None:
        """Make a rate that is not known yet. slots: most choices that run at once."""
        self.per_second: float | None = None
        """Choices per second. None until enough requests have ended."""
        self._slots = slots
        self._ended: deque[tuple[float, int]] = deque(maxlen=max(_MEASURED, min(4 * slots, 4096)))

    def begin(self, now: float) -> None:
        """Begin a period in which requests wait. The last rate stays until it is measured anew."""
        self._ended.clear()
        self._ended.append((now, 0))

    def record(self, now: float, weight: int) -> None:
        """Record that a request has ended while others wait."""
        self._ended.append((now, weight))
        seconds = now - self._ended[0][0]
        ended = sum(weight for _, weight in islice(self._ended, 1, None))
        known = self.per_second is not None
        if seconds > 0 and len(self._ended) > _FEWEST and (ended >= self._slots or not known):
            self.per_second = ended / seconds


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
        self._promised = 0.0  # time at which the next refused request may come again
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
        if not self._waiting:
            self._rate.begin(self._clock())
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
            self._rate.record(self._clock(), ticket.weight)
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
            retry = self._promise(wait - self._seconds, ticket.weight)
            raise HTTPProblem(
                503,
                "overloaded",
                f"the request would wait {wait:.0f} s for its turn, and at most "
                f"{self._seconds:g} s are allowed (setting queue_seconds); try again in {retry} s",
                {"Retry-After": str(retry)},
            )

    def _promise(self, excess: float, weight: int) -> int:
        """Return the seconds after which a refused request finds a place.

        That is when its expected wait has fallen by `excess` seconds, and after all requests that
        were refused before it have come again.
        """
        now = self._clock()
        at = max(self._promised, now + excess)
        self._promised = min(at + weight / (self._rate.per_second or 1.0), now + _LONGEST_RETRY)
        return max(1, math.ceil(at - now))

    def _let_in(self) -> None:
        while self._waiting and self._running < self._slots:
            ticket = self._waiting.pop(0)
            self._turn = ticket.start
            self._running += ticket.weight
            ticket.started.set()
        if len(self._next_turn) > _KEPT_CALLERS:
            late = {name: turn for name, turn in self._next_turn.items() if turn > self._turn}
            self._next_turn = late
