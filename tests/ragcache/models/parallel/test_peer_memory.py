"""Results and errors that ranks exchange before they share memory of GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ragcache.errors import EngineFailed
from ragcache.models.parallel import peer_memory
from ragcache.models.parallel.peer_memory import gather_results


class Ranks:
    """A group of three ranks. This process is the second one."""

    def __init__(self, *others: tuple[str, str]) -> None:
        self.others = others

    def size(self) -> int:
        return 3

    def gather(self, found: list[Any], mine: Any, group: Ranks) -> None:
        assert group is self
        found[:] = [self.others[0], mine, self.others[1]]


def gathered(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> list[str]:
    def make() -> str:
        if error is not None:
            raise error
        return "second"

    monkeypatch.setattr(torch.distributed, "all_gather_object", ranks.gather)
    return gather_results(make, ranks)


def test_results_come_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(("first", ""), ("third", ""))
    assert gathered(ranks, monkeypatch) == ["first", "second", "third"]


def test_an_error_of_any_rank_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineFailed, match=r"rank 2 could not share memory .*: out of memory"):
        gathered(Ranks(("first", ""), ("", "out of memory")), monkeypatch)
    alone = Ranks(("first", ""), ("third", ""))
    with pytest.raises(EngineFailed, match=r"rank 1 could not .*: ValueError: no room"):
        gathered(alone, monkeypatch, ValueError("no room"))


def test_an_error_of_the_driver_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuMemAlloc_v2(self, address: Any, nbytes: Any) -> int:  # noqa: N802
            return 2 if nbytes.value > 100 else 0

        def cuGetErrorString(self, status: int, reason: Any) -> None:  # noqa: N802
            reason._obj.value = b"out of memory"

    class Context:
        def __init__(self, device: torch.device) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(torch.cuda, "device", Context)
    address, device = ctypes.c_uint64(), torch.device("cuda", 1)
    peer_memory._call("cuMemAlloc_v2", device, ctypes.byref(address), ctypes.c_size_t(100))
    with pytest.raises(EngineFailed, match=r"cuMemAlloc_v2 .* returned 2, out of memory"):
        peer_memory._call("cuMemAlloc_v2", device, ctypes.byref(address), ctypes.c_size_t(101))
