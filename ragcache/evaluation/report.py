"""An evaluation for people: a page without scripts and network, and plots of quality against time
to first token."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lxml import etree
from lxml.builder import E

from ragcache.errors import MissingExtra
from ragcache.evaluation.metrics import Interval
from ragcache.evaluation.runs import Comparison, Evaluation, EvaluationReport

TITLES = {
    "exact_match": "exact match", "f1": "F1", "rouge_l": "ROUGE-L", "retrieved": "retrieved",
    "kl_divergence": "KL", "agreement": "agreement",
}  # fmt: skip
"""The means of a mode as readers know them."""

_COLORS = ("#1f5fa8", "#c8541e", "#2c8a57", "#8457a8", "#8a6d1a", "#4a5560")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 72rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .75rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #dde2e8;
         vertical-align: top; }
th { font-weight: 600; color: #4a5560; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.range { display: block; color: #6a7480; font-size: .8rem; }
.note { color: #4a5560; max-width: 50rem; }
.right { color: #1d7a45; } .wrong { color: #a8331f; }
.answers { table-layout: fixed; width: 100%; overflow-wrap: anywhere; font-size: .9rem; }
svg { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1.2rem; margin: .5rem 0; }
dt { color: #4a5560; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def write_report(evaluation: Evaluation, file: Path) -> None:
    """Writes the page: one HTML file that needs nothing else. Raises `MissingExtra` without
    matplotlib."""
    title = f"Evaluation of {evaluation.setting.get('questions', 'answers')}"
    page = E.html(
        E.head(
            E.meta(charset="utf-8"),
            E.meta({"http-equiv": "Content-Security-Policy", "content": _POLICY}),
            E.meta(name="viewport", content="width=device-width"),
            E.title(title),
            E.style(_STYLE),
        ),
        E.body(
            E.h1(title),
            _setting(evaluation),
            E.h2("Modes"),
            _modes(evaluation.reports),
            E.p(
                "Means in percent with 95 % bootstrap intervals over the questions. KL: of the "
                "first token's distribution from that of mode exact, in nats; agreement: how often "
                "the likeliest first token is the same. TTFT: the median time to first token of a "
                "request alone, its documents at hand. Cached: of the prompts' tokens.",
                {"class": "note"},
            ),
            *_compared(evaluation.comparisons),
            E.h2("Quality against time to first token"),
            _drawing(evaluation),
            E.h2("Answers"),
            _answers(evaluation.reports),
            lang="en",
        ),
        lang="en",
    )
    file.write_bytes(b"<!DOCTYPE html>\n" + etree.tostring(page, method="html", encoding="utf-8"))


def _setting(evaluation: Evaluation) -> Any:
    pairs = [
        each
        for name, value in evaluation.setting.items()
        for each in (E.dt(name), E.dd(_printable(str(value))))
    ]
    return E.dl(*pairs)


def _modes(reports: Sequence[EvaluationReport]) -> Any:
    heads = ("mode", "questions", *TITLES.values(), "TTFT", "cached", "computed")
    rows = [
        [
            E.td(report.mode),
            _number(str(report.questions)),
            *(_mean(report, name) for name in TITLES),
            _number(f"{1e3 * report.first_token_seconds:.0f} ms"),
            _number(f"{100 * report.cached_share:.1f}"),
            _number(f"{report.computed_tokens:,.0f} tokens"),
        ]
        for report in reports
    ]
    return _table(heads, rows, numbers=range(1, len(heads)))


def _mean(report: EvaluationReport, name: str) -> Any:
    value, interval = getattr(report, name), report.intervals.get(name)
    text = format_mean(name, value)
    if value is None or interval is None:
        return _number(text)
    return _number(text, E.span(_range(name, interval), {"class": "range"}))


def format_mean(name: str, value: float | None) -> str:
    """A mean in percent, or in nats; `-` where it is not known."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name == "kl_divergence" else f"{100 * value:.1f}"


def _range(name: str, interval: Interval) -> str:
    return f"{format_mean(name, interval.low)} to {format_mean(name, interval.high)}"


