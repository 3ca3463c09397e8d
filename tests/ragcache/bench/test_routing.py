"""The simulator of routing: it counts right, and ranks the policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.bench.routing import (
    HALVES,
    POLICIES,
    RoutingSetting,
    RoutingWorkload,
    compare_routing,
    question_workload,
    simulate_routing,
    standard_workloads,
    topic_workload,
    zipf_workload,
)
from ragcache.errors import ConfigurationError
from ragcache.routing import RoutingCosts
from ragcache_api.cli.main import app


def test_one_replica_is_the_ideal() -> None:
    workload, setting = zipf_workload(1, requests=300, modules=50), RoutingSetting(1)
    assert simulate_routing(workload, setting, "modules") == simulate_routing(
        workload, setting, "ideal"
    )


def test_what_fits_is_read_from_memory_after_its_first_use() -> None:
    """Two modules of 1 s to bring, in turn; the first third is not counted."""
    workload = RoutingWorkload([1e6, 1e6], [[0], [1]] * 3)
    costs = RoutingCosts(remote_bandwidth=1e6, encode_rate=1e-3)
    figures = simulate_routing(workload, RoutingSetting(1, 0.1, costs=costs), "ideal")
    assert figures.memory == 1.0
    assert figures.device == pytest.approx(0.0)  # a quarter of the corpus is less than one module
    assert figures.service == pytest.approx(costs.service_seconds + 1e6 / costs.host_bandwidth)


def test_routing_by_modules_keeps_more_hits_than_all_others() -> None:
    figures = compare_routing(topic_workload(requests=600), HALVES)
    others = [figures[policy].memory for policy in POLICIES if policy != "modules"]
    assert figures["modules"].memory > 0.85 > 0.7 > max(others)


@pytest.mark.slow
def test_the_share_of_one_big_machine() -> None:
    """The bars that routing is held to, at an eighth of the requests that the bench sends."""
    workloads = standard_workloads(requests=2500)
    for name, (workload, setting) in workloads.items():
        figures = compare_routing(workload, setting, ("modules", "prefix"))
        ideal, modules, prefix = (figures[each] for each in ("ideal", "modules", "prefix"))
        if "70%" in name:
            assert modules.device / ideal.device > 0.72
            assert modules.memory / ideal.memory > 0.78
        elif "90%" in name:
            assert modules.first_token_p99 < 0.4
        else:
            assert modules.device / ideal.device > 0.95
        assert modules.device > 1.1 * prefix.device


def test_questions_are_requests_for_what_they_find() -> None:
    texts = ["Leave is 28 days a year.", "Pay comes on the last day.", "Dogs stay outside."]
    workload = question_workload(texts, ["When does pay come?", "Stay dogs outside?"], times=2)
    assert sorted(workload.requests) == [[1], [1], [2], [2]]


def test_the_command_prints_and_writes_the_figures(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("leave", "pay", "dogs"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"All about {name}.")
    asked = {"question": "What about dogs?", "answers": ["all"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked))
    given = ["--documents", f"{tmp_path}/docs", "--questions", f"{tmp_path}/questions.jsonl"]
    files = ["--json", f"{tmp_path}/out.json", "--plot", f"{tmp_path}/out.svg"]
    done = CliRunner().invoke(app, ["bench", "routing", *given, *files])
    assert done.exit_code == 0, done.output
    assert "two choices" in (tmp_path / "out.svg").read_text()
    assert "two choices" in done.output
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"].values()
    assert set(run["policies"]) == {"ideal", *POLICIES}
    assert CliRunner().invoke(app, ["bench", "routing", *given[:2]]).exit_code == 2


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_a_load_that_never_ends_is_refused(load: float) -> None:
    with pytest.raises(ConfigurationError, match="load"):
        RoutingSetting(2, load)
