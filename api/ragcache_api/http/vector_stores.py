"""Vector stores of OpenAI's interface, which are collections with a name, an expiry and files.

The id of a vector store is the name of its collection, and any collection of the namespace is a
vector store. A file in a store is a document with the id of the file. Its status follows from the
job that stores it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any

from ragcache import SourceDocument
from ragcache.db import StoredObject
from ragcache.documents import ReadOptions, read_file
from ragcache.errors import (
    InvalidRequest,
    MissingExtra,
    UnknownCollection,
    UnknownJob,
    UnreadableDocument,
    UnstorableMetadata,
)
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.service import RequestContext

FILE, STORE, ATTACHED, BATCH = "file", "vector_store", "vector_store.file", "file_batch"
_DAY = 86_400.0
_STATUSES = {
    "queued": "in_progress",
    "running": "in_progress",
    "done": "completed",
    "canceled": "cancelled",
}
_ACTIVE_SECONDS = 60.0  # between two notes of a store's last use


class VectorStores:
    """The vector stores of a caller's namespace. Methods block on the ledger."""

    def __init__(self, context: RequestContext) -> None:
        self._context, self._rag, self._objects = context, context.rag, context.objects

    def create(self, value: Mapping[str, Any], description: str = "") -> str:
        """Create a store, and return its id."""
        id = f"vs_{token_hex(12)}"
        self._rag.collections.create(id, description)
        self._objects.add(STORE, {**value, "last_active_at": time.time()}, id=id)
        return id

    def ids(self) -> list[str]:
        """Return the ids of all stores, the oldest one first. Deletes expired stores."""
        made = {each.id: each for each in self._objects.list(STORE)}
        names = self._rag.collections.names()
        kept = [name for name in names if not self._ended(name, made.get(name))]
        return sorted(kept, key=lambda name: made[name].created_at if name in made else 0.0)

    def get(self, id: str) -> dict[str, Any]:
        """Return a store as OpenAI writes it. Raises `HTTPProblem` (404)."""
        own = self._own(id)
        value = own.value if own else {}
        files = self._objects.list(ATTACHED, id)
        counts = self.counts(files)
        others = self._documents(id) - counts["completed"]
        counts["completed"] += max(0, others)
        counts["total"] += max(0, others)
        expires = self._expires_at(value)
        return {
            "id": id,
            "object": "vector_store",
            "name": value.get("name") or ("" if own else id),
            "created_at": int(own.created_at) if own else 0,
            "last_active_at": int(value["last_active_at"]) if own else None,
            "metadata": value.get("metadata") or {},
            "status": "in_progress" if counts["in_progress"] else "completed",
            "usage_bytes": sum(each.value.get("bytes", 0) for each in files),
            "file_counts": counts,
            "expires_after": value.get("expires_after"),
            "expires_at": None if expires is None else int(expires),
        }

    def change(self, id: str, changes: Mapping[str, Any]) -> None:
        """Change name, metadata or expiry of a store."""
        own = self._own(id)
        if own is None:
            self._objects.add(STORE, {"last_active_at": time.time(), **changes}, id=id)
        else:
            self._objects.change(STORE, id, {**own.value, **changes})

    def touch(self, id: str) -> None:
        """Note that a store is used, from which its expiry counts. Raises `HTTPProblem` (404)."""
        own, now = self._own(id), time.time()
        if own is not None and now - own.value["last_active_at"] > _ACTIVE_SECONDS:
            self._objects.change(STORE, id, {**own.value, "last_active_at": now})

    def delete(self, id: str) -> None:
        """Delete a store with its documents. The files stay. Raises `HTTPProblem` (404)."""
        self._own(id)
        self._delete(id)

    def attach(
        self, id: str, files: Sequence[tuple[str, Mapping[str, Any]]], batch: str = ""
    ) -> list[StoredObject]:
        """Store files as documents, in the background.

        A file that cannot be read is attached with its reason.

        Args:
            id: The store.
            files: Ids of files with their attributes.
            batch: Id of their batch.

        Raises:
            HTTPProblem: (404) There is no such store or file. (400) Attributes cannot be stored.
            QueueFull: Too many jobs wait.
        """
        self.touch(id)
        found = [(self._file(name), attributes) for name, attributes in files]
        documents, values = list[SourceDocument](), list[dict[str, Any]]()
        for file, attributes in found:
            value = {
                "file_id": file.id,
                "attributes": dict(attributes),
                "bytes": file.value["bytes"],
                "batch": batch,
                "job": None,
            }
            values.append(value)
            try:
                documents.append(self._document(file, attributes))
            except (UnreadableDocument, MissingExtra) as error:
                value["error"] = {"code": "unsupported_file", "message": str(error)}
        if documents:
            try:
                job = self._rag.jobs.submit(id, documents).public_id
            except UnstorableMetadata as error:
                raise InvalidRequest(str(error)) from None
            for value in values:
                value["job"] = None if "error" in value else job
        attached = []
        for value in values:
            name = _attached(id, value["file_id"])
            attached.append(self._objects.add(ATTACHED, value, id=name, owner=id))
        return attached

    def attached(self, id: str, file: str) -> StoredObject:
        """Return a file of a store. Raises `HTTPProblem` (404)."""
        self._own(id)
        found = self._objects.get(ATTACHED, _attached(id, file))
        if found is None:
            detail = f"the vector store {id!r:.100} holds no file {file!r:.200}"
            raise HTTPProblem(404, "not-found", detail)
        return found

    def files(self, id: str, batch: str | None = None) -> list[StoredObject]:
        """Return the files of a store, or of one of its batches, the oldest first."""
        self._own(id)
        files = self._objects.list(ATTACHED, id)
        return [each for each in files if batch in (None, each.value["batch"])]

    def file(self, attached: StoredObject) -> dict[str, Any]:
        """Return a file of a store as OpenAI writes it."""
        value, error = attached.value, attached.value.get("error")
        status = "failed" if error else "completed"
        if value["job"] is not None:
            try:
                job = self._rag.jobs.get(value["job"])
                status = _STATUSES.get(job.status, "failed")
                if status == "failed":
                    error = {"code": "server_error", "message": job.error or job.status}
            except UnknownJob:  # the ledger keeps the latest jobs alone
                status = "completed"
        return {
            "id": value["file_id"],
            "object": "vector_store.file",
            "created_at": int(attached.created_at),
            "vector_store_id": attached.owner,
            "status": status,
            "last_error": error,
            "usage_bytes": value["bytes"],
            "attributes": value["attributes"],
            "chunking_strategy": {"type": "other"},
        }

    def counts(self, files: Sequence[StoredObject]) -> dict[str, int]:
        """Count files by status."""
        counts = dict.fromkeys(("in_progress", "completed", "failed", "cancelled"), 0)
        for each in files:
            counts[self.file(each)["status"]] += 1
        return counts | {"total": len(files)}

    def detach(self, id: str, file: str) -> None:
        """Remove the document of a file from a store. Raises `HTTPProblem` (404)."""
        found = self.attached(id, file)
        if found.value["job"] is not None:
            self._rag.jobs.cancel(found.value["job"])
        self._rag.delete(id, [file])
        self._objects.delete(ATTACHED, found.id)

    def detach_everywhere(self, file: str) -> None:
        """Remove the documents of a file from all stores."""
        for each in self._objects.list(ATTACHED):
            if each.value["file_id"] == file:
                self.detach(each.owner, file)

    def create_batch(self, id: str, files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Attach files as one job, and return the id of their batch."""
        batch = f"vsfb_{token_hex(12)}"
        self.attach(id, files, batch)
        self._objects.add(BATCH, {}, id=batch, owner=id)
        return batch

    def batch(self, id: str, batch: str) -> dict[str, Any]:
        """Return a batch as OpenAI writes it. Raises `HTTPProblem` (404)."""
        self._own(id)
        found = self._objects.get(BATCH, batch)
        if found is None or found.owner != id:
            detail = f"the vector store {id!r:.100} has no batch {batch!r:.200}"
            raise HTTPProblem(404, "not-found", detail)
        counts = self.counts(self.files(id, batch))
        kinds = ("in_progress", "cancelled", "completed", "failed")
        status = next((each for each in kinds if counts[each]), "completed")
        return {
            "id": batch,
            "object": "vector_store.files_batch",
            "created_at": int(found.created_at),
            "vector_store_id": id,
            "status": status,
            "file_counts": counts,
        }

    def cancel_batch(self, id: str, batch: str) -> None:
        """Cancel the job of a batch. Raises `HTTPProblem` (404)."""
        self.batch(id, batch)
        jobs = {each.value["job"] for each in self.files(id, batch)} - {None}
        for job in jobs:
            self._rag.jobs.cancel(job)

    def _own(self, id: str) -> StoredObject | None:
        """Return the object of a store, if there is one. Raises `HTTPProblem` (404)."""
        own = self._objects.get(STORE, id)
        try:
            self._rag.collections.instruction(id)
        except UnknownCollection:
            own, ended = None, True
        else:
            ended = self._ended(id, own)
        if ended:
            detail = f"there is no vector store {id!r:.200}; it may have expired"
            raise HTTPProblem(404, "not-found", detail)
        return own

    def _ended(self, id: str, own: StoredObject | None) -> bool:
        """Delete a store that has expired. Tells whether it has."""
        expires = None if own is None else self._expires_at(own.value)
        if expires is None or expires > time.time():
            return False
        self._delete(id)
        return True

    def _delete(self, id: str) -> None:
        self._rag.collections.delete(id)
        self._objects.delete_owned(id)
        self._objects.delete(STORE, id)

    def _documents(self, id: str) -> int:
        return self._rag.documents.page(id, limit=1).total or 0

    def _file(self, file: str) -> StoredObject:
        found = self._objects.get(FILE, file)
        if found is None:
            raise HTTPProblem(404, "not-found", f"there is no file {file!r:.200}")
        return found

    def _document(self, file: StoredObject, attributes: Mapping[str, Any]) -> SourceDocument:
        """Read a file as a document. Raises `UnreadableDocument` or `MissingExtra`."""
        content = self._objects.content(FILE, file.id) or b""
        limits = ReadOptions.of(self._context.service.shared.config)
        left = self._context.deadline
        limits = replace(limits, seconds=min(limits.seconds, left))
        name = file.value["filename"]
        read = read_file(name, content, limits)
        metadata = {**read.metadata, **attributes}
        return replace(read, id=file.id, uri=name, metadata=metadata)

    @staticmethod
    def _expires_at(value: Mapping[str, Any]) -> float | None:
        after = value.get("expires_after")
        return None if not after else float(value["last_active_at"] + after["days"] * _DAY)


def _attached(id: str, file: str) -> str:
    return f"{id}/{file}"


def shown_attributes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a document that OpenAI's clients can hold."""
    return dict(_scalars(metadata))


def _scalars(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in metadata.items():
        if isinstance(value, str | int | float | bool):
            yield name, value
