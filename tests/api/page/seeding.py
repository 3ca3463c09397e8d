"""State folders for tests of the page, and the service over them in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from tiers import fill_ledger, vary_states

from ragcache import RagCache, SourceDocument
from ragcache.config import NAMESPACE
from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.service import Service
from ragcache_api.http.stats_recorder import POINT_SECONDS, POINTS, SOURCES, StatsRecorder

SUBJECTS = tuple("invoices returns travel security pensions expenses parking badges".split())
_RULE = "Every request of {} goes to the office at the north gate, two weeks ahead, in writing. "


def seed_handbook(folder: Path, model: LoadedModel) -> None:
    """Eight documents of one module, and `leave.md` of two, in the collection `handbook`."""
    texts = {f"{each}.md": f"# {each}\n\n{_RULE.format(each)}" for each in SUBJECTS}
    texts["leave.md"] = "# Leave\n\n" + "\n\n".join(
        f"{_RULE.format('leave')}The grace period of {kind} leave is fourteen days."
        for kind in ("annual", "parental")
    )
    with RagCache.open(folder, model, module_tokens=64) as rag:
        rag.ingest("handbook", [SourceDocument(name, text, name) for name, text in texts.items()])


def seed_modules(folder: Path, number: int) -> None:
    """So many modules in the collection `bench`, whose states differ in size and uses."""
    folder.mkdir()
    fill_ledger(folder, number)
    vary_states(folder)


def record_hour(service: Service) -> None:
    """Fills each point of the last hour's series."""
    now = time.time()
    clock = _Clock()
    service.recorder = StatsRecorder(clock)
    stats = service.recorder.stats_of(NAMESPACE)
    stats.outcomes["finished"] = 18_234
    for number in range(POINTS):
        clock.now = now - POINT_SECONDS * (POINTS - 1 - number)
        point = stats.point()
        point.tokens.update(dict.fromkeys(SOURCES, 100 + number))
        point.first_token["hit"].append(0.04)
        point.first_token["miss"].append(0.6)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serve_page(rag: RagCache, **settings: Any) -> Iterator[tuple[str, Service]]:
    """Serves on a free port; yields the address and the service."""
    app = create_app(rag, ServiceSettings.read(**settings))
    config = uvicorn.Config(app, port=0, log_level="error", timeout_keep_alive=75)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", app.state.service
    finally:
        server.should_exit = True
        thread.join()
