"""Compiles kernels for GPUs that need not be there, and prints what their machine code consists of.

Run as a script by `test_compiled.py`, since a process that interprets kernels cannot compile them:
`compiled.py KERNELS.py ...`, with a line of JSON on standard input for each kernel: {"kernel",
"element", "capability", "constants", "warps", "stages"}.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

INSTRUCTIONS = ("HGMMA", "HMMA", "LDGSTS", "LDL", "STL")
_WIDE = ("bases", "scales", "position_ids")
_FLOATS = ("lse", "cos", "sin", "slopes", "sinks")
_STATES = ("query", "key", "value", "out", "merged")
_NUMBERS = ("layer", "window")


def run_compiling(code: str) -> None:
    """Run code in a process that compiles kernels, and see it succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def count_instructions(kernels: ModuleType, case: dict[str, Any]) -> dict[str, int]:
    """Count the instructions of each kind in the kernel of a case.

    LDL and STL are loads and stores of spilled registers, LDGSTS asynchronous copies, HGMMA and
    HMMA products of a warp group and of a warp. shared: its bytes of shared memory.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = getattr(kernels, case["kernel"]), case["constants"]
    names = kernel.arg_names
    types = {name: _type(name, case["element"]) for name in names if name not in constants}
    aligned = [n for n, kind in types.items() if kind.startswith("*") or n.endswith("_stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case["warps"], "num_stages": case["stages"], "enable_fp_fusion": True}
    target = GPUTarget("cuda", case["capability"], 32)
    compiled = triton.compile(source, target=target, options=options)
    code = _disassembled(compiled.asm["cubin"], Path(triton.__file__).parent)
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS}
    return {**counts, "shared": compiled.metadata.shared}


def _type(name: str, element: str) -> str:
    for names, kind in ((_WIDE, "*i64"), (_FLOATS, "*fp32"), (_STATES, f"*{element}")):
        if name in names:
            return kind
    if name == "scale":
        return "fp32"
    return "i32" if name in _NUMBERS or name.endswith("_stride") else "*i32"


def _disassembled(cubin: bytes, triton: Path) -> str:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton / "backends" / "nvidia" / "bin" / "cuobjdump", "-sass", file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def load_kernels(file: str) -> ModuleType:
    """Import a file without running its package."""
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    modules = [load_kernels(each) for each in sys.argv[1:]]
    for line in sys.stdin:
        case = json.loads(line)
        owner = next(each for each in modules if hasattr(each, case["kernel"]))
        print(json.dumps(count_instructions(owner, case)), flush=True)
