"""Calls to something that may be slow, broken or away: each ends, and says how."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from ragcache.errors import RemoteUnavailable, StoreUnreadable
from ragcache.store.tiers.files import named_os_error

T = TypeVar("T")
_FINAL = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Patience:
    """seconds: how long one attempt may take. attempts: how many there are. pause: seconds before
    the second, twice as long before each that follows. rest: seconds without any after the last."""

    seconds: float = 10.0
    attempts: int = 3
    pause: float = 0.1
    rest: float = 5.0


class Calls:
    """Runs operations on one remote with patience."""

    def __init__(
        self, where: str, patience: Patience, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.where, self.patience, self.clock = where, patience, clock
        self._rests_until = 0.0

    def run(self, verb: str, operation: Callable[[], T]) -> T:
        """What the operation returns.

        Raises `FileNotFoundError` as it comes, `StoreFull`, `StoreUnwritable` and `StoreUnreadable`
        at once, and `RemoteUnavailable` after the last attempt, or while the remote has its rest.
        """
        wait = self._rests_until - self.clock()
        if wait > 0:
            raise RemoteUnavailable(
                f"cannot {verb} under {self.where}: it failed a moment ago and is tried again in "
                f"{wait:.0f} s"
            )
        attempts = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self.patience.attempts),
            wait=wait_exponential(self.patience.pause),
            reraise=True,
        )
        try:
            return attempts(lambda: self._within(operation))
        except FileNotFoundError:
            raise
        except Exception as error:
            if _may_pass(error):
                self._rests_until = self.clock() + self.patience.rest
                raise RemoteUnavailable(
                    f"cannot {verb} under {self.where}, tried {self.patience.attempts} times "
                    f"({str(error) or type(error).__name__}); check the address, the network and "
                    "the credentials"
                ) from error
            if isinstance(error, PermissionError) and verb not in ("write", "delete"):
                raise StoreUnreadable(f"cannot {verb} under {self.where}: {error}") from error
            raise named_os_error(error, self.where) from error

    def _within(self, operation: Callable[[], T]) -> T:
        """Runs in a thread that is left behind when its time is up. Raises `TimeoutError`."""
        done: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(operation())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="ragcache-remote", daemon=True)
        thread.start()
        thread.join(self.patience.seconds)
        if failed:
            raise failed[0]
        if not done:
            raise TimeoutError(f"no answer within {self.patience.seconds:g} s")
        return done[0]


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed. Each protocol has errors of its own."""
    final = isinstance(error, FileNotFoundError | PermissionError)
    final = final or getattr(error, "errno", None) in _FINAL
    return isinstance(error, Exception) and not final
