"""Sizes from shapes are those that tiers allocate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragcache.models import CausalLM
from ragcache.planning.sizes import TierSize, bytes_per_token, shape_of, tier_sizes
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype, quantize, quantized_nbytes
from ragcache.store import DiskTier, HostTier


def drawn(causal: CausalLM, tokens: int) -> KVStates:
    generator = torch.Generator().manual_seed(tokens)
    shape = shape_of(causal, tokens).keys.shape
    both = torch.randn(2, *shape, generator=generator, dtype=causal.dtype)
    return KVStates(both[0], both[1], 0)


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_a_token_takes_what_another_one_adds(causal: CausalLM, kind: str) -> None:
    kv_dtype = check_kv_dtype(kind)
    one, two = (quantize(drawn(causal, n), kv_dtype).nbytes for n in (40, 41))
    assert bytes_per_token(causal)[kind] == two - one


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_tiers_allocate_no_more_than_is_planned(
    causal: CausalLM, kind: str, tmp_path: Path
) -> None:
    lengths, kv_dtype = [7, 7, 33], check_kv_dtype(kind)
    planned = {
        (size.tier, size.kv_dtype): size.nbytes
        for size in tier_sizes(causal, lengths, {"host": 1, "disk": 1})
    }
    host, disk = HostTier(1 << 20, kv_dtype=kv_dtype), DiskTier(tmp_path, kv_dtype=kv_dtype)
    for number, tokens in enumerate(lengths):
        for tier in (host, disk):
            tier.put(KVKey(f"{number:064x}"), drawn(causal, tokens))
    assert host.used_bytes == planned["host", kind]
    needed = sum(quantized_nbytes(drawn(causal, n), kv_dtype) for n in lengths)
    assert needed < disk.used_bytes <= planned["disk", kind]


def test_only_tiers_with_a_budget_are_planned(causal: CausalLM) -> None:
    sizes = tier_sizes(causal, [10], {"host": 10**9, "device": 10**9})
    assert [(s.tier, s.kv_dtype) for s in sizes] == [
        ("device", "model"), *(("host", kind) for kind in KV_DTYPES)
    ]  # fmt: skip


def test_what_fits_is_a_share_of_bytes() -> None:
    assert TierSize("host", "model", 100, 25).share == 0.25
    assert TierSize("host", "model", 100, 100).share == 1.0
    assert TierSize("disk", "model", 100, None).share == 1.0
    assert TierSize("host", "model", 100, 0).share == 0.0
