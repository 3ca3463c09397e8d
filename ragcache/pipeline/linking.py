"""Contexts of a selection: segments after the preamble, and what is recomputed between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ragcache.engine import Context, Segment
from ragcache.states import KVKey, KVStates


@dataclass(frozen=True, slots=True)
class Run:
    """Modules first:end of a selection that were encoded together: a single one, or a scaffold's.
    token_ids: of all of them."""

    first: int
    end: int
    token_ids: tuple[int, ...]


def recomputed(runs: Sequence[Run], linked: int) -> list[int]:
    """How many tokens of each run are computed again: the first `linked`, but none of the first
    run, which was encoded after the preamble just as it stands."""
    return [min(linked, len(run.token_ids)) if number else 0 for number, run in enumerate(runs)]


def link(
    keys: Sequence[KVKey],
    states: Sequence[KVStates],
    runs: Sequence[Run],
    own: Iterable[int],
    linked: int,
) -> Context:
    """Places the preamble, the runs without gaps, and the own tokens.

    keys, states: of the preamble and then of each run. linked: the first tokens of each run that
    are computed in context and so see what stands before them (EPIC's LegoLink, Hu et al., 2024);
    the run's segment is sliced, not copied.
    """
    segments = [Segment(states[0], 0, str(keys[0]))]
    private: list[tuple[int, int]] = []  # (position, token)
    position = states[0].length
    counts = recomputed(runs, linked)
    for key, kept, run, count in zip(keys[1:], states[1:], runs, counts, strict=True):
        private += enumerate(run.token_ids[:count], position)
        if count == 0:
            segments.append(Segment(kept, position, str(key)))
        elif count < kept.length:
            rest = kept.part(count, kept.length, kept.start + count)
            segments.append(Segment(rest, position + count, f"{key}[{count}:{kept.length}]"))
        position += kept.length
    private += enumerate(own, position)
    positions, token_ids = zip(*private, strict=True)
    return Context(tuple(segments), token_ids, positions, positions[-1] + 1)
