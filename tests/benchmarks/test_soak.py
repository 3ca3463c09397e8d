"""The soak's judgement, and a soak of seconds on a real service."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soak import app, make_plan
from soak_load import MixedLoad
from soak_report import SoakRun, judge, median_slope, quantile
from typer.testing import CliRunner

MIB = 2**20


def make_points(value: Callable[[float], float], hours: float = 2) -> list[tuple[float, float]]:
    """A sample every ten seconds."""
    return [(10.0 * n, value(10.0 * n)) for n in range(int(hours * 360))]


def sample(at: float, **changes: Any) -> dict[str, Any]:
    """A sample of a service that is flat, but for the changes."""
    service = {"role": "service", "pid": 7, "memory": 800 * MIB, "mapped": 90 * MIB}
    flat = {
        "at": at, "events": [], "processes": [service | {"threads": 20, "descriptors": 30}],
        "numbers": {"processes": 1, "connections": 0}, "cpu": at / 4, "disk": {"state": 50 * MIB},
        "ledger": {"bytes": MIB, "rows": {"states": 100, "ingestion_jobs": 5}},
        "counts": {"answer ok": 1}, "seconds": {"answer": [0.5]}, "unexpected": [],
    }  # fmt: skip
    return flat | changes


def written(folder: Path, samples: list[dict[str, Any]], *end: dict[str, Any]) -> Path:
    file = folder / "run.jsonl"
    lines = [{"setup": "single"}, *samples, *end]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def test_the_median_slope_ignores_peaks() -> None:
    rng = random.Random(1)
    straight = [(float(n), 3.0 * n) for n in range(100)]
    peaks = {n: rng.uniform(1e3, 1e6) for n in rng.sample(range(100), 20)}
    assert median_slope(straight) == pytest.approx(3.0)
    noisy = [(at, peaks.get(int(at), value)) for at, value in straight]
    assert median_slope(noisy) == pytest.approx(3.0, abs=1.0)
    assert median_slope([(1.0, 5.0)]) == 0.0


@pytest.mark.parametrize(
    ("value", "flat"),
    [
        (lambda _: 800 * MIB, True),
        (lambda at: 800 * MIB + (at % 600) * 0.2 * MIB, True),  # a saw
        (lambda at: 900 * MIB - at * 0.01 * MIB, True),
        (lambda at: 400 * MIB + min(at, 600) * MIB, True),  # only in the beginning
        (lambda at: 800 * MIB + at * 0.01 * MIB, False),  # 36 MiB an hour
        (lambda at: 800 * MIB + (at // 1200) * 20 * MIB, False),  # in steps
    ],
)  # fmt: skip
def test_only_growth_after_the_warm_up_counts(value: Callable[[float], float], flat: bool) -> None:
    verdict = judge("service memory", "memory", make_points(value), 600)
    assert verdict is not None
    assert verdict.is_flat is flat
    assert verdict.hours == pytest.approx(11 / 6, abs=0.1)


def test_a_series_of_less_than_two_warm_ups_is_not_judged() -> None:
    grows = make_points(lambda at: at * MIB, hours=0.3)
    assert judge("replica memory", "memory", grows, 600) is None
    assert judge("replica memory", "memory", [], 600) is None


def test_a_process_that_began_later_is_judged_by_itself(tmp_path: Path) -> None:
    def replicas(at: float) -> list[dict[str, Any]]:
        young = {"role": "replica", "pid": 2, "memory": 300 * MIB + max(0, at - 3600) * 0.05 * MIB}
        old = {"role": "replica", "pid": 1, "memory": 800 * MIB}
        more = {"threads": 9, "descriptors": 9}
        return [each | more for each in ((old, young) if at >= 3600 else (old,))]

    samples = [sample(at, processes=replicas(at)) for at, _ in make_points(float)]
    problems = SoakRun.read(written(tmp_path, samples)).problems()
    assert len(problems) == 1
    assert problems[0].startswith("replica memory grew by 1")


def test_records_may_grow_and_other_rows_may_not(tmp_path: Path) -> None:
    def run(table: str) -> list[str]:
        samples = [
            sample(at, ledger={"bytes": MIB, "rows": {"modules": 50} | {table: int(at)}})
            for at, _ in make_points(float)
        ]
        return SoakRun.read(written(tmp_path, samples)).problems()

    assert run("ingestion_jobs") == []
    assert [problem.split(" by ")[0] for problem in run("states")] == ["rows grew"]


def test_a_ledger_that_was_away_leaves_gaps(tmp_path: Path) -> None:
    samples = [sample(at) for at, _ in make_points(float)]
    for each in samples[100:110]:
        each["ledger"] = {}
    run = SoakRun.read(written(tmp_path, samples))
    assert run.problems() == []
    assert "| rows | 100 | 100 | 100 | +0 |" in run.table()


def test_the_report_fails_for_errors_that_nothing_explains(tmp_path: Path) -> None:
    samples = [sample(at) for at, _ in make_points(float)]
    told = CliRunner().invoke(app, ["report", str(written(tmp_path, samples))])
    assert told.exit_code == 0, told.output
    assert "| answer | 1 | 0 | 0 | 0.50 s | 0.50 s |" in told.output
    samples[-1] |= {"unexpected": ["answer 500: boom"], "counts": {"answer ok": 1, "answer 500": 1}}
    lost = {"problems": ["note-1 was stored and is gone"]}
    told = CliRunner().invoke(app, ["report", str(written(tmp_path, samples, lost))])
    assert told.exit_code == 1
    assert "problem: answer 500: boom" in told.output
    assert "problem: note-1 was stored and is gone" in told.output
    assert "| answer | 1 | 0 | 1 |" in told.output


def test_only_repeatable_errors_within_a_disturbance_are_excused() -> None:
    load = MixedLoad("http://127.0.0.1:1", {}, {}, ())
    with load.disturbance():
        for outcome in ("cut off", "503", "500"):
            load._note("answer", outcome, f"{outcome} in it", 0.0)
    later = load._disturbed[-1][1] + 1
    load._disturbed[-1][1] = 0.0  # long ago
    load._note("answer", "503", "503 after it", later)
    assert load.unexpected == ["answer 500 in it", "answer 503 after it"]
    assert load.counts["answer excused 503"] == load.counts["answer excused cut off"] == 1


def test_disturbances_are_spread_over_the_run() -> None:
    assert make_plan(replicas=False, seconds=7200) == [(1800, "kill")]
    plan = make_plan(replicas=True, seconds=7200)
    assert [at for at, _ in plan] == [600 * n for n in range(1, 12)]
    assert [name for _, name in plan].count("restart") == 5


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1", "localhost", "::1"])
def test_a_service_is_soaked_for_seconds(tmp_path: Path) -> None:
    file = tmp_path / "single.jsonl"
    done = CliRunner().invoke(app, ["run", "single", str(file), "--seconds", "12", "--every", "2"])
    assert done.exit_code == 0, done.output
    run = SoakRun.read(file)
    assert run.end == {"problems": []}
    [killed] = [event["name"] for each in run.samples for event in each["events"]]
    assert killed == "kill"
    last = run.samples[-1]
    assert sum(count for name, count in last["counts"].items() if name.endswith(" ok")) > 0
    assert last["disk"]["state"] > MIB
    assert last["ledger"]["rows"]["documents"] >= 48
    [service] = last["processes"]
    assert service["role"] == "service"
    assert min(service[kind] for kind in ("memory", "threads", "descriptors")) > 0
    assert run.verdicts() == [], "nothing is judged before ten minutes have passed"


def test_quantiles() -> None:
    assert quantile(range(100), 0.5) == 50
    assert quantile(range(100), 0.99) == 99
    assert quantile([], 0.5) == 0
