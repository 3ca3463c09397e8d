"""The engine's batch with the names of the modules that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.config import NAMESPACE
from ragcache.engine.core import BatchSnapshot
from ragcache.store import Database
from ragcache.store.evictions import module_names


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """A segment that several rows of a batch read at once. name: the key of its states, with the
    part of them if it is one; module: None where they are a preamble, a scaffold or a schema's."""

    name: str
    module: str | None
    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The step that the engine computes. rows: new tokens; requests: that they belong to;
    encodings: modules that are encoded beside them; segments: the most read first."""

    rows: int
    requests: int
    encodings: int
    segments: tuple[BatchSegment, ...]


def batch_of(view: BatchSnapshot, database: Database, namespace: str) -> Batch:
    """Rows and requests are of all namespaces. Another one than the default sees no segments but
    those of its modules."""
    keys = {use.name: use.name.partition("[")[0] for use in view.segments}
    names: dict[str, str] = {}
    if keys:
        with database.reading() as session:
            names = module_names(session, list(keys.values()), namespace)
    segments = tuple(
        BatchSegment(use.name, names.get(keys[use.name]), use.tokens, use.requests, use.rows)
        for use in view.segments
        if namespace == NAMESPACE or keys[use.name] in names
    )
    return Batch(view.rows, view.requests, view.encodings, segments)
