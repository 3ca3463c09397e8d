"""Encoding: from tokens to states, many modules in one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.engine.context import Segment
from ragcache.engine.layout import Work
from ragcache.engine.private import Room
from ragcache.models import LanguageModel
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """A run of tokens to encode from position `start`, seeing `root` (the preamble) if given.

    Without a root this is Prompt Cache's independent encoding (§3.3); with one, the attention
    sink and the instructions stand where the model expects them. `position_ids` ascend from
    `start`; None where they have no gaps.
    """

    token_ids: Sequence[int]
    start: int = 0
    root: Segment | None = None
    position_ids: Sequence[int] | None = None

    @property
    def positions(self) -> Sequence[int]:
        if self.position_ids is not None:
            return self.position_ids
        return range(self.start, self.start + len(self.token_ids))


class Encoding:
    """A job under way, computed in portions of any size."""

    def __init__(self, model: LanguageModel, job: EncodeJob) -> None:
        self.job = job
        self.room = Room.allocate(model, len(job.token_ids))

    @property
    def pending(self) -> int:
        return len(self.job.token_ids) - self.room.length

    def work(self, count: int) -> Work:
        begin = self.room.length
        here = slice(begin, begin + count)
        root = () if self.job.root is None else (self.job.root,)
        tokens, positions = self.job.token_ids[here], self.job.positions[here]
        return Work(root, self.room, tokens, positions, wants_logits=False)

    def computed(self, count: int) -> None:
        begin = self.room.length
        self.room.advance(self.job.positions[begin : begin + count])

    def states(self) -> KVStates:
        assert self.pending == 0
        return self.room.as_states(self.job.start)
