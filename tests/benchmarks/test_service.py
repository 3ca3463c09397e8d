"""The service beside calls of the engine, small."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import service
import typer
from service_gpu import ChatSetting, bench_chats
from typer.testing import CliRunner

from ragcache.bench.harness import LlamaShape

SHAPE = LlamaShape(1, 64, 4, 2, 96, 32_000, 2048)
pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1", "localhost", "::1"])]


@pytest.mark.slow
@pytest.mark.nightly
def test_every_figure_is_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(replace, service.HttpSetting(tokens=3, pages=5, foreign=2, shape=SHAPE))
    monkeypatch.setattr(service, "HttpSetting", small)
    file = tmp_path / "http.json"
    options = ["--runs", "2", "--streams", "2", "--rounds", "1", "--modules", "200"]
    app = typer.Typer()
    app.command()(service.main)
    done = CliRunner().invoke(app, [*options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert min(told["ttft_called_ms_p50"], told["ttft_served_ms_p50"]) > 0
    for suffix in ("", "_reader"):
        rounds = told[f"throughput_share_by_round{suffix}"]
        assert told[f"throughput_share{suffix}"] == rounds[0] > 0
        assert told[f"throughput_share_interval{suffix}"] == [rounds[0]] * 2
        assert told[f"called_again_by_round{suffix}"][0] > 0
    assert told["list_ms_p50"] > 0
    assert set(told["list_ms_p50_by_sort"]) == {"id", "name", "nbytes", "hits", "used_at"}
    assert set(told["ttft_ms_p50_by_owner"]) == {"own", "foreign", "unknown"}
    assert told["foreign_ttft_ratio"] > 0
    check_interfaces(told)
    assert (told["setting"]["modules"], told["setting"]["streams"]) == (200, 2)


INTERFACES = {"/v1/chat/completions", "/v1/messages", "/v1/responses"}


@pytest.mark.slow
def test_first_tokens_are_measured_by_interface(tmp_path: Path) -> None:
    file = tmp_path / "interfaces.json"
    app = typer.Typer()
    app.command()(service.main)
    done = CliRunner().invoke(app, ["--interfaces", "--runs", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    check_interfaces(told)
    assert told["setting"]["runs"] == 2
    assert "list_ms_p50" not in told, "nothing else is measured"
    assert all(path in done.output for path in INTERFACES)


def check_interfaces(told: dict[str, Any]) -> None:
    """Every interface has its first token, and the difference from the chat's."""
    assert set(told["interface_ms_p50"]) == INTERFACES
    assert set(told["interface_more_ms_p50"]) == INTERFACES - {"/v1/chat/completions"}
    assert min(told["interface_ms_p50"].values()) > 0


@pytest.mark.slow
def test_chats_over_pasted_documents_are_timed_beside_the_engine() -> None:
    shape = LlamaShape(1, 64, 4, 2, 96, 16384, 2048, tied=False)
    setting = ChatSetting(documents=5, document_tokens=120, runs=3, warm=1)
    document = bench_chats({"7b": shape}, "cpu", setting=setting)
    http = document["results"]["7b"]["http"]
    assert http["cached_tokens"] > 0.9 * 4 * 120
    assert 0 < http["own_tokens"] < 60
    assert len(http["served_runs_ms"]) == len(http["engine_runs_ms"]) == 3
    assert min(*http["served_runs_ms"], *http["engine_runs_ms"]) > 0
    [row] = document["rows"]
    assert (row["name"], row["value"]) == ("http", http["over_engine_ms"])
    again = bench_chats({}, "cpu", document=document)
    assert again["rows"] == document["rows"], "a row is added to a table that exists"
