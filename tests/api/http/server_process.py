"""Server processes, which are forked."""

from __future__ import annotations

import gc
import os
import re
import runpy
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from ragcache.models import loader
from tests.cluster.machines import move_to_machine
from tests.forks import FORKS

_LISTENING = re.compile(r"running on http://([\d.]+):(\d+)")


@dataclass
class Started:
    """A server process. log: what it wrote."""

    process: BaseProcess
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, seconds: float = 60) -> int | None:
        """Ends it as an operator would; returns its exit status, None where it has not ended."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(seconds)
        return self.process.exitcode


def start_server(
    state: Path, *options: str, machine: str | None = None, **environment: str
) -> Started:
    """`ragcache serve` on a free port of loopback, with the default model of this process. machine:
    the name of another machine that it is on."""
    receive, send = FORKS.Pipe(duplex=False)
    arguments = ["serve", "--state", str(state), "--port", "0", *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "RAGCACHE_LAME_DUCK": "0", **environment}
    process = FORKS.Process(
        target=_run, args=(arguments, variables, state.parent, loader.READER, send, machine)
    )
    process.start()
    send.close()
    lines = os.fdopen(os.dup(receive.fileno()), encoding="utf-8")
    receive.close()
    started = Started(process, "")
    for line in lines:
        started.log.append(line)
        if found := _LISTENING.search(line):
            started.url = f"http://{found[1]}:{found[2]}"
            break
    else:
        process.join(10)
        raise AssertionError("".join(started.log))
    threading.Thread(target=lambda: started.log.extend(lines), daemon=True).start()
    return started


def _run(
    arguments: list[str], variables: dict[str, str], folder: Path, model: Path, log: Connection,
    machine: str | None,
) -> None:  # fmt: skip
    """`python -m ragcache_api.cli.main` in a new process."""
    gc.freeze()  # the modules stay
    if machine is not None:
        move_to_machine(machine)
    os.dup2(log.fileno(), sys.stderr.fileno())
    log.close()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    loader.READER = model
    sys.argv = ["ragcache", *arguments]
    runpy.run_module("ragcache_api.cli.main", run_name="__main__", alter_sys=True)
