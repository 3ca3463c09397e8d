"""The queue of requests: turns of callers, the measured rate, and refusals under overload."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import QueueFull
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.admission import AdmissionQueue, ServiceRate, Ticket
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.requests import RequestRegistry
from tests.api.http.asgi import Caller, events
from tests.api.http.conftest import LEAVE, client_of

SLOTS = 4  # requests of one second each, so that the service ends four a second
ASKED = {"question": LEAVE, "collection": "notes", "max_tokens": 1}


@dataclass
class Simulation:
    """A service with a clock of its own, in which every request takes as long."""

    seconds: float = 10.0
    slots: int = SLOTS
    duration: float = 1.0
    now: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    retry_after: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(self.slots, self.seconds, clock=lambda: self.now)
        self._running: list[tuple[float, Ticket]] = []
        self._arrived: dict[int, float] = {}
        self._waiting: list[Ticket] = []

    def arrive(self, caller: str) -> None:
        try:
            ticket = self.queue.enter(caller)
        except HTTPProblem as error:
            self.refused[caller] += 1
            self.retry_after.append(int(error.info.headers["Retry-After"]))
            return
        self._arrived[ticket.number] = self.now
        self._waiting.append(ticket)
        self._begin()

    def run(self, until: float) -> None:
        """End the requests that end before a time."""
        while self._running and self._running[0][0] <= until:
            self.now, ticket = heapq.heappop(self._running)
            self.queue.leave(ticket)
            self._begin()
        self.now = until

    def _begin(self) -> None:
        for ticket in [each for each in self._waiting if each.started.is_set()]:
            self._waiting.remove(ticket)
            waited = self.now - self._arrived[ticket.number]
            self.waits.setdefault(ticket.caller, []).append(waited)
            heapq.heappush(self._running, (self.now + self.duration, ticket))


def load(simulation: Simulation, seconds: float, **per_second: float) -> None:
    """Let requests of each caller arrive at a constant rate."""
    arrivals = sorted(
        (number / rate, caller)
        for caller, rate in per_second.items()
        for number in range(int(seconds * rate))
    )
    begun = simulation.now
    for at, caller in arrivals:
        simulation.run(begun + at)
        simulation.arrive(caller)


def test_the_wait_is_bounded_under_overload() -> None:
    simulation = Simulation()
    load(simulation, 120, ada=2.3 * SLOTS)
    waits = simulation.waits["ada"]
    assert max(waits) <= simulation.seconds + 1
    assert max(waits) > simulation.seconds - 2
    assert len(waits) == pytest.approx(120 * SLOTS, rel=0.05)  # the service never idles
    assert simulation.refused["ada"] > 400
    simulation.run(simulation.now + simulation.seconds + 2)
    assert simulation.queue.waiting == 0


def test_nothing_is_refused_below_the_capacity() -> None:
    simulation = Simulation()
    load(simulation, 120, ada=0.9 * SLOTS)
    assert not simulation.refused


def test_a_request_that_comes_again_in_time_is_accepted() -> None:
    simulation = Simulation()
    load(simulation, 30, ada=2.3 * SLOTS)
    refused = simulation.refused.total()
    simulation.arrive("ada")
    assert simulation.refused.total() == refused + 1
    simulation.run(simulation.now + simulation.retry_after[-1])
    simulation.arrive("ada")
    assert simulation.refused.total() == refused + 1


def test_refused_requests_find_a_place_when_they_were_told() -> None:
    """They come at the rate of the service, not all at once."""
    simulation = Simulation()
    load(simulation, 30, ada=2.3 * SLOTS)
    begun, told = simulation.now, len(simulation.retry_after)
    for _ in range(100):
        simulation.arrive("ada")
    refused = simulation.refused.total()
    for after in sorted(simulation.retry_after[told:]):
        simulation.run(max(simulation.now, begun + after))
        simulation.arrive("ada")
    assert simulation.refused.total() == refused


def test_no_refused_request_is_told_to_wait_for_minutes() -> None:
    simulation = Simulation()
    load(simulation, 300, ada=20 * SLOTS)
    assert max(simulation.retry_after) == 60
    simulation.run(simulation.now + 60)
    told = len(simulation.retry_after)
    load(simulation, 20, ada=2.3 * SLOTS)
    assert simulation.retry_after[told] == 1, "an overload that has ended does not count"


def test_requests_that_end_together_make_no_slow_service() -> None:
    """64 choices run at once for 16 seconds: the first eight that end tell the rate."""
    rate = ServiceRate(64)
    for _ in range(8):
        assert rate.per_second is None
        rate.record(16.0, 1)
    assert rate.per_second == 4
    for _ in range(128):
        rate.record(8.0, 2)
    assert rate.per_second == 8


def test_a_caller_with_less_than_its_share_is_not_refused() -> None:
    """Even if 80 requests end together after 24 seconds, in which its own pile up."""
    simulation = Simulation(slots=80, duration=24.0)
    capacity = 80 / 24
    load(simulation, 60, heavy=2 * capacity, light=0.3 * capacity)
    assert simulation.refused.keys() == {"heavy"}


def test_each_caller_is_told_its_own_time_to_come_again() -> None:
    """A caller with thousands of refused requests delays no other one."""
    simulation = Simulation()
    load(simulation, 60, ada=20 * SLOTS)
    told = len(simulation.retry_after)
    assert simulation.retry_after[-1] == 60
    load(simulation, 1, bob=20 * SLOTS)
    assert max(simulation.retry_after[told:]) <= 30


def test_callers_with_few_requests_wait_for_few_under_overload() -> None:
    simulation = Simulation()
    load(simulation, 60, ada=4 * SLOTS, bob=1, cleo=0.5)
    assert simulation.refused.keys() == {"ada"}
    assert max(simulation.waits["bob"] + simulation.waits["cleo"]) <= 2


def test_callers_share_an_overloaded_service_equally() -> None:
    simulation = Simulation()
    load(simulation, 60, ada=4 * SLOTS, bob=2 * SLOTS)
    served = {caller: len(waits) for caller, waits in simulation.waits.items()}
    assert served["ada"] == pytest.approx(served["bob"], rel=0.1)


def test_a_request_with_many_prompts_counts_as_many() -> None:
    queue = AdmissionQueue(slots=1)
    running = queue.enter("ada")
    batch, next_one, other = queue.enter("ada", 100), queue.enter("ada"), queue.enter("bob")
    queue.leave(running)
    assert other.started.is_set() != batch.started.is_set()
    queue.leave(other if other.started.is_set() else batch)
    assert not next_one.started.is_set()


def test_a_request_that_leaves_gives_its_place_up() -> None:
    queue = AdmissionQueue(slots=1, places=1)
    running, gone = queue.enter("ada"), queue.enter("ada")
    with pytest.raises(QueueFull, match="1 requests wait"):
        queue.enter("ada")
    queue.leave(gone)
    waiting = queue.enter("ada")
    queue.leave(running)
    assert waiting.started.is_set()


def overload(requests: RequestRegistry) -> list[Ticket]:
    """Fill the queue of a service that ends one request a second, and return the tickets."""
    seconds = count()
    queue = requests.admission = AdmissionQueue(1, 10.0, clock=lambda: next(seconds))
    tickets = [queue.enter("other") for _ in range(12)]
    for _ in range(10):
        queue.leave(tickets.pop(0))
    with suppress(HTTPProblem):
        while True:
            tickets.append(queue.enter("testclient"))
    return tickets


def metrics(client: TestClient) -> str:
    return client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
def test_an_overloaded_service_says_when_to_come_again(
    rag: RagCache, path: str, stream: bool
) -> None:
    chat = {"model": "ragcache-reader", "messages": [{"role": "user", "content": LEAVE}]}
    body = {**(ASKED if path == "/v1/answers" else chat), "max_tokens": 1, "stream": stream}
    with client_of(rag) as client:
        requests = client.app.state.service.requests  # type: ignore[attr-defined]
        tickets = overload(requests)
        refused = client.post(path, json=body)
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert "setting queue_seconds" in refused.text
        assert f"ragcache_refused_total {requests.admission.refused}.0" in metrics(client)
        assert f"ragcache_waiting_requests {requests.admission.waiting}.0" in metrics(client)
        for ticket in tickets:
            requests.admission.leave(ticket)
        assert client.post(path, json=body).status_code == 200
        assert requests.admission.waiting == 0


def test_a_client_that_leaves_while_it_waits_frees_its_place(rag: RagCache) -> None:
    app = create_app(rag, ServiceSettings.read())
    requests = app.state.service.requests
    queue = requests.admission = AdmissionQueue(slots=1)
    running = queue.enter("other")

    async def wait_and_leave() -> str:
        caller = Caller(b'{"question": "Where?", "collection": "notes"}')
        call = asyncio.create_task(caller.call(app, "POST", "/v1/answers"))
        while not queue.waiting:
            await asyncio.sleep(0)
        [active] = requests.active.values()
        state = str(active.state)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return state

    assert asyncio.run(wait_and_leave()) == "waiting"
    assert (queue.waiting, requests.active) == (0, {})
    queue.leave(running)


def test_the_queue_follows_the_settings(rag: RagCache, client: TestClient) -> None:
    running = rag.internals.shared.engine.config.running
    with client_of(rag, queue_seconds=2.5) as own:
        queue = own.app.state.service.requests.admission  # type: ignore[attr-defined]
        assert (queue._seconds, queue._places) == (2.5, 1024)
        assert running < queue._slots <= 2 * running
    assert client.app.state.service.requests.admission._seconds == 10  # type: ignore[attr-defined]


def test_choices_of_a_prompt_count_as_prompts(rag: RagCache) -> None:
    chat = {"model": "ragcache-reader", "messages": [{"role": "user", "content": LEAVE}]}
    several = {"n": 3, "temperature": 1.0, "max_tokens": 1}
    with client_of(rag) as client:
        requests = client.app.state.service.requests  # type: ignore[attr-defined]
        weights = []
        requests.on_end.append(lambda active: weights.append(active.ticket.weight))
        assert client.post("/v1/chat/completions", json=chat | several).status_code == 200
        prompts = {"model": "ragcache-reader", "prompt": ["Where?", "Who?"], **several}
        assert client.post("/v1/completions", json=prompts).status_code == 200
    assert weights == [3, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_times_of_an_answer_include_the_wait_for_its_turn(rag: RagCache, stream: bool) -> None:
    app = create_app(rag, ServiceSettings.read())
    requests = app.state.service.requests
    queue = requests.admission = AdmissionQueue(slots=1)
    running = queue.enter("other")

    async def wait_and_answer() -> tuple[float, dict[str, float]]:
        caller = Caller(json.dumps(ASKED | {"stream": stream}).encode())
        call = asyncio.create_task(caller.call(app, "POST", "/v1/answers"))
        while not queue.waiting:
            await asyncio.sleep(0)
        seen = time.monotonic()
        await asyncio.sleep(0.02)
        waited = time.monotonic() - seen
        queue.leave(running)
        await call
        text = b"".join(each.get("body", b"") for each in caller.told).decode()
        answer = events(text)[-1][1] if stream else json.loads(text)
        return waited, answer["timings"]

    waited, timings = asyncio.run(wait_and_answer())
    assert waited <= timings["queued"] < timings["first_token"] <= timings["total"]
