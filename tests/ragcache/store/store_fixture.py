"""A library: documents whose states follow from their texts, ingested as the pipeline does it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ragcache.db import Catalog, Database, NewDocument, NewModule, RunningJob
from ragcache.states import KVKey, KVStates
from ragcache.store import KVStore, Lease, LeaseRequest, Origin
from tests.ragcache.conftest import encode_missing, full_lease, same

COLLECTION = "library"
STATE_BYTES = 320  # of one state in memory
ROOT = KVKey(hashlib.sha256(b"preamble").hexdigest())


def key_of(text: str) -> KVKey:
    return KVKey(hashlib.sha256(text.encode()).hexdigest())


def states_of(key: KVKey) -> KVStates:
    """States of four tokens that tell their key."""
    numbers = torch.frombuffer(bytearray.fromhex(key), dtype=torch.uint8).float()
    return KVStates(numbers.view(1, 1, 4, 8), -numbers.view(1, 1, 4, 8), 0)


def texts_of(name: str, version: int) -> list[str]:
    """The modules of a version of a document: some shared with other versions and documents."""
    own = [f"{name} v{version} #{n}" for n in range(1 + version % 3)]
    return [f"{name} for ever", *own, f"shared {version % 2}"]


class Library:
    """An open store with a catalog. `made` counts what had to be encoded."""

    def __init__(self, folder: Path, where: Path | str, states: int = 24) -> None:
        self.folder = folder
        self.database = Database.open(where)
        self.store = KVStore.open(folder, self.database, states * STATE_BYTES)
        self.catalog = Catalog(self.database, "tokenizer", None)
        self.made: list[KVKey] = []

    def produce(self, keys: Sequence[KVKey]) -> Iterator[KVStates]:
        for key in keys:
            self.made.append(key)
            yield states_of(key)

    def lease(self, keys: Sequence[KVKey], origin: Origin) -> Lease:
        """Leases a preamble and then modules."""
        lease = full_lease(self.store, [ROOT], self.produce, LeaseRequest(origin, "root"))
        try:
            lease.extend(keys, LeaseRequest(origin, "rooted", ROOT))
            encode_missing(lease, self.produce)
        except BaseException:
            lease.release()
            raise
        return lease

    def put(self, name: str, version: int) -> None:
        """Ingests a version of a document."""
        texts = texts_of(name, version)
        keys = [key_of(text) for text in texts]
        jobs = self.store.jobs
        with jobs.running(f"collection {COLLECTION}", len(texts)) as job:
            jobs.expect(job, keys)
            for key in keys:
                self.lease([key], "ingest").release()
            modules = [
                NewModule(f"{name}#{n + 1}", text, [n], key)
                for n, (text, key) in enumerate(zip(texts, keys, strict=True))
            ]
            document = NewDocument(name, "", str(version), modules)
            running = RunningJob(job, jobs.session)
            freed = self.catalog.replace_documents(COLLECTION, [document], job=running)
            self.store.discard(freed)

    def delete(self, name: str) -> None:
        self.store.discard(self.catalog.delete_documents(COLLECTION, [name]))

    def keys(self, name: str) -> list[KVKey]:
        return list(self.catalog.keys(COLLECTION, [name]))

    def read(self, name: str) -> list[str]:
        """Lease one document as a question does, check its states, and return their tiers."""
        rows = [row for row in self.catalog.modules(COLLECTION) if row.document == name]
        keys = [key_of(row.text) for row in rows]
        with self.lease(keys, "question") as lease:
            for key, states in zip(lease.keys, lease.states, strict=True):
                assert same(states, states_of(key)), f"wrong states of {key}"
            return [lease.source[key] for key in keys]

    def versions(self) -> dict[str, int]:
        """The documents and the versions that they have, whose modules are theirs."""
        found = {name: int(row.digest) for name, row in self.catalog.documents(COLLECTION).items()}
        rows = self.catalog.modules(COLLECTION) if found else []
        for name, version in found.items():
            texts = [row.text for row in rows if row.document == name]
            assert texts == texts_of(name, version), f"{name} is not whole"
        return found

    def close(self) -> None:
        self.store.close()
        self.database.close()
