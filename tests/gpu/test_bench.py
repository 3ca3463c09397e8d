"""Every part of the GPU bench, on a small shape."""

from __future__ import annotations

import pytest
import torch
from gpu import PARTS, SuiteRun
from gpu_table import GpuWorkload

from ragcache.bench.harness import LlamaShape

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

SMALL = LlamaShape(2, 512, 8, 2, 1024, 1024, 8192, tied=False)
LOAD = GpuWorkload(
    documents=16, document_tokens=256, runs=4, serve_runs=1, peer_runs=1, decode_tokens=16,
    decode=(("32x4K", 32, 4096), ("256x4K", 40, 4096), ("256x16K", 40, 4096)),
    order=(("32", 8), ("256", 16)), requests=16, new_tokens=8, user_tokens=8,
    new_texts=(64, 600, 4000), beside=(4,), beside_tokens=256, beside_runs=3,
)  # fmt: skip


def test_every_part_gives_its_figure() -> None:
    document = SuiteRun({"7b": SMALL}, PARTS, LOAD, "cuda").run()
    assert document["errors"] == {}
    for row in document["rows"]:
        assert row["value"] is not None or row["name"] == "serve_int8", row
    profile = document["results"]["7b"]["profile"]
    assert profile["ttft"]["kernels"]
    assert 0 < profile["decode_32"]["busy_share"] <= 1
