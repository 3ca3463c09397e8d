"""KV states of a run of tokens, and the key that identifies them."""

from ragcache.states.kv import FORMAT_VERSION, Arrival, KVKey, KVStates, state_key

__all__ = ["FORMAT_VERSION", "Arrival", "KVKey", "KVStates", "state_key"]
