"""Key/value states of a run of tokens, and the key that names all that they depend on."""

from ragcache.states.kv import FORMAT_VERSION, Arrival, KVKey, KVStates, state_key

__all__ = ["FORMAT_VERSION", "Arrival", "KVKey", "KVStates", "state_key"]
