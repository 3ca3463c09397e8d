"""Tensor parallel: several processes, the ranks, compute each layer of one model together.

The leader, which is this process, has scheduler, sampler, store and ledger. A follower has weights,
a part of the heads, and the steps that the leader sends (docs/internals/tensor_parallel.md).
"""
