"""The pool of private states: fixed chunks of tokens, allocated once and handed out by number.

ChunkAttention §3.1: memory for a sequence's keys and values comes from a pool of equal chunks and
goes back to it, so that at most chunk - 1 tokens of a sequence's room stay unused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import torch
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.models import LanguageModel

CHUNK = 64
"""Tokens of a chunk (ChunkAttention §4)."""


class ChunkPool:
    """keys, values: [L, Hkv, N·chunk, D]. Chunk c is tokens c·chunk to (c+1)·chunk of every layer.

    Chunks of consecutive numbers are therefore one contiguous run of tokens. Not thread-safe: it
    belongs to the engine's thread.
    """

    def __init__(self, keys: Tensor, values: Tensor, chunk: int = CHUNK) -> None:
        assert keys.shape == values.shape
        assert keys.shape[2] % chunk == 0
        self.keys, self.values, self.chunk = keys, values, chunk
        self.total = keys.shape[2] // chunk
        self._free = _FreeRuns(self.total)

    @classmethod
    def create(
        cls,
        model: LanguageModel,
        nbytes: int,
        chunk: int = CHUNK,
        device: torch.device | None = None,
    ) -> ChunkPool:
        """A pool of as many chunks as `nbytes` hold, in the model's shape and dtype.

        device: None is the model's; on `meta` the chunks are only counted.

        Raises `ConfigurationError` where that is not even one.
        """
        bytes_per_chunk = chunk * model.bytes_per_token
        total = nbytes // bytes_per_chunk
        if total < 1:
            raise ConfigurationError(
                f"a pool of {nbytes} bytes for requests' own states holds no chunk; one chunk of "
                f"{chunk} tokens takes {bytes_per_chunk} bytes with this model"
            )
        return cls(*model.new_states(total * chunk, device), chunk)

    @property
    def free_count(self) -> int:
        """How many chunks can be allocated."""
        return self._free.count

    @property
    def used_count(self) -> int:
        """How many chunks are allocated."""
        return self.total - self._free.count

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of one chunk's keys and values over all layers."""
        return (self.keys.nbytes + self.values.nbytes) // self.total

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Numbers of `count` free chunks, or None where fewer are free (then none is taken).

        after: a chunk in use that the new ones shall continue. Those that directly follow it come
        first; the rest is one consecutive run where there is one, else the lowest numbers.
        """
        assert count >= 0
        if count > self._free.count:
            return None
        taken = [] if after is None else self._free.take_at(after + 1, count)
        taken += self._free.take_run(count - len(taken))
        taken += self._free.take_lowest(count - len(taken))
        for chunk_id in taken:
            self._clear(chunk_id)
        return taken

    def free(self, chunk_ids: Iterable[int]) -> None:
        """Gives chunks back. Each must be in use."""
        for chunk_id in chunk_ids:
            assert 0 <= chunk_id < self.total, f"the pool has no chunk {chunk_id}"
            self._free.give_back(chunk_id)

    def _clear(self, chunk_id: int) -> None:
        """What a chunk holds beyond its tokens is masked, but must be finite for that."""
        here = slice(chunk_id * self.chunk, (chunk_id + 1) * self.chunk)
        self.keys[:, :, here] = 0
        self.values[:, :, here] = 0

    def copy(self, source: int, target: int) -> None:
        """Writes the states of chunk `source` to chunk `target`, in all layers."""
        begin, into = source * self.chunk, target * self.chunk
        for states in (self.keys, self.values):
            chunk = states[:, :, begin : begin + self.chunk]  # [L, Hkv, chunk, D]
            states[:, :, into : into + self.chunk] = chunk


class _FreeRuns:
    """Free numbers as maximal runs begin:end, sorted by begin and by length.

    Finding a run is a binary search; the lists that shift hold one entry a run, not a chunk.
    """

    def __init__(self, total: int) -> None:
        self.count = 0
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, begin)
        self._add(0, total)

    def take_at(self, begin: int, limit: int) -> list[int]:
        """Up to `limit` numbers from `begin` on. Nothing where no free run begins there."""
        end = min(self._ends.get(begin, begin), begin + limit)
        return self._take(begin, end)

    def take_run(self, count: int) -> list[int]:
        """`count` consecutive numbers of the shortest run that holds them, or nothing."""
        index = bisect_left(self._by_length, (count, 0))
        if not count or index == len(self._by_length):
            return []
        begin = self._by_length[index][1]
        return self._take(begin, begin + count)

    def take_lowest(self, count: int) -> list[int]:
        """The `count` lowest numbers."""
        taken: list[int] = []
        while len(taken) < count:
            taken += self.take_at(self._begins[0], count - len(taken))
        return taken

    def give_back(self, number: int) -> None:
        begin, end = number, number + 1
        index = bisect_right(self._begins, number)
        if index:
            before = self._begins[index - 1]
            assert self._ends[before] <= number, f"chunk {number} is freed twice"
            if self._ends[before] == begin:
                self._remove(before)
                begin = before
        if end in self._ends:
            following, end = end, self._ends[end]
            self._remove(following)
        self._add(begin, end)

    def _take(self, begin: int, end: int) -> list[int]:
        if begin == end:
            return []
        run_end = self._remove(begin)
        self._add(end, run_end)
        return list(range(begin, end))

    def _add(self, begin: int, end: int) -> None:
        if begin == end:
            return
        insort(self._begins, begin)
        self._ends[begin] = end
        insort(self._by_length, (end - begin, begin))
        self.count += end - begin

    def _remove(self, begin: int) -> int:
        end = self._ends.pop(begin)
        del self._begins[bisect_left(self._begins, begin)]
        del self._by_length[bisect_left(self._by_length, (end - begin, begin))]
        self.count -= end - begin
        return end
