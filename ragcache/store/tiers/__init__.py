"""Storage tiers. A tier stores states and counts bytes."""

from ragcache.store.tiers.base import Tier
from ragcache.store.tiers.device import DeviceTier
from ragcache.store.tiers.disk import DiskTier
from ragcache.store.tiers.host import HostTier
from ragcache.store.tiers.remote import RemoteTier, RetryPolicy

__all__ = ["DeviceTier", "DiskTier", "HostTier", "RemoteTier", "RetryPolicy", "Tier"]
