"""Prints the source files that a question enters from `RagCache.ask` to attention.

    python tools/entered.py

The question has neither quotations nor a confidence, and the states of its documents are in memory.
A file counts once a function of it is called, in the caller's thread or the engine's. Threads that
work in the background, such as the store's sweep, do not count.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
THREADS = ("MainThread", "ragcache-engine")
TEXTS = {"leave.md": "There are 28 days of leave.", "keys.md": "The key hangs in the boathouse."}


class CallTrace:
    """Counts the calls into each source file, while it is switched on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.on = False
        threading.setprofile(self._record)  # for the engine's thread, which starts later

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call" or threading.current_thread().name not in THREADS:
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        file = str(path.relative_to(ROOT))
        if file.startswith("ragcache/attention"):
            self.on = False
        elif not file.startswith(("tools", ".venv")):
            self.calls[file] += 1

    def start(self) -> None:
        """Counts from here until the first call into `ragcache.attention`."""
        sys.setprofile(self._record)
        self.on = True


def trace_question() -> Counter[str]:
    """Asks a question twice, and counts the calls of the second time."""
    trace = CallTrace()
    from ragcache import GenerationParams, RagCache, SourceDocument

    documents = [SourceDocument(name, text) for name, text in TEXTS.items()]
    options = GenerationParams(extractive=False, confidence=False, max_tokens=2)
    with tempfile.TemporaryDirectory() as folder, RagCache.open(folder, embedding="none") as rag:
        rag.ingest("notes", documents)
        for number in range(2):
            if number:
                trace.start()
            rag.ask("Where does the key hang?", collection="notes", generation=options)
        sys.setprofile(None)
    return trace.calls


if __name__ == "__main__":
    found = trace_question()
    for file, calls in found.most_common():
        print(f"{calls:6} {file}")
    print(f"files entered from ask to attention: {len(found)}, calls: {found.total()}")
