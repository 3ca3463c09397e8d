"""The GPU backend's table: floors by hand, gaps, and every part on a tiny shape on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu
import gpu_table
import pytest
import torch
from gpu import PARTS, SuiteRun, main, report
from gpu_device import DecodeAttention
from torch import Tensor

from ragcache.bench.harness import SHAPES, LlamaShape
from tests.conftest import REPOSITORY
from tests.interpreted import interpreted

TINY = LlamaShape(2, 32, 4, 2, 48, 64, 512, tied=False)
LOAD = gpu_table.GpuWorkload(
    preamble=4, documents=16, document_tokens=4, question=4, runs=2,
    decode=(("32x4K", 3, 16), ("256x4K", 5, 16), ("256x16K", 5, 32)), decode_tokens=9,
    order=(("32", 3), ("256", 5)), requests=4, each=2, new_tokens=5, serve_runs=2,
    attention=(("32x4K", 2, 16), ("32x16K", 2, 32)), peer_runs=1, user_tokens=5,
    new_texts=(3, 9), beside=(2,), beside_tokens=300, beside_runs=2,
)  # fmt: skip
H200 = gpu_table.Ceilings(read_gb_s=4400.0, h2d_gb_s=55.5, bf16_tflops=790.0)


def made_up(**results: Any) -> dict[str, Any]:
    """A document of the 7B whose first tokens are known."""
    return {
        "machine": {"gpu": "a device", "processor": "", "torch": "2", "transformers": "5",
                    "date": "today"},
        "parts": ["ttft"],
        "shapes": {"7b": asdict(SHAPES["7b"])},
        "workload": asdict(gpu_table.GpuWorkload()),
        "ceilings": asdict(H200),
        "results": {"7b": results},
        "errors": {},
        "seconds": {"7b ttft": 1.5},
    }  # fmt: skip


GOOD = made_up(
    ttft={"4": {"ms": 5.5}, "16": {"ms": 7.0}}, hf={"4": {"prefill_ms": 129.0, "concat_ms": 27.0}}
)


def test_a_step_is_bound_by_reading_or_by_its_operations() -> None:
    """Few rows read all weights and states; many rows multiply."""
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 4096 * 32000
    states = 32 * 2 * 4096 * 1024
    few = gpu_table.step_seconds(SHAPES["7b"], H200, 1, [(1024, 1)], [], logits=1)
    assert few == pytest.approx(2 * (weights + states) / 4.4e12)
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    pairs = 8192 * 8193 / 2
    many = gpu_table.step_seconds(SHAPES["8b"], H200, 8192, [], [(8192, 8192)], logits=0)
    assert many == pytest.approx((2 * 8192 * weights + 32 * 4 * pairs * 4096) / 790e12)


@pytest.mark.parametrize(
    ("name", "floors"),
    [
        ("ttft_4", (3.5, 3.6)), ("ttft_16", (5.0, 4.1)), ("decode_32x4K", (3.8, 3.6)),
        ("decode_256x16K", (8.9, 7.7)), ("serve", (0.80, 0.43)), ("serve_int8", (0.56, 0.37)),
        ("encode", (1.1, 1.2)), ("attention_32x4K", (22.9, 5.7)),
        ("attention_32x16K", (68.6, 17.2)),
    ],
)  # fmt: skip
def test_floors_at_the_ceilings_of_one_device(name: str, floors: tuple[float, float]) -> None:
    [target] = [target for target in gpu_table.TARGETS if target.name == name]
    assert target.floor is not None
    for shape, floor in zip(SHAPES.values(), floors, strict=True):
        assert target.floor(shape, H200, gpu_table.GpuWorkload()) == pytest.approx(floor, abs=0.06)


def test_every_must_is_at_least_its_goal_and_its_floor() -> None:
    for target in gpu_table.TARGETS:
        for name, shape in SHAPES.items():
            must, goal = target.of(target.must, name), target.of(target.goal, name)
            if must is not None:
                assert goal <= must
            if goal is not None and target.floor is not None:
                assert target.floor(shape, H200, gpu_table.GpuWorkload()) <= goal
    assert len({target.name for target in gpu_table.TARGETS}) == len(gpu_table.TARGETS)


def test_a_row_shows_its_peers_and_gaps_to_must_goal_and_floor() -> None:
    text = gpu_table.render_text(GOOD)
    [line] = [line for line in text.splitlines() if line.startswith("7b TTFT 4 x")]
    for cell in ("5.50 ms", "6.50", "+1.00", "5.40", "-0.10 short", "3.51", "1.57x", "129", "10.3"):
        assert cell in line
    assert "MISSED" not in text
    assert "states concatenated in a DynamicCache 27.0 ms" in text
    assert "read 4400 GB/s" in text


@pytest.mark.parametrize(
    ("ms", "error", "status"), [(7.0, None, 0), (8.6, None, 1), (None, "no memory", 1)]
)
def test_check_fails_for_a_missed_must_or_a_missing_figure(
    ms: float | None, error: str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    document = made_up(ttft={"4": {"ms": 5.5}, **({"16": {"ms": ms}} if ms else {})})
    assert report(document, check=True) == status
    assert [figure.name for figure in gpu_table.missed(document)] == (["ttft_16"] if status else [])
    assert report(document, check=False) == 0, "without check only errors count"
    if error:
        document["errors"]["7b ttft"] = error
        assert report(document, check=False) == 1
        assert error in capsys.readouterr().out
        assert gpu_table.figures_of(document)[1].reason == error


def test_a_file_is_rendered_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(GOOD))
    assert main(["--render", str(file)]) == 0
    rendered = capsys.readouterr().out
    assert rendered == gpu_table.render_markdown(GOOD)
    heads, _, *rows = rendered.splitlines()
    assert [cell.strip() for cell in heads.strip("|").split("|")] == list(gpu_table.HEADINGS)
    assert len([row for row in rows if row.startswith("| 7b")]) == 2
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- gpu table -->\nOld.\n<!-- end of gpu table -->\nAfter.\n")
    for _ in range(2):
        assert main(["--render", str(file), "--into", str(page)]) == 0
    text = page.read_text()
    assert gpu_table.render_markdown(GOOD) in text
    assert "Old." not in text
    assert text.startswith("Before.\n")
    assert text.endswith("-->\nAfter.\n")


@pytest.mark.slow
@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.nightly
def test_every_part_runs_on_a_tiny_shape() -> None:
    saved: list[int] = []
    run = SuiteRun({"7b": TINY}, PARTS, LOAD, "cpu", save=lambda d: saved.append(len(d["seconds"])))
    document = run.run()
    assert saved == sorted(saved), "it is saved after every part"
    assert len(saved) > len(PARTS)
    assert document["errors"] == {}
    assert "7b attention_32x4K" in document["missed"], "a CPU has no figure for it"
    measured = {row["name"]: row["value"] for row in document["rows"]}
    for name, value in measured.items():
        if "attention" not in name and name != "serve_int8":
            assert value is not None, name
    results = document["results"]["7b"]
    assert len(results["ttft"]["4"]["runs_ms"]) == LOAD.runs
    assert results["ttft"]["4"]["stats"]["prompt_tokens"] >= LOAD.runs * LOAD.question
    assert results["decode"]["256x4K"]["tokens_s"] > 0
    assert results["decode"]["32x4K"]["host_ms"] > 0
    assert results["hf"]["4"]["concat_ms"] > 0
    assert results["tiers"]["ms"] > 0
    assert results["profile"] == {"skipped": "there is no device"}
    for name, rows, _ in LOAD.decode:
        found = results["decode"][name]
        assert len(found["steps_ms"]) == LOAD.decode_tokens - 2 * 2
        decoded = found["stats"]["decoded_tokens"]
        assert decoded == pytest.approx(rows * found["stats"]["steps"], abs=2 * rows)
    again = json.loads(json.dumps(document))
    assert gpu_table.rows_of(again) == document["rows"]
    assert gpu_table.render_text(again) == gpu_table.render_text(document)


@pytest.mark.usefixtures("little_to_collect")
def test_a_part_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise MemoryError("everything is full")

    monkeypatch.setitem(gpu.SESSION_PARTS, "ttft", broken)
    load = replace(LOAD, placed=(2,), serve_runs=1)
    result = SuiteRun({"7b": TINY}, ["ttft", "serve"], load, "cpu").run()
    assert result["results"]["7b"]["serve"]["model"]["total_s"] > 0
    assert "everything is full" in result["errors"]["7b ttft"]
    assert "7b TTFT 4" in gpu_table.render_text(result)


_BLOCKED = """
import runpy, sys

