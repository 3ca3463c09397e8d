"""Functions in C for packed weights, compiled by this machine's compiler once.

torch multiplies packed weights with activations in bfloat16, one row at a time. Processors multiply
8-bit numbers four times as quickly, and `packed.c` does so. `gguf.c` multiplies out the weights of
GGUF files. Both are compiled for the processor at hand, as the inductor of torch and Triton compile
theirs, and the library is kept in the cache folder. They compute in the threads of torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from huggingface_hub import cached_assets_path
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

TILE, GROUP = 16, 32
"""Outputs of a tile, and inputs that share a scale."""
_FOLDER = Path(__file__).parent
_SOURCES = {"packed.c": (), "gguf.c": ("-ffp-contract=off",)}  # with flags of their own
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_TARGETS = ("-march=native", "-mcpu=native")  # one of them is known to every compiler
_SECONDS = 120.0  # that a compiler has
_WHOLE, _LONG, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_WEIGHT, _END = (_ADDRESS, _ADDRESS), (_ADDRESS, _WHOLE)
_ARGUMENTS = {
    "packed_product": (_WHOLE, *_WEIGHT, _LONG, _LONG, *_WEIGHT, _LONG, _WHOLE, *_END),
    "packed_unpack": (_WHOLE, *_WEIGHT, _LONG, _LONG, _LONG, *_END, _WHOLE),
    "packed_pack": (_WHOLE, _ADDRESS, _WHOLE, _LONG, _LONG, *_WEIGHT, _WHOLE),
    "gguf_dequantize": (_WHOLE, _ADDRESS, _LONG, _ADDRESS, _WHOLE, _WHOLE),
}
_RESULTS = {"packed_pack": ctypes.c_double, "gguf_dequantize": _WHOLE}


class Packed(NamedTuple):
    """A weight [outputs, inputs] in tiles, as `packed.c` describes them."""

    bits: int
    outputs: int
    inputs: int
    numbers: Tensor
    """uint8 [tiles, groups, 64 * bits]."""
    scales: Tensor
    """bfloat16 [tiles, groups, 1, 16], in 4 bits [tiles, groups, 2, 16] with zeros."""


class Kernels:
    """The functions of one compiled library. Tensors are in float32 or bfloat16, on the CPU."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = _RESULTS.get(name)
        self._product = self._library.packed_product

    def product(self, rows: Tensor, packed: Packed) -> Tensor:
        """rows: [R, inputs]; returns [R, outputs] in their dtype."""
        bits, outputs, inputs, numbers, scales = packed
        count = rows.shape[0]
        out = rows.new_empty(count, outputs)
        work = torch.empty(count * (inputs + 8 * (inputs // GROUP)), dtype=torch.uint8)
        weight, half = (numbers.data_ptr(), scales.data_ptr()), rows.dtype == torch.bfloat16
        data = rows.data_ptr(), out.data_ptr(), count, half, work.data_ptr()
        self._product(bits, *weight, outputs, inputs, *data, torch.get_num_threads())
        return out

    def unpack(self, packed: Packed, begin: int, end: int, out: Tensor) -> None:
        """Write tiles begin:end of a weight to `out`, [16 * (end - begin), inputs]."""
        weight = packed.numbers.data_ptr(), packed.scales.data_ptr(), packed.inputs
        half = out.dtype == torch.bfloat16
        data = begin, end, out.data_ptr(), half, torch.get_num_threads()
        self._library.packed_unpack(packed.bits, *weight, *data)

    def pack(self, weight: Tensor, bits: int) -> tuple[Packed, float]:
        """A weight [outputs, inputs] in 4 or 8 bits, and the sum of its squared errors."""
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        tiles, groups = -(-outputs // TILE), inputs // GROUP
        numbers = torch.empty(tiles, groups, TILE * GROUP * bits // 8, dtype=torch.uint8)
        scales = torch.empty(tiles, groups, 2 if bits == 4 else 1, TILE, dtype=torch.bfloat16)
        source = weight.data_ptr(), weight.dtype == torch.bfloat16, outputs, inputs
        made = numbers.data_ptr(), scales.data_ptr(), torch.get_num_threads()
        error = self._library.packed_pack(bits, *source, *made)
        return Packed(bits, outputs, inputs, numbers, scales), error

    def dequantize(self, data: NDArray[np.uint8], kind: int, blocks: int, out: Tensor) -> bool:
        """Write weights of a GGUF file to `out`. Returns False for types that it does not know.

        Args:
            data: Blocks of the file, one after another.
            kind: Number of their type in GGUF files.
            blocks: Number of blocks.
            out: As many weights, in float32 or bfloat16.
        """
        half = out.dtype == torch.bfloat16
        data = np.ascontiguousarray(data)
        made = out.data_ptr(), half, torch.get_num_threads()
        return bool(self._library.gguf_dequantize(kind, data.ctypes.data, blocks, *made))


@cache
def load_kernels() -> Kernels | None:
    """The kernels for this processor, or none where no compiler makes them: a log line says why."""
    library = kernel_folder() / f"packed-{_digest()}.so"
    try:
        if not library.exists():
            compile_kernels(library)
        return Kernels(library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("weights cannot be multiplied in 8 and 4 bits: %s", error)
        return None


def kernel_folder() -> Path:
    """The folder of compiled libraries, in the cache folder of models. It may be deleted at any
    time."""
    return cached_assets_path("ragcache", namespace="models", subfolder="kernels")


def compile_kernels(library: Path, targets: Sequence[str] = _TARGETS) -> None:
    """Compile all functions to a library, for the first target that the compiler knows.

    Any number of processes may compile the same library: each renames its own when it is whole.

    Raises:
        RuntimeError: There is no C compiler, or it fails.
        OSError: The folder cannot be written.
    """
    compiler = os.environ.get("CC") or next(filter(which, _COMPILERS), None)
    if compiler is None:
        raise RuntimeError("this machine has no C compiler; install gcc or clang")
    with TemporaryDirectory(dir=library.parent) as folder:
        part, told = f"{folder}/packed.so", ""
        made = {f"{folder}/{name}.o": name for name in _SOURCES}
        for target in targets:
            common = [*compiler.split(), *_FLAGS, target, *_openmp()]
            for command in (
                *(
                    [*common, *_SOURCES[name], "-c", str(_FOLDER / name), "-o", to]
                    for to, name in made.items()
                ),
                [*compiler.split(), "-shared", *made, *_openmp_library(), "-lm", "-o", part],
            ):
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_SECONDS, check=False
                )
                if done.returncode:
                    told = done.stderr.strip()[-500:]
                    break
            else:
                Path(part).replace(library)
                return
    raise RuntimeError(f"{compiler} does not compile {', '.join(_SOURCES)}: {told}")


def _openmp() -> list[str]:
    """Flags for loops in threads, where torch has the library for them."""
    if not _openmp_library():
        return []
    return ["-Xpreprocessor", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]


@cache
def _openmp_library() -> list[str]:
    """torch's own library of threads. Another one beside it would take the cores twice."""
    home = Path(torch.__file__).parent
    folders = (home / "lib", home.parent / "torch.libs")
    return [str(file) for folder in folders for file in sorted(folder.glob("lib*omp[-.]*"))][:1]


def _digest() -> str:
    """Digest of all that a compiled library depends on."""
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in _SOURCES]
    parts += [repr(_SOURCES), repr(_FLAGS), repr(_openmp_library())]
    parts += [torch.__version__, platform.platform(), *_processor()]
    return xxhash.xxh3_128_hexdigest("|".join(parts).encode())


def _processor() -> list[str]:
    """Lines of the system that name the processor and its instructions."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.exists():
        return [platform.machine(), platform.processor()]
    lines = cpus.read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
