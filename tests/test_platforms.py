"""Folders are made, asked, exported and served without what Windows and macOS lack."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ragcache import files
from ragcache.processes import WorkerFailed, WorkerPool, WorkerTimeout
from tests.ragcache.documents.sample_files import docx

HIDING = """
import os, signal, sys
import faiss, fastapi.testclient, httptools, langchain_core, llguidance, lxml, psutil, sqlalchemy
import tantivy, torch, transformers, typer, uvicorn

MODULES = "fcntl grp pty pwd resource syslog termios tty uvloop"
FUNCTIONS = '''
    chown fchmod fchown fdatasync fork forkpty geteuid getgid getloadavg getpgid getuid killpg
    mkfifo nice posix_fadvise posix_fallocate pread preadv pwrite register_at_fork
    sched_getaffinity setsid statvfs sync sysconf uname O_DIRECTORY O_NONBLOCK
'''
SIGNALS = "SIGALRM SIGCHLD SIGHUP SIGPROF SIGUSR1 SIGUSR2 alarm pthread_sigmask setitimer"
for name in MODULES.split():
    sys.modules[name] = None
for module, names in ((os, FUNCTIONS), (signal, SIGNALS)):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
"""The names are those that Windows lacks. Libraries that look for them are imported before."""

USING = """
from pathlib import Path
from fastapi.testclient import TestClient
from ragcache import RagCache
from ragcache_api.cli.main import _COMMANDS, load_command
from ragcache_api.http import create_app, server
from ragcache_api.settings import ServiceSettings

folder, notes = Path(sys.argv[1]), Path(sys.argv[2])
for command in _COMMANDS:
    load_command(command)
question = "Where does the spare key of the boathouse hang?"
with RagCache.open(folder / "state", embedding="none", force_modes=True) as rag:
    rag.ingest("notes", [notes])
    answer = rag.ask(question, collection="notes")
    rag.collections.export_archive("notes", folder / "notes.tar")
    rag.collections.delete("notes")
    rag.collections.import_archive(folder / "notes.tar")
    service = create_app(rag, ServiceSettings(state=folder / "state"))
    with TestClient(service, base_url="http://localhost") as client:
        body = {"question": question, "collection": "notes"}
        served = client.post("/v1/answers", json=body)
    print(answer.text, served.json()["text"], len(rag.documents.get("notes")), sep="|")
"""


@pytest.mark.slow
def test_a_folder_is_used_without_what_windows_lacks(tmp_path: Path, notes: Path) -> None:
    (notes / "mooring.docx").write_bytes(docx())
    command = [sys.executable, "-c", HIDING + USING, str(tmp_path), str(notes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    asked, served, documents = done.stdout.strip().split("|")
    assert "red cupboard" in asked
    assert served == asked
    assert documents == "4"


def test_bytes_are_read_at_a_position_by_any_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    found = []
    with file.open("rb") as opened:
        for _ in range(2):
            buffer = bytearray(4)
            count = files.read_into(opened.fileno(), memoryview(buffer), 8)
            found.append((files.read_at(opened.fileno(), 3, 2), count, bytes(buffer)))
            for name in ("pread", "preadv"):
                monkeypatch.delattr(os, name, raising=False)
    assert found == [(b"234", 2, b"89\0\0")] * 2


@pytest.mark.parametrize("can_go", [True, False])
def test_a_mapped_file_keeps_its_content(
    can_go: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAPPED_FILES_CAN_GO", can_go)
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "empty").touch()
    with (tmp_path / "file").open("rb") as opened:
        content = files.map_file(opened)
    assert isinstance(content, mmap.mmap)
    content[0] = ord("x")
    assert content[:] == b"x123456789"
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    with (tmp_path / "empty").open("rb") as opened, pytest.raises(ValueError, match="empty file"):
        files.map_file(opened)


UNLIMITED = """
from ragcache import processes
processes._limit_time = lambda *seconds: None
processes.serve(eval)
"""


def test_the_parent_ends_a_worker_that_has_no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.processes._HAS_TIMERS", False)
    pool = WorkerPool(UNLIMITED, 1)
    assert pool.call(b"b'quick'", seconds=60, memory=2**30) == b"quick"
    with pytest.raises(WorkerTimeout, match=r"more than 0\.2 s"):
        pool.call(b"[0 for _ in iter(int, 1)]", seconds=60, memory=2**30, wall_seconds=0.2)
    with pytest.raises(WorkerFailed, match="exit status 3"):
        pool.call(b"__import__('os')._exit(3)", seconds=60, memory=2**30)
    pool.close()


class LateTimer(threading.Timer):
    """A timer that is over when it is canceled, and takes a while to end the process."""

    def run(self) -> None:
        self.finished.wait()
        time.sleep(0.1)
        self.function()


@pytest.mark.slow
def test_a_worker_that_its_timer_ends_takes_no_further_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragcache.processes._HAS_TIMERS", False)
    monkeypatch.setattr(threading, "Timer", LateTimer)
    pool = WorkerPool(UNLIMITED, 1)
    for _ in range(2):
        payload = b"__import__('time').sleep(0.3) or b'slept'"
        assert pool.call(payload, seconds=60, memory=2**30) == b"slept"
    pool.close()


PRINTING = """
from ragcache_api.cli import main
main.app = lambda: print("a → b")
main.main()
"""


def test_letters_that_a_terminal_lacks_are_replaced() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, b"a ? b")
