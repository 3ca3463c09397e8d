"""Processes that are forked of one that has all modules, whose import costs eight seconds."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import IO, Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "alembic.context", "faiss", "llguidance", "ragcache.engine.device_follower", "ragcache.rag",
    "ragcache_api.cli.admin", "ragcache_api.cli.ask", "ragcache_api.cli.measure",
    "ragcache_api.cli.schema", "ragcache_api.http.server",
    "transformers.models.llama.modeling_llama", "uvicorn.loops.auto",
])  # fmt: skip
_SPARE = 500  # numbers of descriptors from here on are free


def end_forks() -> None:
    """Ends the process that others are forked from."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class ForkedPython:
    """`subprocess.Popen` of `python -c`, for programs of which neither the imports nor the end of
    the interpreter is tested. Its parent is the process of forks."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int] = (), stdout: int | None = None,
        env: Mapping[str, str] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        python, option, code, *arguments = command
        assert (python, option) == (sys.executable, "-c")
        descriptors = {number: os.dup(number) for number in pass_fds}
        self.stdout: IO[str] | None = None
        if stdout == subprocess.PIPE:
            reading, descriptors[1] = os.pipe()
            self.stdout = os.fdopen(reading, encoding="utf-8")
        # A connection is what takes a file's descriptor to another process.
        passed = {number: Connection(each) for number, each in descriptors.items()}
        variables = dict(os.environ if env is None else env)
        self._process = FORKS.Process(target=_run, args=(code, arguments, variables, passed))
        self._process.start()
        for each in passed.values():
            each.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python -c", timeout or 0.0)
        return self._process.exitcode

    def communicate(self) -> tuple[str, None]:
        assert self.stdout is not None
        with self.stdout as told:
            text = told.read()
        self.wait()
        return text, None

    def kill(self) -> None:
        self._process.kill()


class ForkedFollower(ForkedPython):
    """A rank's process, whose leader is the process of forks."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        forkserver.ensure_running()
        parent = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        *start, _, folder = command
        super().__init__([*start, str(parent), folder], **options)


def _run(
    code: str, arguments: list[str], variables: dict[str, str], passed: dict[int, Connection]
) -> None:
    """`python -c code` in a new process."""
    gc.freeze()  # the modules stay
    os.setsid()
    spare = {n: fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, _SPARE) for n, each in passed.items()}
    for each in passed.values():
        each.close()
    for number, descriptor in spare.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
