"""Where loading states becomes quicker than computing them."""

from __future__ import annotations

from collections.abc import Sequence


def break_even_tokens(
    tokens: Sequence[int], compute_s: Sequence[float], load_s: Sequence[float]
) -> float | None:
    """The length of a module from which on loading is quicker, in tokens.

    tokens: lengths that were measured, ascending, with the seconds of either way. Between two of
    them the difference of the ways is taken as linear. None where loading is slower at the longest;
    the shortest where loading is quicker at all.
    """
    gains = [compute - load for compute, load in zip(compute_s, load_s, strict=True)]
    if not gains or gains[-1] <= 0:
        return None
    for at in range(len(gains) - 1, 0, -1):
        below, above = gains[at - 1], gains[at]
        if below <= 0:
            share = -below / (above - below)
            return tokens[at - 1] + share * (tokens[at] - tokens[at - 1])
    return float(tokens[0])


def break_even_bandwidth(nbytes: int, compute_s: float) -> float:
    """Bytes a second below which a module of `nbytes` is computed sooner than loaded."""
    return nbytes / compute_s
