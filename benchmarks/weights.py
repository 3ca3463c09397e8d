"""Savings and costs of weights in 8 and 4 bits: bytes, processor time, and answers.

    python benchmarks/weights.py --json FILE

Layers of the size of Qwen3-0.6B's with random weights are loaded as they are stored, in bfloat16,
and quantized; the embedded reader answers questions of the handbook so.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark
from torch import Tensor

from ragcache import RagCache
from ragcache.evaluation import evaluate_modes, load_dataset
from ragcache.models import CausalLM, load_model
from ragcache.models.dtype import INT4, INT8
from ragcache.models.reader import READER
from ragcache.models.single_pass import forward_text
from ragcache_api.cli.console import example_handbook

KINDS = (None, INT8, INT4)


@dataclass(frozen=True, slots=True)
class WeightsSetting:
    """hidden, intermediate, layers: sizes of the model; rows: new tokens of the passes that are
    timed; runs: of each, in turn; questions: of the handbook, over the documents that answer."""

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 2
    rows: tuple[int, ...] = (1, 128)
    runs: int = 5
    questions: int = 48


def bench_weights(
    setting: WeightsSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """For weights as they are stored, `int8` and `int4`: bytes_share of the layers; for each number
    of rows the ratio of the processor's time; error, the norm of the difference of logits over
    their norm; exact_match and f1 of the reader's answers."""
    setting = setting or WeightsSetting()
    with tempfile.TemporaryDirectory() as folder:
        progress("making a model")
        _save_model(Path(folder), setting)
        timed = _timed(folder, setting, progress)
    for kind in KINDS:
        progress(f"answering with weights in {kind or 'their own dtype'}")
        timed[str(kind)] |= _marks(kind, setting.questions)
    return {"setting": asdict(setting), "weights": timed}


def _save_model(folder: Path, setting: WeightsSetting) -> None:
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(READER)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=setting.hidden,
        intermediate_size=setting.intermediate, num_hidden_layers=setting.layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _logits(causal: CausalLM, tokens: Tensor) -> Tensor:
    """Logits of all tokens of a text: [T, vocabulary]."""
    return forward_text(causal, tokens, 0, *causal.new_states(len(tokens)))


@torch.inference_mode()
def _timed(folder: str, setting: WeightsSetting, progress: Progress) -> dict[str, dict[str, Any]]:
    models = {}
    for kind in KINDS:
        progress(f"loading weights in {kind or 'their own dtype'}")
        models[kind] = load_model(folder, dtype="bfloat16", quantization=kind).causal
    sizes = {
        kind: sum(each.nbytes for each in causal.model.model.layers.state_dict().values())
        for kind, causal in models.items()
    }
    tokens = torch.randint(models[None].vocabulary, (max(setting.rows),))
    logits = {kind: _logits(causal, tokens)[-1].float() for kind, causal in models.items()}
    times: dict[tuple[str | None, int], list[float]] = defaultdict(list)
    for run in range(setting.runs):
        progress(f"run {run + 1} of {setting.runs}")
        for rows in setting.rows:
            for kind, causal in models.items():
                began = time.process_time()
                _logits(causal, tokens[:rows])
                times[kind, rows].append(time.process_time() - began)
    exact = logits[None]
    return {
        str(kind): {
            "bytes_share": sizes[kind] / sizes[None],
            "error": float((logits[kind] - exact).norm() / exact.norm()),
            "time_ratio": {
                rows: median(times[kind, rows]) / median(times[None, rows]) for rows in setting.rows
            },
        }
        for kind in KINDS
    }


def _marks(kind: Any, questions: int) -> dict[str, float]:
    handbook = example_handbook()
    asked = load_dataset(handbook.parent / "questions.jsonl").questions[:questions]
    with tempfile.TemporaryDirectory() as state:
        opened = RagCache.open(state, embedding="none", dtype="bfloat16", quantization=kind)
        with opened as rag:
            rag.ingest("handbook", sorted({handbook / each.document for each in asked}))
            [report] = evaluate_modes(rag, "handbook", asked, ["rooted"]).reports
    return {"exact_match": report.exact_match, "f1": report.f1}


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each pass.")] = 5,
    questions: Annotated[int, typer.Option(min=1, help="Of the handbook.")] = 48,
    json_file: JsonFile = None,
) -> None:
    """Measures weights in 8 and 4 bits beside those in bfloat16."""
    setting = WeightsSetting(runs=runs, questions=questions)
    result = run_benchmark(partial(bench_weights, setting)) | {"machine": describe_machine()}
    table = plain_table("weights", "bytes", "error", *(f"{rows} rows" for rows in setting.rows),
                        "exact match", "F1", left=1)  # fmt: skip
    for kind, row in result["weights"].items():
        ratios = (f"{ratio:.2f}x" for ratio in row["time_ratio"].values())
        marks = (f"{100 * row[name]:.1f}%" for name in ("exact_match", "f1"))
        shares = f"{100 * row['bytes_share']:.0f}%", f"{100 * row['error']:.1f}%"
        table.add_row("bfloat16" if kind == "None" else kind, *shares, *ratios, *marks)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
