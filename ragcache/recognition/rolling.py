"""Polynomial hashes of every part of a text, modulo 2^64 (Karp and Rabin, 1987), in numpy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

WINDOW = 32
"""Characters of a fingerprint; shorter texts have none."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_INVERSE = pow(_BASE, -1, 2**64)


class Rolling:
    """The hash of text[i:i+n] is the sum of code(text[i+k]) * B^k over k < n.

    One running sum gives them all: the sums up to i+n and up to i differ by the hash times B^i. A
    hash only says where to look; its high bits are the better ones.
    """

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        powers, self._inverses = _powers(max(1, len(text)).bit_length())
        self._sums = np.zeros(len(codes) + 1, dtype=np.uint64)  # [characters + 1]
        np.cumsum(codes * powers[: len(codes)], out=self._sums[1:])

    def windows(self, size: int) -> Hashes:
        """Of every run of `size` characters, in order: [characters - size + 1]."""
        ends = self._sums[size:]
        return (ends - self._sums[: len(ends)]) * self._inverses[: len(ends)]

    def parts(self, starts: Numbers, lengths: Numbers | int) -> Hashes:
        """Of runs that begin and end within the text: [runs]."""
        hashes: Hashes = self._sums[starts + lengths] - self._sums[starts]
        return hashes * self._inverses[starts]


@lru_cache(32)
def _powers(bits: int) -> tuple[Hashes, Hashes]:
    """B^k and B^-k for k < 2^bits."""
    tables = []
    for base in (_BASE, _INVERSE):
        factors = np.full(1 << bits, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors, dtype=np.uint64))
    return tables[0], tables[1]
