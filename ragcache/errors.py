"""Named errors. Each message says what went wrong, where, and how to fix it.

    RagCacheError
    ├── ArchiveError: ArchiveDamaged, ArchiveMismatch
    ├── ConfigurationError
    ├── DocumentError: DocumentsChanged, NoDocuments, OriginalChanged, OriginalMissing,
    │   UnreadableDocument, UnstorableMetadata
    ├── ModelError: ModelNotFound, UnsupportedModel, MissingExtra
    ├── RequestError: CollectionExists, ConstraintFailed, DeadlineExceeded, EmptyQuestion,
    │   EncodingOutOfMemory, EngineClosed, EngineFailed, IdempotencyConflict, InvalidRequest,
    │   JobCanceled, JobTaken, ModeRefused, NamespaceDeleted, PinBudgetExceeded, PromptTooLong,
    │   QueueFull, RequestCancelled, TextFailed, UnknownCollection, UnknownJob, UnknownKey,
    │   UnknownModule, UnknownNamespace, UnknownSchema, UnusableLogits
    ├── ServiceFailed
    └── StoreError: NoState, LedgerOfOtherVersion, LedgerUnavailable,
        StoreBudgetExceeded, StoreFull, StoreUnwritable, StoreUnreadable, StateCorrupt,
        StateMissing, RemoteUnavailable: RemoteMismatch

Errors of the markup language derive from `ragcache_schemas.PMLError`: the language does not depend
on ragcache.
"""

from __future__ import annotations

__all__ = [
    "ArchiveDamaged",
    "ArchiveError",
    "ArchiveMismatch",
    "CollectionExists",
    "ConfigurationError",
    "ConstraintFailed",
    "DeadlineExceeded",
    "DocumentError",
    "DocumentsChanged",
    "EmptyQuestion",
    "EncodingOutOfMemory",
    "EngineClosed",
    "EngineFailed",
    "IdempotencyConflict",
    "InvalidRequest",
    "JobCanceled",
    "JobTaken",
    "LedgerOfOtherVersion",
    "LedgerUnavailable",
    "MissingExtra",
    "ModeRefused",
    "ModelError",
    "ModelNotFound",
    "NamespaceDeleted",
    "NoDocuments",
    "NoState",
    "OriginalChanged",
    "OriginalMissing",
    "PinBudgetExceeded",
    "PromptTooLong",
    "QueueFull",
    "RagCacheError",
    "RemoteMismatch",
    "RemoteUnavailable",
    "RequestCancelled",
    "RequestError",
    "ServiceFailed",
    "StateCorrupt",
    "StateMissing",
    "StoreBudgetExceeded",
    "StoreError",
    "StoreFull",
    "StoreUnreadable",
    "StoreUnwritable",
    "TextFailed",
    "UnknownCollection",
    "UnknownJob",
    "UnknownKey",
    "UnknownModule",
    "UnknownNamespace",
    "UnknownSchema",
    "UnreadableDocument",
    "UnstorableMetadata",
    "UnsupportedModel",
    "UnusableLogits",
]


class RagCacheError(Exception):
    """The base class of all errors that ragcache raises deliberately."""


class ArchiveError(RagCacheError):
    """The archive of a collection cannot be imported."""


class ArchiveDamaged(ArchiveError, ValueError):
    """The archive was cut off or changed, or is none."""


class ArchiveMismatch(ArchiveError, ValueError):
    """Another model or another version of ragcache made the archive."""


class ConfigurationError(RagCacheError, ValueError):
    """A setting or an argument cannot be used."""


class DocumentError(RagCacheError):
    """A document cannot be ingested."""


class DocumentsChanged(DocumentError):
    """Another process changed the documents that a call renames."""


class NoDocuments(DocumentError, ValueError):
    """There was nothing to ingest."""


class OriginalChanged(DocumentError):
    """The file of a document has changed since it was ingested."""


class OriginalMissing(DocumentError):
    """The file of a document is gone, or the document was not read from a file."""


class UnreadableDocument(DocumentError, ValueError):
    """A file is missing, binary or not UTF-8."""


class UnstorableMetadata(DocumentError, ValueError):
    """JSON cannot hold the metadata of a document."""


class ModelError(RagCacheError):
    """A model cannot be loaded or served."""


class ModelNotFound(ModelError, ValueError):
    """There is no such model folder, or the hub has no such name."""


class UnsupportedModel(ModelError, ValueError):
    """The model has an architecture, position scheme or window that is not supported."""


class MissingExtra(ModelError, ImportError):
    """An optional dependency is not installed."""


class RequestError(RagCacheError):
    """A request cannot be answered."""

    __str__ = Exception.__str__  # KeyError would quote the message


