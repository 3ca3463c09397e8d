"""Benchmarks: ratios of things run side by side in one process."""
