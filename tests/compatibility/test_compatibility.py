"""Every frozen release: its state folder opens, its answers come, its requests are served.

`make check` compares the frozen signatures (`tools/signatures.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from math import isclose
from typing import Any

import pytest

from ragcache import __version__
from tests.compatibility.freeze import HOME, RECORDINGS, SIGNATURES, STATE, generalize, unpack
from tests.compatibility.replay import REQUESTS
from tests.conftest import REPOSITORY

FROZEN = sorted(file.parent for file in HOME.glob(f"*/{RECORDINGS}"))


def differences(frozen: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield the places where something recorded is gone or has another value.

    New fields are no difference. Of a value `<type>` the type alone counts. Numbers that a
    processor computes may differ by a hundredth.
    """
    if isinstance(frozen, dict) and isinstance(now, dict):
        for name, each in frozen.items():
            if name in now:
                yield from differences(each, now[name], f"{place}/{name}")
            else:
                yield f"{place}/{name} is gone"
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for number, (each, other) in enumerate(zip(frozen, now, strict=True)):
            yield from differences(each, other, f"{place}/{number}")
    elif isinstance(frozen, float) and isinstance(now, float):
        if not isclose(frozen, now, rel_tol=0.01, abs_tol=1e-6):
            yield f"{place}: {frozen!r} -> {now!r}"
    elif frozen != generalize(now, is_volatile=str(frozen).startswith("<")):
        yield f"{place}: {frozen!r} -> {now!r}"


@pytest.fixture(scope="module", params=FROZEN, ids=lambda each: each.name)
def replayed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recordings of a release, and what this tree makes of the same folder and requests."""
    recorded = json.loads((request.param / RECORDINGS).read_text(encoding="utf-8"))
    folder = unpack(request.param, tmp_path_factory.mktemp("frozen"))
    module = "tests.compatibility.replay"
    command = [sys.executable, "-m", module, str(folder), recorded["secret"]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return recorded, json.loads(done.stdout.splitlines()[-1])


def test_the_first_release_is_frozen_whole() -> None:
    assert "0.1.0" in [each.name for each in FROZEN]
    for version in FROZEN:
        assert {each.name for each in version.iterdir()} == {STATE, RECORDINGS, SIGNATURES}


@pytest.mark.slow
def test_a_frozen_folder_opens_with_its_content(replayed: Any) -> None:
    recorded, now = replayed
    assert list(differences(recorded["held"], now["held"])) == []
    assert now["held"]["problems"] == []
    assert now["held"]["cached"] > 0, "nothing was computed that the folder holds"


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_a_recorded_request_is_served_alike(name: str, replayed: Any) -> None:
    recorded, now = replayed
    if name not in recorded["responses"]:
        pytest.skip("a later release recorded it first")
    assert list(differences(recorded["responses"][name], now["responses"][name])) == []


@pytest.mark.slow
def test_routes_take_what_they_took_and_need_no_more(replayed: Any) -> None:
    recorded, now = replayed
    for route, frozen in recorded["routes"].items():
        assert route in now["routes"], route
        assert set(frozen["takes"]) <= set(now["routes"][route]["takes"]), route
        assert set(now["routes"][route]["needs"]) <= set(frozen["needs"]), route


@pytest.mark.parametrize(
    ("frozen", "now", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1, "b": 2}, {"a": 1}, ["/b is gone"]),
        ({"a": [1, 2]}, {"a": [1]}, ["/a: [1, 2] -> [1]"]),
        ({"a": ["x", {"b": None}]}, {"a": ["x", {"b": 0}]}, ["/a/1/b: None -> 0"]),
        ({"a": "<int>"}, {"a": 7}, []),
        ({"a": "<int>"}, {"a": "7"}, ["/a: '<int>' -> '7'"]),
        ({"a": 0.9}, {"a": 0.904}, []),
        ({"a": 0.9}, {"a": 0.8}, ["/a: 0.9 -> 0.8"]),
        ({"a": True}, {"a": "true"}, ["/a: True -> 'true'"]),
    ],
)
def test_differences_are_found(frozen: Any, now: Any, found: list[str]) -> None:
    assert list(differences(frozen, now)) == found


def test_this_version_is_frozen() -> None:
    minor = __version__.rpartition(".")[0]
    assert f"{minor}.0" in [each.name for each in FROZEN]