class CollectionExists(RequestError, ValueError):
    """A collection of this name has documents already."""

    @classmethod
    def with_documents(cls, collection: str, number: int) -> CollectionExists:
        """Return the error of an import into a collection that has so many documents."""
        return cls(
            f"the collection {collection!r} has {number:,} documents; import into another "
            "collection (`--as NAME`), or replace them (`--replace`)"
        )


class ConstraintFailed(RequestError):
    """The grammar that constrains the request's tokens failed."""


class DeadlineExceeded(RequestError, TimeoutError):
    """The request did not end before its deadline."""


class EmptyQuestion(RequestError, ValueError):
    """The question has no text."""


class EncodingOutOfMemory(RequestError, MemoryError):
    """The model's device has too little memory for a module, even for that module alone."""


class EngineClosed(RequestError):
    """The engine is closed and accepts no requests."""

    @classmethod
    def of_folder(cls) -> EngineClosed:
        """Return the error of a call after `RagCache.close`."""
        return cls("the state folder is closed; open it again with RagCache.open")

    @classmethod
    def of_fork(cls) -> EngineClosed:
        """Return the error of a call in a process that was forked after the engine was opened."""
        return cls(
            "this process was forked after the engine was opened, and has no thread that computes; "
            "open the folder or the engine in the child, after forking, or start processes by "
            "'spawn'"
        )


class EngineFailed(RequestError):
    """A step of the engine failed while the request ran, or the engine's thread has ended."""


class IdempotencyConflict(RequestError, ValueError):
    """The idempotency key was used for another request."""


class InvalidRequest(RequestError, ValueError):
    """A parameter of the request cannot be used."""


class JobCanceled(RequestError):
    """The ingestion was canceled, or its collection or namespace deleted."""


class JobTaken(RequestError):
    """Another process runs the ingestion, since this one was silent and counted as dead."""


class ModeRefused(RequestError, ValueError):
    """The mode's answers are too far from the answers of `exact` on this model, or the model cannot
    read states."""


class NamespaceDeleted(RequestError):
    """The namespace was deleted while a request or an ingestion in it ran."""


class PinBudgetExceeded(RequestError):
    """The pins of a caller would exceed its budget."""


class PromptTooLong(RequestError, ValueError):
    """Prompt and answer exceed the model's window."""


class QueueFull(RequestError):
    """The queue of waiting requests is full."""


class RequestCancelled(RequestError):
    """The caller cancelled the request."""


class TextFailed(RequestError, ValueError):
    """The tokens of the answer could not be converted to text."""


class UnknownCollection(RequestError, KeyError):
    """No collection has this name."""


class UnknownJob(RequestError, KeyError):
    """No ingestion has this id."""


class UnknownKey(RequestError, KeyError):
    """No API key has this id."""


class UnknownModule(RequestError, KeyError):
    """No module has this id."""


class UnknownNamespace(RequestError, KeyError):
    """No namespace has this name."""


class UnknownSchema(RequestError, KeyError):
    """No schema has this name."""


class UnusableLogits(RequestError, ArithmeticError):
    """No token can be sampled: all are forbidden, or the logits are not finite."""


class ServiceFailed(RagCacheError):
    """A running service cannot be reached, or refused a request."""


class StoreError(RagCacheError):
    """The store failed."""


class NoState(StoreError, ValueError):
    """The folder holds no ragcache state."""

    @classmethod
    def in_folder(cls, folder: object) -> NoState:
        """Return the error for a folder without a ledger."""
        return cls(
            f"there is no ragcache state in {folder}; make one with "
            f"`ragcache ingest COLLECTION PATH --state {folder}`"
        )


class LedgerOfOtherVersion(StoreError, ValueError):
    """Another version of ragcache made the ledger."""


class LedgerUnavailable(StoreError, OSError):
    """The ledger's database is locked by another process, or does not answer."""


class StoreBudgetExceeded(StoreError):
    """Leased states exceed the budget of a tier."""


class StoreFull(StoreError, OSError):
    """The device that holds the state folder is full."""


class StoreUnwritable(StoreError, OSError):
    """The state folder cannot be written."""


class StoreUnreadable(StoreError, OSError):
    """The operating system cannot read a blob: no permission, or an I/O error."""


class StateCorrupt(StoreError):
    """A blob failed its checksum or cannot be parsed. It is encoded again."""


class StateMissing(StoreError, KeyError):
    """A tier does not hold these states, or not any more."""

    __str__ = Exception.__str__


class RemoteUnavailable(StoreError, OSError):
    """A remote tier did not answer in time, or not at all."""


class RemoteMismatch(RemoteUnavailable):
    """A remote tier is not the ledger's, or its file system is not mounted."""
