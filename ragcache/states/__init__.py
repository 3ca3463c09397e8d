"""KV states of a run of tokens, and the key that identifies them."""

from ragcache.states.kv import (
    FORMAT_VERSION,
    Arrival,
    KVKey,
    KVStates,
    pack_numbers,
    state_key,
    unpack_numbers,
)

__all__ = [
    "FORMAT_VERSION",
    "Arrival",
    "KVKey",
    "KVStates",
    "pack_numbers",
    "state_key",
    "unpack_numbers",
]
