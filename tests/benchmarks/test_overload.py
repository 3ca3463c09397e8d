"""The service under overload, small."""

from __future__ import annotations

import pytest
from overload import OverloadSetting, bench_overload

from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.enable_socket,
    pytest.mark.allow_hosts(["127.0.0.1"]),
]


def test_every_request_of_a_small_load_is_answered() -> None:
    setting = OverloadSetting(
        REPOSITORY / "examples/handbook", REPOSITORY / "examples/questions.jsonl",
        factor=3.0, seconds=2.0, calm=1.0, clients=4, tokens=1, rest=0.0,
    )  # fmt: skip
    told = bench_overload(setting, lambda _: None)
    assert told["capacity_per_second"] > 0
    for name in ("calm", "heavy", "light"):
        assert told[name]["failed"] == 0
        assert told[name]["answered"] == told[name]["offered"]  # fewer than run at once
    assert told["heavy"]["longest_s"] >= told["heavy"]["p50_s"] > 0
    assert min(told["rss_mib"].values()) > 0
