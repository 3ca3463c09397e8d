"""Connections to other ecosystems."""