sys.modules.update(dict.fromkeys({blocked}))
sys.path.insert(0, "benchmarks")
sys.argv[1:] = ["--help"]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_script_runs_where_only_torch_and_transformers_are() -> None:
    blocked = {
        "sqlalchemy", "alembic", "typer", "rich", "faiss", "tantivy", "lxml", "langchain_core",
        "langchain_text_splitters", "fastapi", "uvicorn", "xxhash", "psutil", "matplotlib",
    }  # fmt: skip
    code = _BLOCKED.format(blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    assert "--shape" in done.stdout


def _turned(states: Tensor, positions: int, theta: float) -> Tensor:
    """Rotated by so many positions, dimension i with i + R/2. states: [..., D]."""
    size = states.shape[-1]
    angles = positions * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


@interpreted
@pytest.mark.parametrize("runs", [1, 4])
def test_what_is_timed_is_attention_over_runs_in_any_order(runs: int) -> None:
    shape, rows, length = LlamaShape(1, 64, 4, 2, 96, 64, 512), 3, 64 // runs
    timed = DecodeAttention(shape, rows, 64, runs, "cpu", torch.float32)
    timed.layers = 1
    timed.launch()
    for row in range(rows):
        for head in range(shape.num_heads):
            query, group = timed.query[head, row], head // 2
            scores, values = [], []
            for place, number in enumerate(timed.orders[row]):
                keys = _turned(timed.states[number][0][0, group], place * length, shape.theta)
                scores.append(keys @ query)
                values.append(timed.states[number][1][0, group])
            own = slice(64 * row, 64 * row + 63)
            scores += [timed.pool[0][0, group, own] @ query, timed.key[group, row] @ query[:, None]]
            values += [timed.pool[1][0, group, own], timed.value[group, row][None]]
            weights = (torch.cat(scores) * timed.scale).softmax(0)
            expected = weights @ torch.cat(values)
            torch.testing.assert_close(timed.out[row, head], expected, rtol=1e-4, atol=1e-5)
