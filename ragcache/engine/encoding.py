"""Encodings: modules whose states are computed, in portions, in the same steps as requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV, EncodedKV
from ragcache.engine.handle import RequestChannel, Waiter
from ragcache.engine.request import Segment, check_composes, check_tokens
from ragcache.machine import new_event
from ragcache.models import CausalLM
from ragcache.states import Arrival, KVStates


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """A module to encode.

    Without a root it is encoded independently, as in Prompt Cache (§3.3). With a root, the
    attention sink and the instructions are where the model expects them.
    """

    token_ids: Sequence[int]
    """Tokens of the module."""
    start: int = 0
    """Position of the first token."""
    root: Segment | None = None
    """Preamble that the tokens attend to. None encodes them independently."""
    position_ids: Sequence[int] | None = None
    """Ascending positions from `start` on. Defaults to consecutive ones."""

    @property
    def positions(self) -> Sequence[int]:
        """Position of each token."""
        if self.position_ids is not None:
            return self.position_ids
        return range(self.start, self.start + len(self.token_ids))

    def computed_bytes(self, model: CausalLM) -> int:
        """Memory of the states while they are computed."""
        return len(self.token_ids) * model.computed_bytes_per_token + model.map_bytes


def check_job(job: EncodeJob, model: CausalLM) -> None:
    """Raise `InvalidRequest`, `PromptTooLong` or `UnsupportedModel` for a job that the model cannot
    compute."""
    check_composes(model)
    check_tokens(job.token_ids, job.positions, vocabulary=model.vocabulary, window=model.window)


class Encoding:
    """A job in progress, computed in portions of any size."""

    def __init__(self, model: CausalLM, job: EncodeJob) -> None:
        self.job = job
        kind = EncodedKV if model.recurrent_bytes else ContiguousKV
        self.kv = kind.allocate(model, len(job.token_ids))
        root = None if job.root is None else job.root.states.recurrent
        if isinstance(self.kv, EncodedKV) and root is not None:
            self.kv.root = (root,)
        self.nbytes = job.computed_bytes(model)
        self._steps = 0  # launched, and not computed yet

    @property
    def pending(self) -> int:
        """Number of tokens for which no step has been launched."""
        return len(self.job.token_ids) - self.kv.length

    @property
    def complete(self) -> bool:
        """Whether all states have been computed."""
        return not self.pending and not self._steps

    def next_chunk(self, count: int) -> ScheduledChunk:
        """The next `count` tokens, as a chunk of a step."""
        begin = self.kv.length
        here = slice(begin, begin + count)
        root = () if self.job.root is None else (self.job.root,)
        tokens, positions = self.job.token_ids[here], self.job.positions[here]
        return ScheduledChunk(root, self.kv, tokens, positions, wants_logits=False)

    def launched(self, count: int) -> None:
        """Record that a step with the next `count` tokens was launched."""
        begin = self.kv.length
        self.kv.advance(self.job.positions[begin : begin + count])
        self._steps += 1

    def computed(self) -> None:
        """Record that the oldest launched step has been computed."""
        self._steps -= 1

    def states(self) -> KVStates:
        assert self.complete
        return self.kv.as_states(self.job.start)


_TAKEN = KVStates(torch.empty(0), torch.empty(0), 0)


class StatesChannel(RequestChannel[KVStates, None]):
    """Hands each module's states to its caller once.

    An iteration takes the states, so that their memory ends with the caller. The channel wakes the
    engine when a caller takes states or starts to wait.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._untaken = 0

    @property
    def untaken_bytes(self) -> int:
        """Bytes of finished states that the caller has not taken."""
        return 0 if self.cancelled else self._untaken

    def put(self, event: KVStates) -> None:
        with self._lock:
            self._untaken += event.nbytes
        super().put(event)

    def event(self, number: int) -> KVStates:
        with self._lock:
            states, self._events[number] = self._events[number], _TAKEN
            assert states is not _TAKEN, "encoded states are handed over once"
            self._untaken -= states.nbytes
        self._wake()
        return states

    def add_waiter(self, waiter: Waiter) -> None:
        super().add_waiter(waiter)
        self._wake()


def with_arrival(states: KVStates) -> KVStates:
    """Attach an event that marks the end of the states' computation on a GPU."""
    if not states.keys.is_cuda:
        return states
    device = states.keys.device
    with torch.cuda.device(device):
        event = new_event()
        stream = torch.cuda.current_stream(device)
        event.record(stream)
    return replace(states, arrival=Arrival([event], stream=stream))
