"""A thread that waits for the engine keeps no workers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, threading, torch
from ragcache.engine.threads import _pause, give_workers_back
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