def _compared(comparisons: Sequence[Comparison]) -> Iterator[Any]:
    if not comparisons:
        return
    yield E.h2(f"Beside {comparisons[0].reference}")
    heads = ("mode", "mark", "difference", "95 % interval", "p", "test")
    yield _table(
        heads,
        [
            [
                E.td(each.mode), E.td(TITLES[each.mark]),
                _number(f"{100 * each.difference:+.1f}"),
                _number(f"{100 * each.interval.low:+.1f} to {100 * each.interval.high:+.1f}"),
                _number(f"{each.p_value:.3f}"), E.td(each.test),
            ]
            for each in comparisons
        ],
        numbers=range(2, 5),
    )  # fmt: skip
    yield E.p(
        "Over the same questions, in points. McNemar: the exact test of discordant pairs; p-values "
        "are two-sided and of single tests, without correction for their number.",
        {"class": "note"},
    )


def _answers(reports: Sequence[EvaluationReport]) -> Any:
    heads = ("question", "accepted", *(report.mode for report in reports))
    rows = []
    for marked in zip(*(report.marked for report in reports), strict=True):
        question = marked[0].question
        accepted = " · ".join(question.answers[:3]) or "(none)"
        rows.append([
            E.td(_printable(question.question)), E.td(_printable(accepted)),
            *(
                E.td(_printable(each.given) or "(nothing)",
                     {"class": "right" if each.exact_match else "wrong"})
                for each in marked
            ),
        ])  # fmt: skip
    return _table(heads, rows, numbers=range(0), kind="answers")


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: range, kind: str = "plain"
) -> Any:
    """numbers: the columns that hold these."""
    names = [
        E.th(head, {"class": "number"} if place in numbers else {})
        for place, head in enumerate(heads)
    ]
    return E.table(
        E.thead(E.tr(*names)), E.tbody(*(E.tr(*cells) for cells in rows)), {"class": kind}
    )


def _number(*content: Any) -> Any:
    return E.td(*content, {"class": "number"})


def _printable(text: str) -> str:
    """Without characters that a page cannot hold."""
    return "".join(each for each in text if each in "\t\n" or ord(each) >= 32)


def _drawing(evaluation: Evaluation) -> Any:
    """The plots as part of the page."""
    drawn = io.BytesIO()
    draw_quality(evaluation).savefig(drawn, format="svg")
    root = etree.fromstring(drawn.getvalue(), etree.XMLParser(resolve_entities=False))
    for metadata in root.findall("{http://www.w3.org/2000/svg}metadata"):
        root.remove(metadata)
    return root


def draw_quality(evaluation: Evaluation) -> Any:
    """A matplotlib figure: F1 and ROUGE-L against the median time to first token, and the first
    token's divergence where mode `exact` was run. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError as error:
        raise MissingExtra(
            "plots need matplotlib: install it with `pip install 'ragcache[plot]'`"
        ) from error
    reports = evaluation.reports
    names = ["f1", "rouge_l"]
    if any(report.kl_divergence for report in reports):
        names.append("kl_divergence")
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for report, color in zip(reports, _cycle(len(reports)), strict=True):
            _draw_point(axes, report, name, color)
        axes.set_title(TITLES[name] + (", nats" if name == "kl_divergence" else ", %"))
        axes.set_xlabel("time to first token, ms")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.15, y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center",
                  frameon=False, ncols=min(len(reports), 6))  # fmt: skip
    return figure


def _cycle(count: int) -> list[str]:
    return [_COLORS[each % len(_COLORS)] for each in range(count)]


def _draw_point(axes: Any, report: EvaluationReport, name: str, color: str) -> None:
    """A mode at its time, with the interval of its mean."""
    value, interval = getattr(report, name), report.intervals.get(name)
    if value is None or interval is None or math.isinf(value):
        return
    scale = 1 if name == "kl_divergence" else 100
    at = 1e3 * report.first_token_seconds
    errors = [[scale * max(0.0, value - interval.low)], [scale * max(0.0, interval.high - value)]]
    axes.errorbar(
        [at], [scale * value], yerr=errors, fmt="o", color=color, capsize=3, label=report.mode
    )
