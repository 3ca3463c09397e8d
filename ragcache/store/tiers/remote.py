"""The remote tier: blobs under any URL that fsspec supports, shared by several machines.

A remote may be slow, broken or unreachable. Every call ends, with a result or a named error.
"""

from __future__ import annotations

import errno
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from ragcache.config import parse_optional_bytes
from ragcache.db.ledger import Ledger
from ragcache.errors import (
    ConfigurationError,
    MissingExtra,
    RemoteMismatch,
    RemoteUnavailable,
    StateMissing,
    StoreUnreadable,
    StoreUnwritable,
)
from ragcache.machine import run_in_daemon
from ragcache.states import KVKey
from ragcache.states.quantization import KVDtype, StoredStates, quantize, quantized_nbytes
from ragcache.states.serialization import read_blob, to_blob
from ragcache.store.tiers.base import PART, SUFFIX, Tier, check_budget, key_of, named_os_error
from ragcache.store.tiers.ranks import RankCopies
from ragcache.tiers import TIERS, TierOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")
_HEADER = 4096  # maximum bytes that a blob adds to its tensors
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Protocols of object stores, in which an object appears when its upload has ended."""

PLACE = "place"
"""Name of the file with the remote's identity."""

_CHECKED_SECONDS = 5.0  # between checks of the identity when blobs are written


class RemoteTier(Tier):
    """Blobs under a URL, in 256 folders named by the first digits of the keys.

    Outside of object stores, a blob is written under a temporary name and renamed. Blobs have
    checksums in any case. A call gets `retry.seconds` and `retry.attempts`. After the last failed
    attempt, calls fail at once for `retry.rest` seconds. `used_bytes` counts writes of this
    process; the ledger counts all.

    The folder of a remote that is not mounted is empty. So that its blobs do not count as missing,
    calls compare the remote's identity with `place` and raise `RemoteMismatch`.
    """

    name = "remote"
    traits = TIERS["remote"].traits

    def __init__(
        self,
        files: Any,
        root: str,
        budget_bytes: int | None = None,
        *,
        kv_dtype: KVDtype = "model",
        retry: RetryPolicy | None = None,
    ) -> None:
        """Create a tier in the folder `root` of an fsspec file system."""
        self.budget_bytes, self.kv_dtype = budget_bytes, kv_dtype
        self.files, self.root = files, root.rstrip("/")
        protocol = files.protocol
        self._whole = not _WHOLE.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        self._calls = RemoteCalls(self.root, retry or RetryPolicy())
        self.place = ""
        """Expected identity of the remote. Empty until it is known."""
        self._checked = -_CHECKED_SECONDS
        self._sizes: dict[KVKey, int] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(64)]

    @classmethod
    def open(
        cls,
        url: str,
        budget_bytes: int | None = None,
        *,
        kv_dtype: KVDtype = "model",
        retry: RetryPolicy | None = None,
        **options: Any,
    ) -> RemoteTier:
        """Create a tier without calling the remote yet.

        Args:
            url: URL of the folder, such as `s3://bucket/states`.
            budget_bytes: Budget.
            kv_dtype: Storage format of the states.
            retry: Time limits and retries.
            options: Options of fsspec for the protocol.

        Raises:
            ConfigurationError: fsspec does not support the URL.
            MissingExtra: The protocol needs a package that is not installed.
        """
        from fsspec.core import url_to_fs

        try:
            files, root = url_to_fs(url, **options)
        except ImportError as error:
            raise MissingExtra(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"cannot use {url!r} as a remote tier: {error}") from error
        return cls(files, root, budget_bytes, kv_dtype=kv_dtype, retry=retry)

    @classmethod
    def from_options(
        cls,
        options: TierOptions,
        device: torch.device,  # noqa: ARG003
        ranks: RankCopies | None = None,  # noqa: ARG003
    ) -> RemoteTier | None:
        if options.remote is None:
            return None
        budget = parse_optional_bytes(options.remote_bytes)
        return cls.open(options.remote, budget, kv_dtype=options.kv_dtype)

    @property
    def used_bytes(self) -> int:
        return self._used

    def path(self, key: KVKey) -> str:
        return f"{self.root}/{key[:2]}/{key}{SUFFIX}"

    def read_place(self) -> str | None:
        """Return the identity of the remote, or None. Raises `RemoteUnavailable`."""
        path = f"{self.root}/{PLACE}"
        with suppress(FileNotFoundError):
            content: bytes = self._calls.run("read", lambda: self.files.cat_file(path))
            return content.decode("ascii", "replace")
        return None

    def write_place(self, place: str) -> None:
        """Write the identity of the remote. Raises `RemoteUnavailable` or `StoreUnwritable`."""
        content = place.encode("ascii")
        self._calls.run("write", lambda: self._write(f"{self.root}/{PLACE}", content))

    def check_place(self) -> None:
        """Raise `RemoteMismatch` unless the remote has the identity `place`."""
        if self.place and (found := self.read_place()) != self.place:
            named = "none" if found is None else repr(found)
            raise RemoteMismatch(
                f"the remote {self.root} has {named} in its file {PLACE!r}, but the ledger's has "
                f"{self.place!r}: it is another one, or what is mounted there is away. Mount it, "
                "or name the remote that the other processes use"
            )
        self._checked = time.monotonic()

    def check_identity(self, ledger: Ledger) -> None:
        self.place = ledger.get_fact(self.name) or ""
        try:
            found = self.read_place()
            if found is None and ledger.has_states(self.name):
                self.check_place()
            self.place = ledger.agree_on_fact(self.name, found or uuid4().hex)
            if found is None:
                self.write_place(self.place)
            self.check_place()
        except StoreUnwritable as error:
            self.place = ""
            logger.warning("%s; the remote is read without being compared", error)

    def size_of(self, states: StoredStates) -> int:
        return quantized_nbytes(states, self.kv_dtype) + _HEADER

    def put(self, key: KVKey, states: StoredStates) -> int:
        if time.monotonic() - self._checked > _CHECKED_SECONDS:
            self.check_place()
        blob = to_blob(key, quantize(states, self.kv_dtype))
        with self._lock:
            check_budget(self.name, self.budget_bytes, self._used, len(blob))
            self._used += len(blob)
        written = 0
        with self._turn(key):
            try:
                self._calls.run("write", lambda: self._write(self.path(key), blob))
                written = len(blob)
            finally:
                with self._lock:
                    self._used += written - len(blob)
                    if written:
                        self._used -= self._sizes.pop(key, 0)
                        self._sizes[key] = written
        return written

    def get(self, key: KVKey) -> StoredStates:
        path = self.path(key)
        try:
            content: bytes = self._calls.run("read", lambda: self.files.cat_file(path))
        except FileNotFoundError:
            self.check_place()
            raise StateMissing(f"there is no blob {path}") from None
        memory = partial(torch.empty, dtype=torch.uint8)
        return read_blob(io.BytesIO(content), key, path, memory)

    def delete(self, key: KVKey) -> None:
        with self._turn(key):
            with suppress(FileNotFoundError):  # another machine may have deleted it
                self._calls.run("delete", lambda: self.files.rm_file(self.path(key)))
            with self._lock:
                self._used -= self._sizes.pop(key, 0)

    def _turn(self, key: KVKey) -> threading.Lock:
        """Return the lock of a key. It keeps the bytes of concurrent writes and deletes right."""
        return self._turns[int(key[:2], 16) % len(self._turns)]

    def __contains__(self, key: KVKey) -> bool:
        return bool(self._calls.run("look up", lambda: self._exists(self.path(key))))

    def keys(self) -> Iterator[KVKey]:
        return iter(self._calls.run("list", self._list))

    def _write(self, path: str, blob: bytes) -> None:
        """Write a blob. Another machine may have written the same content."""
        folder = path.rpartition("/")[0]
        self.files.makedirs(folder, exist_ok=True)
        if self._whole:
            self.files.pipe_file(path, blob)
            return
        part = f"{path}.{uuid4().hex}{PART}"
        try:
            self.files.pipe_file(part, blob)
            self.files.mv(part, path)
        except BaseException:
            if self.files.exists(part):
                self.files.rm_file(part)
            raise

    def _exists(self, path: str) -> bool:
        self.files.invalidate_cache()
        return bool(self.files.exists(path))

    def _list(self) -> list[KVKey]:
        self.files.invalidate_cache()  # other machines write as well
        try:
            paths = self.files.find(self.root)
        except FileNotFoundError:
            return []
        keys = (key_of(path.rpartition("/")[2]) for path in paths)
        return [key for key in keys if key is not None]


