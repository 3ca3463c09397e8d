"""Free extents of a range of bytes, handed out first fit."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeExtents:
    """The free extents begin:end of a range of bytes, in order. No two of them touch."""

    def __init__(self, total: int) -> None:
        self._begins: list[int] = [0] if total else []
        self._ends: dict[int, int] = {0: total} if total else {}

    @property
    def largest(self) -> int:
        """Length of the longest free extent."""
        return max((end - begin for begin, end in self._ends.items()), default=0)

    def take(self, nbytes: int) -> int | None:
        """Allocate the first free extent of `nbytes`. Returns its begin, or None."""
        for number, begin in enumerate(self._begins):
            end = self._ends[begin]
            if end - begin < nbytes:
                continue
            del self._begins[number], self._ends[begin]
            self._add(begin + nbytes, end)
            return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free an allocated extent."""
        end = begin + nbytes
        after = bisect_left(self._begins, begin)
        assert after == len(self._begins) or end <= self._begins[after], "bytes are freed twice"
        if after:
            before = self._begins[after - 1]
            assert self._ends[before] <= begin, "bytes are freed twice"
            if self._ends[before] == begin:
                del self._begins[after - 1], self._ends[before]
                begin = before
        if end in self._ends:
            following, end = end, self._ends[end]
            self._begins.remove(following)
            del self._ends[following]
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        if begin < end:
            insort(self._begins, begin)
            self._ends[begin] = end
