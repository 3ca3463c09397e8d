"""A thread that waits for the engine, or that has copied states, keeps no workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ragcache.openmp import _pause

SCRIPT = """
import os, threading, torch
from ragcache.openmp import _pause, give_workers_back
def tasks(): return len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
give_workers_back()
before = tasks()
product = torch.ones(512, 512) @ torch.ones(512, 512)
torch.ones(10**6).exp_()
working = tasks()
give_workers_back()
import time; time.sleep(0.2)
print(_pause() is not None, working > before, tasks() <= before, float(product[0, 0]))
torch.ones(10**6).exp_()
print("again")
"""


def test_workers_are_given_back_and_come_again() -> None:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    here, worked, gone, product = out[0].split()
    assert product == "512.0"
    if here == "True":
        assert worked == "True"
        assert gone == "True"
    assert out[1] == "again"


COMMAND = """
import os, sys
from ragcache_api.cli import main
main.app = lambda: print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_a_command_bounds_spinning_before_torch_is_there(given: dict[str, str], spins: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    out = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True, timeout=120,
        env={**environment, **given},
    ).stdout.split()  # fmt: skip
    assert out == ["False", spins]


STORING = """
import os, time, torch
from ragcache.openmp import give_workers_back
from ragcache.states import KVKey, KVStates
from ragcache.states.serialization import blob_parts
from ragcache.states.quantization import quantize
from ragcache.store.tiers.host import HostTier
torch.set_num_threads(3)
def tasks():
    time.sleep(0.2)
    return len(os.listdir("/proc/self/task"))
plain = torch.ones(8, 4, 64, 512).transpose(2, 3)
states = KVStates(plain, plain, 0)
key = KVKey("ab" * 16)
give_workers_back()
alone = tasks()
torch.ones(10**6).exp_()
print(tasks() - alone)
for step in (
    lambda: HostTier(2**30).put(key, states), lambda: blob_parts(key, states),
    lambda: quantize(states, "int8"), lambda: quantize(states, "int8").restore(),
):
    step()
    print(tasks() - alone)
"""


def test_threads_that_copy_states_keep_no_workers() -> None:
    out = subprocess.run(
        [sys.executable, "-c", STORING], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    if _pause() is not None:
        assert int(out[0]) > 0, "workers can be counted"
        assert out[1:] == ["0"] * 4
