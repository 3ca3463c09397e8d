"""Times, sizes and rates as people say them."""

from __future__ import annotations

import math


def span(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bandwidth(bytes_per_second: float) -> str:
    """Megabytes a second."""
    rate = bytes_per_second / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 10 else f"{rate:.2g} MB/s"


def percent(share: float) -> str:
    """A share of one, to a whole hundredth unless it is smaller."""
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2f}%"


def setting(nbytes: int) -> str:
    """Bytes as a setting is written, rounded up."""
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(10 * nbytes / size) / 10:g}{unit}"
