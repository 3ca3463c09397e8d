"""Machine code of the kernels, compiled without a GPU: what is fast only by the compiler's grace.

Small changes of a kernel, as a hint of alignment on an integer rather than a pointer, take the
asynchronous copies away without a word; attention is then several times slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache.attention.triton.plan import HeadLayout
from tests.ragcache.attention.triton import compiled

pytest.importorskip("triton", reason="triton is not installed")

LLAMA_7B, LLAMA_8B = HeadLayout(32, 1, 128), HeadLayout(8, 4, 128)
DEEPSEEK, DEEPSEEK_V3 = HeadLayout.of(16, 1, 576, 512), HeadLayout.of(128, 1, 576, 512)
READER, PHI, GEMMA = HeadLayout(2, 7, 64), HeadLayout(32, 1, 80), HeadLayout(8, 2, 256)
COPIES = {64: 24, 80: 48, 128: 48, 256: 24}
"""Asynchronous copies at least, by D: three stages of keys and values, for two loops."""


def make_latent_kernels(heads: HeadLayout, capability: int) -> Any:
    from ragcache.attention.triton import latent_launch, launch

    angles, bfloat16 = torch.zeros(8, (heads.head_dim - heads.latent) // 2), torch.bfloat16
    kernels = latent_launch.LatentKernels(
        heads, bfloat16, "cpu", launch.RotationTables(angles, angles, True), max_entries=1,
        config=latent_launch.choose_latent_config(heads, bfloat16, divmod(capability, 10)),
    )  # fmt: skip
    kernels.overlapped = capability >= 90
    return kernels


def make_kernels(heads: HeadLayout, capability: int, **options: Any) -> Any:
    from ragcache.attention.triton import launch

    angles = torch.zeros(8, options.pop("rotated", heads.head_dim) // 2)
    rotation = launch.RotationTables(angles, angles, options.pop("interleaved", False))
    config = launch.choose_config(heads, torch.bfloat16, divmod(capability, 10))
    kernels = launch.TritonKernels(
        heads, torch.bfloat16, "cpu", rotation, max_entries=1, config=config, **options
    )
    kernels.overlapped = capability >= 90
    return kernels


Compile = Callable[[str, int, dict[str, Any], int, int], dict[str, int]]


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Counts the instructions of a kernel. One process compiles all of them."""
    from ragcache.attention.triton import launch

    folder = Path(launch.__file__).parent
    sources = [folder / "kernels.py", folder / "latent_kernels.py"]
    errors = tmp_path_factory.mktemp("compiler") / "errors"
    with errors.open("w") as log, subprocess.Popen(
        [sys.executable, compiled.__file__, *sources], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=log, env={**os.environ, "TRITON_INTERPRET": "0"},
    ) as compiler:  # fmt: skip
        cases, found = compiler.stdin, compiler.stdout
        assert cases is not None
        assert found is not None

        def count(
            kernel: str, capability: int, constants: dict[str, Any], warps: int, stages: int
        ) -> dict[str, int]:
            case = {
                "kernel": kernel, "element": "bf16", "capability": capability,
                "constants": constants, "warps": warps, "stages": stages,
            }  # fmt: skip
            print(json.dumps(case), file=cases, flush=True)
            line = found.readline()
            assert line, errors.read_text()
            counts: dict[str, int] = json.loads(line)
            return counts

        yield count


