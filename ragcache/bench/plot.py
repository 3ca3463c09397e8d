"""The figures of `ragcache bench tiers` as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragcache.errors import MissingExtra


def plot_tiers(result: Mapping[str, Any], file: Path) -> None:
    """Bars of hit rates, bandwidths and errors, in a format that the suffix of `file` names.

    Raises `MissingExtra` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("plots need matplotlib: pip install 'ragcache[plot]'") from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    rates, speeds, errors = figure.subplots(1, 3)
    _bars(rates, "share of documents found", result["hit_rate"])
    ways = ("plain", "mapped", "host")
    disk = {
        f"{way}, {state}": result["disk"][state][way] / 1e9
        for state in ("cold", "warm")
        for way in ways
    }
    _bars(speeds, "GB/s from disk", disk)
    kinds = {
        f"{kind} {side}": result["quantised"][kind][f"{side}_error"]
        for kind in ("int8", "fp8")
        for side in ("keys", "values")
    }
    _bars(errors, "error of states", kinds)
    figure.savefig(file)


def _bars(axes: Any, title: str, values: Mapping[str, float]) -> None:
    names = list(values)[::-1]
    axes.barh(names, [values[name] for name in names], color="#4878a8")
    for row, name in enumerate(names):
        axes.annotate(f" {values[name]:.3g}", (values[name], row), va="center")
    axes.set_title(title)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
