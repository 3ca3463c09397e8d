"""A process that opens a model of a shape with random weights, and answers one question.

`gpu_served.bench_start` runs it with the shape as JSON and the device as arguments. Prints the time
at the end of each stage. No weights are read, which would depend on the disk.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from ragcache.bench.harness import LlamaShape


class WarmUpTimes(logging.Handler):
    """Keeps the times at which the parts of a warm-up end, from what the engine logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.stages: dict[str, float] = {}
        logger = logging.getLogger("ragcache.engine")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the time of a record, by its text."""
        self.stages[record.getMessage()] = record.created


def start(shape: LlamaShape, device: str) -> dict[str, float]:
    """Return the times at which stages end, by the clock of all processes."""
    from ragcache.bench.shape_session import PATIENCE, ShapeSession

    stages = {"imported": time.time()}
    progress = WarmUpTimes()
    session = ShapeSession(shape, 64, device)
    causal = session.causal
    session.synchronize()
    stages["model"] = time.time()
    engine = session.engine
    assert engine.config.warm_up
    root = session.root
    stages |= progress.stages
    stages["warm"] = time.time()
    assert root.length == session.preamble
    context = session.context([], 1, session.tokens(64))
    engine.submit_request(session.request(context, 1)).result(PATIENCE)
    stages["answer"] = time.time()
    assert causal.window
    session.close()
    return stages


if __name__ == "__main__":
    print(json.dumps(start(LlamaShape(**json.loads(sys.argv[1])), sys.argv[2])))
