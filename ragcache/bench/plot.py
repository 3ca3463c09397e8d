"""Plots of benchmark results. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragcache.errors import MissingExtra


def plot_decode(result: dict[str, Any], file: Path) -> None:
    """Left: seconds of a step, way by way. Right: attention alone, measured over theory."""
    figure, (left, right) = _figure(2)
    sides = {"shared": "2 key heads" if result["shared_mha"] else "shared"}
    if result["shared_mha"]:
        sides["shared_mha"] = "as many key heads"
    width = 0.8 / len(sides)
    for number, (side, label) in enumerate(sides.items()):
        steps = result[side]["step_s"]
        places = [at + number * width for at in range(len(steps))]
        left.bar(places, list(steps.values()), width, label=label)
        left.set_xticks([at + 0.4 - width / 2 for at in range(len(steps))], list(steps))
    left.set_ylabel("seconds of a decoding step")
    left.set_yscale("log")
    left.legend(frameon=False)
    by_batch: dict[int, list[dict[str, Any]]] = {}
    for row in result["relay"]:
        by_batch.setdefault(row["batch"], []).append(row)
    for batch, rows in by_batch.items():
        shared = [row["shared"] for row in rows]
        [line] = right.plot(shared, [row["speedup"] for row in rows], "o-", label=f"batch {batch}")
        theory = [row["theory"] for row in rows]
        right.plot(shared, theory, "--", color=line.get_color(), alpha=0.6)
    right.set_xlabel("shared tokens")
    right.set_ylabel("speedup of attention (dashed: theory)")
    right.legend(frameon=False)
    _save(figure, file)


def plot_serve(result: dict[str, Any], file: Path) -> None:
    """Normalised latency and time to first token against the rate, in both modes."""
    figure, (left, right) = _figure(2)
    for mode, loads in result["loads"].items():
        rates = [load["rate"] for load in loads]
        [line] = left.plot(rates, [load["normalised"] for load in loads], "o-", label=mode)
        left.axvline(result["knee"][mode], color=line.get_color(), ls=":", alpha=0.6)
        right.plot(rates, [load["ttft_p50"] for load in loads], "o-", label=f"{mode}, p50")
        p99 = [load["ttft_p99"] for load in loads]
        right.plot(rates, p99, "o--", color=line.get_color(), label=f"{mode}, p99")
    left.axhline(result["limit_s_a_token"], color="grey", lw=0.8)
    left.set_ylabel("normalised latency, seconds a token")
    right.set_ylabel("time to first token, seconds")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests a second")
        axes.legend(frameon=False)
    _save(figure, file)


def plot_tiers(result: Mapping[str, Any], file: Path) -> None:
    """Bars of hit rates, bandwidths and errors, in a format that the suffix of `file` names.

    Raises `MissingExtra` without matplotlib.
    """
    figure, (rates, speeds, errors) = _figure(3)
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
    _save(figure, file)


def _figure(columns: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "plots need matplotlib: install it with `pip install 'ragcache[plot]'`"
        ) from error
    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    return figure, figure.subplots(1, columns)


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=150)


def _bars(axes: Any, title: str, values: Mapping[str, float]) -> None:
    names = list(values)[::-1]
    axes.barh(names, [values[name] for name in names], color="#4878a8")
    for row, name in enumerate(names):
        axes.annotate(f" {values[name]:.3g}", (values[name], row), va="center")
    axes.set_title(title)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
