"""The KV store: states in tiers, with leases, eviction, and recovery from the ledger."""

from ragcache.store.admin import TierStatus, tier_status
from ragcache.store.eviction import EvictionIndex, TierEntries
from ragcache.store.leases import Lease, LeaseRequest, Origin
from ragcache.store.store import KVStore, open_tiers
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier, RemoteTier, Tier

__all__ = [
    "DeviceTier",
    "DiskTier",
    "EvictionIndex",
    "HostTier",
    "KVStore",
    "Lease",
    "LeaseRequest",
    "Origin",
    "RemoteTier",
    "Tier",
    "TierEntries",
    "TierStatus",
    "open_tiers",
    "tier_status",
]