_FINAL = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits and retries of remote calls."""

    seconds: float = 10.0
    """Time limit of an attempt."""
    attempts: int = 3
    """Maximum number of attempts."""
    pause: float = 0.1
    """Seconds before the second attempt, doubled for each later one."""
    rest: float = 5.0
    """Seconds without calls after the last failed attempt."""


class RemoteCalls:
    """Runs operations on one remote, with a time limit, retries and a rest after failures."""

    def __init__(
        self, where: str, retry: RetryPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.where, self.retry, self.clock = where, retry, clock
        self._rests_until = 0.0

    def run(self, verb: str, operation: Callable[[], T]) -> T:
        """Run an operation and return its result.

        Raises:
            FileNotFoundError: As raised by the operation.
            StoreFull: The remote has no room. Not retried.
            StoreUnwritable: The remote refuses to write. Not retried.
            StoreUnreadable: The remote refuses to read. Not retried.
            RemoteUnavailable: The last attempt failed, or the remote rests after failures.
        """
        left = self._rests_until - self.clock()
        if left > 0:
            raise RemoteUnavailable(
                f"cannot {verb} under {self.where}: it failed a moment ago and is tried again in "
                f"{left:.0f} s"
            )
        attempts = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self.retry.attempts),
            wait=wait_exponential(self.retry.pause),
            reraise=True,
        )
        try:
            return attempts(lambda: self._within(operation))
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system raises errors of its own
            if _may_pass(error):
                self._rests_until = self.clock() + self.retry.rest
                raise RemoteUnavailable(
                    f"cannot {verb} under {self.where}, tried {self.retry.attempts} times "
                    f"({str(error) or type(error).__name__}); check the address, the network and "
                    "the credentials"
                ) from error
            if isinstance(error, PermissionError) and verb not in ("write", "delete"):
                raise StoreUnreadable(f"cannot {verb} under {self.where}: {error}") from error
            raise named_os_error(error, self.where) from error

    def _within(self, operation: Callable[[], T]) -> T:
        """Run an operation in a thread that is abandoned after the time limit.

        Raises `TimeoutError`.
        """
        done = run_in_daemon(operation, "ragcache-remote")
        if not wait([done], self.retry.seconds).done:
            raise TimeoutError(f"no answer within {self.retry.seconds:g} s")
        return done.result()


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed. Each protocol has its own errors."""
    final = isinstance(error, FileNotFoundError | PermissionError)
    final = final or getattr(error, "errno", None) in _FINAL
    return isinstance(error, Exception) and not final
