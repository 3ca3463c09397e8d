"""Benchmarks with which users judge a machine: `ragcache bench`."""
