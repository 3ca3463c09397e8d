"""Attention over segments on NVIDIA GPUs: Triton kernels, and the tables that they read."""
