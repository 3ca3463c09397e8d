"""The judgement of `benchmarks/soak.py`: what of its samples must be flat, and what is.

A series is flat if its growth, by the median slope between any two of its minutes, is within its
tolerance over the whole time that is judged. Ten minutes at the beginning are not judged: of the
run, and of each process that began later.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

WARM_UP_SECONDS = 600.0
RECORDS = frozenset({"ingestion_jobs", "evictions", "retirements", "api_keys"})
"""Tables that list what happened: one row for each event, up to a number or an age."""

Points = Sequence[tuple[float, float]]
"""Values with their times in seconds, in order."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The growth over the judged time that still counts as flat: the larger of the two."""

    share: float
    """Share of the median."""
    least: float
    """In the unit of the series."""

    def allowed(self, median: float) -> float:
        """Return the growth that is allowed around a median."""
        return max(self.share * median, self.least)


TOLERANCES: Mapping[str, Tolerance] = {
    "memory": Tolerance(0.05, 16 * 2**20),
    "threads": Tolerance(0.05, 2),
    "descriptors": Tolerance(0.05, 4),
    "processes": Tolerance(0.05, 2),
    "disk": Tolerance(0.1, 8 * 2**20),
    "ledger": Tolerance(0.1, 2 * 2**20),
    "rows": Tolerance(0.1, 50),
}
"""By what is measured: bytes of memory, disk and ledger, numbers of the rest."""
_BYTES = frozenset({"memory", "disk", "ledger"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A series with its judgement."""

    name: str
    """Process and what is measured, as `replica memory`."""
    kind: str
    first: float
    """Median of the first judged minute."""
    median: float
    last: float
    growth: float
    """Growth over the judged time by the median slope."""
    hours: float
    """Judged time."""

    @property
    def is_flat(self) -> bool:
        return self.growth <= TOLERANCES[self.kind].allowed(self.median)


def median_slope(points: Points) -> float:
    """Return the median of the slopes between any two points, in units a second.

    Theil and Sen's estimate: up to 29% of the points may be outliers, such as a peak of uploads.
    """
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return statistics.median(slopes) if slopes else 0.0


def by_minute(points: Points) -> list[tuple[float, float]]:
    """Return the median of each minute."""
    minutes = defaultdict[int, list[tuple[float, float]]](list)
    for at, value in points:
        minutes[int(at // 60)].append((at, value))
    return [
        (statistics.median(at for at, _ in each), statistics.median(value for _, value in each))
        for each in minutes.values()
    ]


def judge(name: str, kind: str, points: Points, warm_up: float) -> Verdict | None:
    """Judge a series from `warm_up` seconds after its first point. None if less than that is left,
    or less than three minutes."""
    begin = points[0][0] + warm_up if points else 0.0
    late = by_minute([point for point in points if point[0] >= begin])
    span = late[-1][0] - late[0][0] if late else 0.0
    if len(late) < 3 or span < warm_up:
        return None
    median = statistics.median(value for _, value in late)
    growth = median_slope(late) * span
    return Verdict(name, kind, late[0][1], median, late[-1][1], growth, span / 3600)


@dataclass(frozen=True, slots=True)
class SoakRun:
    """The lines that a run has written: its setting, a sample every few seconds, its end."""

    setting: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    end: Mapping[str, Any] | None
    """None for a run that goes on, or that was killed."""

    @classmethod
    def read(cls, file: Path) -> SoakRun:
        """Read a file, also of a run that goes on."""
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
        samples = [line for line in lines if "at" in line]
        return cls(lines[0], samples, lines[-1] if "problems" in lines[-1] else None)

    def series(self) -> Iterator[tuple[str, str, Points]]:
        """Each series with its name and kind."""
        lives = defaultdict[tuple[str, int, str], list[tuple[float, float]]](list)
        for sample in self.samples:
            for each in sample["processes"]:
                for kind in {"memory", "threads", "descriptors"} & each.keys():
                    lives[each["role"], each["pid"], kind].append((sample["at"], each[kind]))
        for (role, _, kind), points in lives.items():
            yield f"{role} {kind}", kind, points
        for name in ("processes", "connections"):
            yield name, "processes", self._points(lambda sample, name=name: sample["numbers"][name])
        yield "observed texts", "rows", self._points(lambda sample: sample["numbers"]["observed"])
        for name in self.samples[0]["disk"]:
            yield f"{name} on disk", "disk", self._points(lambda s, name=name: s["disk"][name])
        yield "ledger", "ledger", self._points(lambda sample: sample["ledger"]["bytes"])
        yield "rows", "rows", self._points(lambda sample: _rows(sample["ledger"]["rows"]))

    def host_tier(self) -> Points:
        """Bytes of states in the host tier of a single service."""
        return self._points(lambda sample: sample["tiers"]["host"][0])

    def _points(self, value: Any) -> Points:
        """A value of all samples that have it: a ledger that is away has none."""
        points = []
        for sample in self.samples:
            try:
                points.append((sample["at"], float(value(sample))))
            except (KeyError, TypeError):
                continue
        return points

    def verdicts(self, warm_up: float = WARM_UP_SECONDS) -> list[Verdict]:
        """Judge all series that are long enough."""
        judged = (judge(*each, warm_up) for each in self.series())
        return [verdict for verdict in judged if verdict is not None]

    def problems(self, warm_up: float = WARM_UP_SECONDS) -> list[str]:
        """Everything that is not as it must be: series that grow, and unexpected errors."""
        grown = [
            f"{each.name} grew by {_figure(each.kind, each.growth)} in {each.hours:.1f} h"
            for each in self.verdicts(warm_up)
            if not each.is_flat
        ]
        return (
            grown
            + list(self.samples[-1]["unexpected"])
            + list((self.end or {}).get("problems", ()))
        )

    def table(self, warm_up: float = WARM_UP_SECONDS) -> str:
        """The verdicts, calls and latencies as Markdown."""
        rows = [
            f"| {each.name} | {_figure(each.kind, each.first)} | {_figure(each.kind, each.median)} "
            f"| {_figure(each.kind, each.last)} | {_figure(each.kind, each.growth, sign=True)} "
            f"| {each.hours:.1f} | {'flat' if each.is_flat else '**grows**'} |"
            for each in sorted(self.verdicts(warm_up), key=lambda each: (each.kind, each.name))
        ]
        head = "| | first | median | last | growth | hours | |\n|---|--:|--:|--:|--:|--:|---|"
        return "\n".join([*self._facts(warm_up), "", head, *rows, "", *self._calls()])

    def _facts(self, warm_up: float) -> list[str]:
        last = self.samples[-1]
        cores = (last["cpu"] - self.samples[0]["cpu"]) / (last["at"] - self.samples[0]["at"] or 1)
        named = Counter(event["name"] for sample in self.samples for event in sample["events"])
        events = ", ".join(f"{name} {count}" for name, count in sorted(named.items()))
        return [
            f"{self.setting['setup']}: {last['at'] / 3600:.2f} h, {cores:.2f} cores in the mean"
            + (f"; {events}" if events else ""),
            *(f"  problem: {problem}" for problem in self.problems(warm_up)),
        ]

    def _calls(self) -> Iterator[str]:
        counts: Mapping[str, int] = self.samples[-1]["counts"]
        seconds = defaultdict[str, list[float]](list)
        for sample in self.samples:
            for kind, each in sample["seconds"].items():
                seconds[kind] += each
        yield "| calls | ok | excused | unexpected | p50 | p99 |\n|---|--:|--:|--:|--:|--:|"
        for kind in sorted({name.split()[0] for name in counts}):
            mine = {n.partition(" ")[2]: c for n, c in counts.items() if n.split()[0] == kind}
            excused = sum(count for name, count in mine.items() if name.startswith("excused"))
            wrong = sum(mine.values()) - mine.get("ok", 0) - excused
            middle, late = (f"{quantile(seconds[kind], q):.2f} s" for q in (0.5, 0.99))
            yield f"| {kind} | {mine.get('ok', 0)} | {excused} | {wrong} | {middle} | {late} |"


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which a share of the values lies. 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _rows(tables: Mapping[str, int]) -> int:
    return sum(count for name, count in tables.items() if name not in RECORDS)


def _figure(kind: str, value: float, *, sign: bool = False) -> str:
    if kind in _BYTES:
        return f"{value / 2**20:{'+' if sign else ''}.1f} MiB"
    return f"{value:{'+' if sign else ''}.0f}"


def draw(runs: Sequence[SoakRun], image: Path) -> None:
    """Draw the memory of processes, and the bytes of disk and ledger, against the hours. A thin
    line shows the host tier's part of the memory of a single service."""
    from harness import new_figure

    figure, panels = new_figure(2 * len(runs))
    for run, left, right in zip(runs, panels[::2], panels[1::2], strict=True):
        for name, kind, points in run.series():
            axes = {"memory": left, "disk": right, "ledger": right}.get(kind)
            if axes is not None and len(points) > 1:
                hours, values = [at / 3600 for at, _ in points], [v / 2**20 for _, v in points]
                axes.plot(hours, values, label=name, lw=1)
        if run.setting["setup"] == "single":
            tier = run.host_tier()
            hours, values = [at / 3600 for at, _ in tier], [each / 2**20 for _, each in tier]
            left.plot(hours, values, lw=0.5, color="gray")
        for axes, text in ((left, "memory of processes, MiB"), (right, "disk and ledger, MiB")):
            axes.set(xlabel=f"hours, {run.setting['setup']}", ylabel=text, ylim=(0, None))
        right.legend(frameon=False)
    figure.savefig(image)
