"""Cost of eight bits: bytes saved, states that change, answers that begin differently.

python benchmarks/quantization.py --json FILE
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import (
    BenchDTypeOption,
    JsonFile,
    Progress,
    describe_machine,
    dtypes_of,
    plain_table,
    print_figures,
    run_benchmark,
)
from torch import Tensor

from ragcache.engine import EncodeJob, Request, Segment, assemble_context, complete, encode
from ragcache.errors import NoDocuments
from ragcache.models import LoadedModel, load_model, prompt_frame
from ragcache.states import KVStates
from ragcache.states.quantization import KVDtype, quantize

_MODULE_TOKENS = 384


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question in tokens, over the states of the preamble and of its document."""

    states: tuple[KVStates, KVStates]
    own: list[int]


def bench_quantization(
    model: LoadedModel, handbook: Path, questions: int,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """For `int8`: bytes_share of the model's dtype; keys_error and values_error, the
    Euclidean norm of the difference over that of the states; first_token_agreement, the share of
    questions whose answer begins with the same token.

    handbook: a folder of documents; `questions.jsonl` is beside it. Raises `NoDocuments`.
    """
    progress("encoding documents of the handbook")
    asked = _ask(model, handbook, questions)
    expected = _first_tokens(model, asked, "model")
    progress("answering from int8 states")
    begun = _first_tokens(model, asked, "int8")
    agreement = sum(map(int.__eq__, begun, expected)) / len(asked)
    figures = _errors(asked, "int8") | {"first_token_agreement": agreement}
    return {"questions": len(asked), "int8": figures}


def _ask(model: LoadedModel, handbook: Path, questions: int) -> list[_Question]:
    """Questions spread evenly over the file, each over its own document."""
    file = handbook.parent / "questions.jsonl"
    if not file.is_file():
        raise NoDocuments(f"there is no {file}; give a folder of documents with its questions")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = rows[:: max(1, len(rows) // questions)][:questions]
    frame = prompt_frame(model.tokenizer, model.instruction)
    [root] = encode(model.causal, [EncodeJob(model.encode(frame.preamble))])
    documents = sorted({row["document"] for row in rows})
    texts = [(handbook / name).read_text(encoding="utf-8") for name in documents]
    jobs = [
        EncodeJob(model.encode_untrusted(text)[:_MODULE_TOKENS], root.length, Segment(root, 0))
        for text in texts
    ]
    states = dict(zip(documents, encode(model.causal, jobs), strict=True))
    before, after = model.encode(frame.question), model.encode(frame.epilogue)
    return [
        _Question(
            (root, states[row["document"]]),
            [*before, *model.encode_untrusted(row["question"]), *after],
        )
        for row in rows
    ]


def _first_tokens(model: LoadedModel, asked: Sequence[_Question], kind: KVDtype) -> list[int]:
    requests = []
    for each in asked:
        kept = [quantize(states, kind).restore() for states in each.states]
        context = assemble_context(kept, each.own, window=model.causal.window, max_tokens=1)
        requests.append(Request(context, 1))
    return [done.token_ids[0] for done in complete(model.causal, requests)]


def _errors(asked: Sequence[_Question], kind: KVDtype) -> dict[str, float]:
    exact = list({id(states): states for each in asked for states in each.states}.values())
    kept = [quantize(states, kind) for states in exact]
    found = [states.restore() for states in kept]
    return {
        "bytes_share": sum(s.nbytes for s in kept) / sum(s.nbytes for s in exact),
        "keys_error": _distance([s.keys for s in exact], [s.keys for s in found]),
        "values_error": _distance([s.values for s in exact], [s.values for s in found]),
    }


def _distance(exact: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    pairs = list(zip(exact, found, strict=True))
    wrong = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    whole = sum(float(a.float().square().sum()) for a in exact)
    return float(torch.tensor(wrong / whole).sqrt())


def main(
    handbook: Annotated[
        Path, typer.Option(help="Documents; questions.jsonl is beside.", show_default=True)
    ] = Path("examples/handbook"),
    questions: Annotated[int, typer.Option(min=1, help="Questions to quantized states.")] = 48,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """States and answers of the embedded reader in eight bits."""
    model = load_model(dtype=dtype)
    result: dict[str, Any] = {
        "quantized": run_benchmark(
            lambda progress: bench_quantization(model, handbook, questions, progress)
        ),
        "dtypes": dtypes_of(model.causal),
        "setting": {"questions": questions, "handbook": str(handbook)},
        "machine": describe_machine(),
    }
    table = plain_table("kept as", "bytes", "error of keys", "of values", "answers begin alike")
    shares = ("bytes_share", "keys_error", "values_error", "first_token_agreement")
    row = result["quantized"]["int8"]
    table.add_row("int8", *(f"{100 * row[share]:.2f}%" for share in shares))
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