@pytest.mark.parametrize(
    ("heads", "capability", "options"),
    [
        (READER, 90, {}),
        (LLAMA_8B, 80, {}),
        (LLAMA_8B, 90, {"windows": (4096,), "softcap": 30.0}),
        (PHI, 90, {"rotated": 32}),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (LLAMA_7B, 90, {}),
                (LLAMA_8B, 90, {"quantized": True}),
                (LLAMA_8B, 90, {"interleaved": True}),
                (READER, 80, {}),
                (GEMMA, 90, {}),
            )
        ),
    ],
)
@pytest.mark.slow
def test_partial_copies_asynchronously_and_spills_nothing(
    instructions: Compile, heads: HeadLayout, capability: int, options: dict[str, Any]
) -> None:
    kernels = make_kernels(heads, capability, **options)
    config = kernels.configs["mixed"]
    constants = kernels.partial_constants(0)
    counts = instructions("partial_kernel", capability, constants, config.warps, config.stages)
    stages = 3 if capability >= 90 else 2
    assert counts["LDGSTS"] >= COPIES[heads.head_dim] * stages // 3
    assert counts["HGMMA" if capability >= 90 else "HMMA"] > 0
    if heads.head_dim <= 128:
        assert counts["STL"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("heads", [pytest.param(LLAMA_7B, marks=pytest.mark.nightly), LLAMA_8B])
def test_decode_steps_over_8_bits_spill_nothing(instructions: Compile, heads: HeadLayout) -> None:
    from ragcache.attention.triton import launch

    mixed = launch.choose_config(heads, torch.bfloat16)
    config = launch.choose_decode_config(heads, torch.bfloat16, mixed, quantized=True)
    assert config.block_rows < mixed.block_rows
    kernels = make_kernels(heads, 90, quantized=True)
    kernels.configs["decode"] = config
    constants = kernels.partial_constants(0, "decode")
    counts = instructions("partial_kernel", 90, constants, config.warps, config.stages)
    assert counts["LDGSTS"] > 0
    assert counts["STL"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "capability"),
    [
        (GEMMA, 120),
        pytest.param(LLAMA_8B, 120, marks=pytest.mark.nightly),
        pytest.param(GEMMA, 86, marks=pytest.mark.nightly),
    ],
)
def test_partial_fits_the_shared_memory_of_graphics_cards(
    instructions: Compile, heads: HeadLayout, capability: int
) -> None:
    kernels = make_kernels(heads, capability)
    config = kernels.configs["mixed"]
    constants = kernels.partial_constants(0)
    found = instructions("partial_kernel", capability, constants, config.warps, config.stages)
    assert 0 < found["shared"] <= 99 * 1024


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (LLAMA_8B, 64),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((LLAMA_7B, 16), (LLAMA_7B, 256), (LLAMA_8B, 16), (READER, 64))
        ),
    ],
)
@pytest.mark.slow
def test_tail_spills_little(instructions: Compile, heads: HeadLayout, rows: int) -> None:
    from ragcache.attention.triton.launch import choose_tail

    config = choose_tail(heads, torch.bfloat16, rows)
    constants = make_kernels(heads, 90).tail_constants(0, config)
    counts = instructions("tail_kernel", 90, constants, config.warps, 1)
    assert counts["STL"] <= 8  # once a program: less than another warp takes
    assert counts["HMMA"] > 0 or heads.group == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "capability"),
    [
        (DEEPSEEK_V3, 90),
        (DEEPSEEK, 120),
        pytest.param(DEEPSEEK, 90, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK, 80, marks=pytest.mark.nightly),
    ],
)
def test_latents_are_copied_asynchronously_and_spill_little(
    instructions: Compile, heads: HeadLayout, capability: int
) -> None:
    from ragcache.attention.triton.latent_launch import choose_latent_tail

    kernels = make_latent_kernels(heads, capability)
    config, tail = kernels.configs["mixed"], choose_latent_tail(heads, torch.bfloat16)
    constants = kernels.partial_constants(0), kernels.latent_tail_constants(0, tail)
    numbers = config.warps, config.stages
    found = instructions("latent_partial_kernel", capability, constants[0], *numbers)
    assert found["LDGSTS"] >= 20
    assert found["HGMMA" if capability == 90 else "HMMA"] > 0
    assert found["STL"] <= 16  # once an item
    assert found["shared"] <= (227 if capability == 90 else 99) * 1024
    found = instructions("latent_tail_kernel", capability, constants[1], tail.warps, tail.stages)
    assert found["HMMA"] > 0
    assert found["LDGSTS"] >= 16
    assert found["STL"] == 0
    assert found["shared"] <= 99 * 1024 or heads == DEEPSEEK_V3
