"""Memory that a GPU reads by itself: pages registered with CUDA."""

from __future__ import annotations

from typing import Any

import torch

from ragcache.errors import StoreError


def pin(address: int, nbytes: int) -> None:
    """Registers whole pages. Raises `StoreError` where the system refuses."""
    code = int(_runtime().cudaHostRegister(address, nbytes, 0)) if nbytes else 0
    if code:
        raise StoreError(
            f"cannot pin {nbytes:,} bytes of main memory (CUDA error {code}); lower host_bytes, "
            "raise the limit of locked memory (ulimit -l), or open the host tier unpinned"
        )


def unpin(address: int) -> None:
    """Ends a registration; copies from the pages must have ended."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
