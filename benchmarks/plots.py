"""Plots of the figures of `ragcache bench`, drawn from its JSON.

python benchmarks/plots.py decode benchmarks/results/decode-cpu.json docs/images/decode.png
python benchmarks/plots.py serve benchmarks/results/serve-cpu.json docs/images/serve.png
python benchmarks/plots.py conversations FILE.json FILE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import new_figure


def draw_decode(result: dict[str, Any]) -> Any:
    """Seconds of a step, way by way."""
    figure, [axes] = new_figure(1)
    steps = result["shared"]["step_s"]
    axes.bar(list(steps), list(steps.values()))
    axes.set_ylabel("seconds of a decoding step")
    axes.set_yscale("log")
    return figure


def draw_serve(result: dict[str, Any]) -> Any:
    """Normalized latency and time to first token against the rate, in both modes."""
    figure, (left, right) = new_figure(2)
    for mode, loads in result["loads"].items():
        rates = [load["rate"] for load in loads]
        [line] = left.plot(rates, [load["normalized"] for load in loads], "o-", label=mode)
        left.axvline(result["knee"][mode], color=line.get_color(), ls=":", alpha=0.6)
        right.plot(rates, [load["ttft_p50"] for load in loads], "o-", label=f"{mode}, p50")
        p99 = [load["ttft_p99"] for load in loads]
        right.plot(rates, p99, "o--", color=line.get_color(), label=f"{mode}, p99")
    left.axhline(result["limit_s_a_token"], color="gray", lw=0.8)
    left.set_ylabel("normalized latency, seconds a token")
    right.set_ylabel("time to first token, seconds")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests a second")
        axes.legend(frameon=False)
    return figure


def draw_conversations(result: dict[str, Any]) -> Any:
    """Draw the share of earlier tokens that is computed again, turn by turn, and turns a second."""
    kinds = [name for name in ("chats", "agents") if f"{name}_by_storage" in result]
    figure, columns = new_figure(2 * len(kinds))
    for place, name in enumerate(kinds):
        left, right = columns[2 * place : 2 * place + 2]
        sides = result[f"{name}_by_storage"]
        for storage, label in (("none", "pool alone"), ("memory", "kept states")):
            shares = sides[storage]["computed_share_by_turn"]
            left.plot(range(2, len(shares) + 1), shares[1:], "o-", label=label)
            right.bar(label, sides[storage]["turns_per_second"])
        left.set_xlabel(f"turn of a session, {name}")
        left.set_ylabel("earlier tokens computed again, share")
        left.set_ylim(0, 1)
        left.legend(frameon=False)
        right.set_ylabel("turns a second")
    return figure


KINDS = {"decode": draw_decode, "serve": draw_serve, "conversations": draw_conversations}
"""Functions that draw the figures of each command of `ragcache bench`."""


def main(kind: str, result: str, image: str) -> None:
    """Draw one kind of plot from a file of figures."""
    figures = json.loads(Path(result).read_text(encoding="utf-8"))
    KINDS[kind](figures).savefig(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
