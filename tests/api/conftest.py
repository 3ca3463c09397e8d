"""Fixtures of all tests of the programs."""

from __future__ import annotations

from tests.api.http.server_process import end_forks


def pytest_sessionfinish() -> None:
    end_forks()
