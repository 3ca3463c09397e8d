"""Replicas of the service behind a gateway, which routes requests by cached states."""
