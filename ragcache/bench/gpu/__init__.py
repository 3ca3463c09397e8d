"""The GPU backend's table: every figure beside what it must be, its goal, its floor and its peers.

`python -m ragcache.bench.gpu` needs torch, transformers, triton, numpy and safetensors only.
"""
