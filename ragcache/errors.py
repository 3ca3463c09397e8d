"""Named errors. Each message says what was wrong, where, and what to do.

    RagCacheError
    ├── ConfigurationError          a setting or an argument that cannot be used
    ├── DocumentError
    │   ├── NoDocuments             nothing to ingest
    │   ├── UnreadableDocument      a file that is missing, binary or not UTF-8
    │   └── UnstorableMetadata      metadata that JSON cannot hold
    ├── ModelError
    │   ├── ModelNotFound           no such model folder or hub name
    │   ├── UnsupportedModel        an architecture, position scheme or window not served
    │   └── MissingExtra            an optional dependency is not installed
    ├── RequestError
    │   ├── ConstraintFailed        what constrains the request's tokens failed
    │   ├── DeadlineExceeded        the request's time was over before it ended
    │   ├── EmptyQuestion
    │   ├── EngineClosed            the engine takes no requests any longer
    │   ├── EngineFailed            a step failed under the request
    │   ├── IdempotencyConflict     a key that another request was sent with
    │   ├── InvalidRequest          a request whose parameters cannot be used
    │   ├── PromptTooLong           prompt and answer exceed the model's window
    │   ├── QueueFull               as many requests wait as the queue holds
    │   ├── RequestCancelled        its caller gave the request up
    │   ├── UnknownCollection
    │   ├── UnknownJob
    │   ├── UnknownKey              no API key has this id
    │   ├── UnknownModule
    │   ├── UnknownSchema
    │   └── UnusableLogits          every next token is forbidden, or the logits are not finite
    └── StoreError
        ├── NoState                 a folder that holds no ragcache state
        ├── LedgerTooNew            the ledger was written by a later version
        ├── LedgerUnavailable       the database is locked, or does not answer
        ├── StoreBudgetExceeded     more bytes are leased at once than the budget holds
        ├── StoreFull               no space left on the device
        ├── StoreUnwritable         the state folder cannot be written
        ├── StoreUnreadable         a blob is there but cannot be read (permission, I/O error)
        ├── StateCorrupt            a blob failed its checksum (encoded again by the facade)
        ├── StateMissing            a tier does not hold a key, or its blob has vanished
        └── RemoteUnavailable       a remote tier did not answer in time, or not at all

Errors of the markup language (`ragcache_schemas.PMLError` and below) stand on their own: the
language does not depend on the engine.
"""

from __future__ import annotations


class RagCacheError(Exception):
    """The root of every error that ragcache raises on purpose."""


class ConfigurationError(RagCacheError, ValueError):
    """A setting or an argument that cannot be used."""


class DocumentError(RagCacheError):
    """A document cannot be ingested."""


class NoDocuments(DocumentError, ValueError):
    """There was nothing to ingest."""


class UnreadableDocument(DocumentError, ValueError):
    """A file is missing, binary or not UTF-8."""


class UnstorableMetadata(DocumentError, ValueError):
    """Metadata of a document holds what JSON cannot."""


class ModelError(RagCacheError):
    """A model cannot be loaded or served."""


class ModelNotFound(ModelError, ValueError):
    """There is no such model folder, or the hub has no such name."""


class UnsupportedModel(ModelError, ValueError):
    """The model has a property that the segment design does not serve."""


class MissingExtra(ModelError, ImportError):
    """An optional dependency is not installed."""


class RequestError(RagCacheError):
    """A request cannot be answered."""


class ConstraintFailed(RequestError):
    """What constrains the request's tokens failed while it ran."""


class DeadlineExceeded(RequestError, TimeoutError):
    """The request's time was over before it ended."""


class EmptyQuestion(RequestError, ValueError):
    """A question without text."""


class EngineClosed(RequestError):
    """The engine takes no requests any longer."""


class EngineFailed(RequestError):
    """A step of the engine failed while the request ran."""


class IdempotencyConflict(RequestError, ValueError):
    """An idempotency key was sent with another request before."""


class InvalidRequest(RequestError, ValueError):
    """A request whose parameters cannot be used."""


class PromptTooLong(RequestError, ValueError):
    """Prompt and answer together exceed the model's window."""


class QueueFull(RequestError):
    """As many requests wait as the engine's queue holds."""


class RequestCancelled(RequestError):
    """The caller gave the request up before it ended."""


class UnknownCollection(RequestError, KeyError):
    """No collection has this name."""

    __str__ = Exception.__str__  # KeyError would quote the message


class UnknownJob(RequestError, KeyError):
    """No ingestion has this id."""

    __str__ = Exception.__str__


class UnknownKey(RequestError, KeyError):
    """No API key has this id."""

    __str__ = Exception.__str__


class UnknownModule(RequestError, KeyError):
    """No module has this id."""

    __str__ = Exception.__str__


class UnknownSchema(RequestError, KeyError):
    """No schema has this name."""

    __str__ = Exception.__str__


class UnusableLogits(RequestError, ArithmeticError):
    """No next token can be chosen: each is forbidden, or the model's logits are not finite."""


class StoreError(RagCacheError):
    """The store of states failed."""


class NoState(StoreError, ValueError):
    """A folder holds no ragcache state."""


class LedgerTooNew(StoreError, ValueError):
    """The ledger was written by a later version of ragcache."""


class LedgerUnavailable(StoreError, OSError):
    """The ledger's database is locked by another process, or does not answer."""


class StoreBudgetExceeded(StoreError):
    """More bytes are in use at once than a tier's budget holds."""


class StoreFull(StoreError, OSError):
    """The device that holds the state folder is full."""


class StoreUnwritable(StoreError, OSError):
    """The state folder cannot be written."""


class StoreUnreadable(StoreError, OSError):
    """A blob is there but the operating system does not read it."""


class StateCorrupt(StoreError):
    """A blob failed its checksum or cannot be parsed."""


class StateMissing(StoreError, KeyError):
    """A tier does not hold these states, or no longer."""

    __str__ = Exception.__str__


class RemoteUnavailable(StoreError, OSError):
    """A remote tier did not answer in time, or not at all."""
