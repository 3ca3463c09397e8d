"""The variants that `reuse_variants.py` compares."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReuseVariant:
    """How a prompt is read.

    Attributes:
        states: The states of modules 2..k, or "exact", or "reordered": the whole prompt, computed
            with modules 2..k in reverse order.
        first: Tokens at the front of modules 2..k that are computed: the last number counts for
            all modules after it.
        share: Tokens at the front of modules 2..k that are computed, as many of each, in percent
            of all module tokens.
        last: Tokens at the end of all modules but the last one that are computed.
        chosen: What chooses further runs: "question", "layer" (CacheBlend), "oracle".
        percent: Share of all module tokens that are chosen, in percent.
        bias: Constant on the scores of modules 2..k.
        scale: Factor of their scores.
        rounded: States are rounded to bfloat16.
        halved: All products of the model are computed in bfloat16.
        drift: Factor of the mean deviation of the computed tokens that each module's other states
            are moved by.
        drifting: What is moved: "keys and values" or "values".
    """

    states: str
    first: tuple[int, ...] = (0,)
    share: float = 0.0
    last: int = 0
    chosen: str = ""
    percent: float = 0.0
    bias: float = 0.0
    scale: float = 1.0
    rounded: bool = False
    halved: bool = False
    drift: float = 0.0
    drifting: str = "keys and values"


def _all_variants() -> dict[str, ReuseVariant]:
    rooted, primed = ReuseVariant("rooted"), ReuseVariant("primed")
    primed16 = replace(primed, first=(16,))
    found = {
        "exact": ReuseVariant("exact"), "rooted": rooted, "primed": primed,
        "primed:8": replace(primed, first=(8,)),
        "primed:16": primed16, "primed:24": replace(primed, first=(24,)),
        "primed:32": replace(primed, first=(32,)),
        "primed:64": replace(primed, first=(64,)), "primed:128": replace(primed, first=(128,)),
        "primed, first 5 %": replace(primed, share=5.0),
        "linked:16": replace(rooted, first=(16,)),
        "blend:20": replace(rooted, chosen="layer", percent=20),
        "primed, question 5 %": replace(primed, chosen="question", percent=5),
        "primed, question 10 %": replace(primed, chosen="question", percent=10),
        "primed:8, question 2.5 %": replace(primed, first=(8,), chosen="question", percent=2.5),
        "primed, layer 5 %": replace(primed, chosen="layer", percent=5),
        "primed, oracle 5 %": replace(primed, chosen="oracle", percent=5),
        "primed, oracle 20 %": replace(primed, chosen="oracle", percent=20),
        "primed:32,8": replace(primed, first=(32, 8)),
        "primed:8,16,24": replace(primed, first=(8, 16, 24)),
        "primed:8, last 8": replace(primed, first=(8,), last=8),
        "mean of 2": ReuseVariant("mean2"),
        "mean of 4, question 5 %": ReuseVariant("mean4", chosen="question", percent=5),
        "beyond primed 0.25": ReuseVariant("beyond"),
        "exact of neighbors": ReuseVariant("neighbors"),
        "exact, bfloat16 states": ReuseVariant("exact", rounded=True),
        "exact, bfloat16 products": ReuseVariant("exact", halved=True),
        "exact, other order": ReuseVariant("reordered"),
        "600": ReuseVariant("600"),
    }  # fmt: skip
    behind = {
        "mean of 4": "mean4", "by place": "by place", "900": "900", "own": "own",
        "Chinese": "Chinese", "before": "before", "similar": "similar", "3 similar": "3 similar",
        "mean shift": "shifted", "fitted": "fitted",
    }  # fmt: skip
    for name, states in behind.items():
        found[name] = ReuseVariant(states)
        found[f"{name}, 16"] = ReuseVariant(states, first=(16,))
    for bias in (-1.0, -0.75, -0.5, -0.25, 0.25):
        found[f"rooted, bias {bias}"] = replace(rooted, bias=bias)
        found[f"primed, bias {bias}"] = replace(primed, bias=bias)
        found[f"primed:16, bias {bias}"] = replace(primed16, bias=bias)
    for scale in (0.95, 1.05):
        found[f"primed, scale {scale}"] = replace(primed, scale=scale)
        found[f"primed:16, scale {scale}"] = replace(primed16, scale=scale)
    for drift in (0.5, 1.0):
        found[f"primed:16, drift {drift}"] = replace(primed16, drift=drift)
    found["primed:16, drift of values"] = replace(primed16, drift=1.0, drifting="values")
    return found


VARIANTS = _all_variants()

CORE = ["exact", "rooted", "primed", "primed:16", "primed:64"]
"""Variants that are measured on all prompts."""

WIDE = [
    "exact", "rooted", "primed", "primed:8", "primed:16", "primed, first 5 %", "primed:24",
    "primed:64", "exact, other order",
]  # fmt: skip
"""Variants that compute few tokens, and another order of documents."""

AT_MOST_5 = [
    "exact", "rooted", "primed:16", "similar, 16", "3 similar, 16", "primed, question 5 %",
    "primed:8, question 2.5 %", "primed:16, bias -0.25",
]  # fmt: skip
"""Further variants that compute at most 5 % of the tokens, for prompts with similar modules."""

LATER = [
    *CORE, "primed:128", "linked:16", "blend:20",
    "exact, bfloat16 states", "exact, bfloat16 products", "exact, other order",
    "similar", "similar, 16", "3 similar", "3 similar, 16", "before, 16", "exact of neighbors",
    "mean shift", "fitted", "fitted, 16", "primed:16, drift 0.5", "primed:16, drift 1.0",
    "primed:16, drift of values",
]  # fmt: skip
"""Variants of the second comparison, with the first for reference."""
