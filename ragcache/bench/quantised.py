"""What eight bits cost: bytes saved, states that change, answers that begin otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragcache.engine import EncodeJob, Request, Segment, assemble, complete, encode
from ragcache.errors import NoDocuments
from ragcache.models import LoadedModel, prompt_frame
from ragcache.states import KVStates
from ragcache.states.quantization import KVDtype, quantize, restored

_MODULE_TOKENS = 384


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A question in tokens, over the states of the preamble and of its document."""

    states: tuple[KVStates, KVStates]
    own: list[int]


def bench_quantised(
    model: LoadedModel, handbook: Path, questions: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """For `int8` and `fp8`: bytes_share of the model's dtype; keys_error and values_error, the
    Euclidean norm of the difference over that of the states; first_token_agreement, the share of
    questions whose answer begins with the same token.

    handbook: a folder of documents with `questions.jsonl`. Raises `NoDocuments`.
    """
    progress("encoding documents of the handbook")
    asked = _ask(model, handbook, questions)
    expected = _first_tokens(model, asked, "model")
    kinds: dict[str, Any] = {}
    for kind in ("int8", "fp8"):
        progress(f"answering from {kind} states")
        begun = _first_tokens(model, asked, kind)
        kinds[kind] = _errors(asked, kind) | {
            "first_token_agreement": sum(map(int.__eq__, begun, expected)) / len(asked)
        }
    return {"questions": len(asked), **kinds}


def _ask(model: LoadedModel, handbook: Path, questions: int) -> list[_Asked]:
    """Questions spread evenly over the file, each over its own document."""
    file = handbook / "questions.jsonl"
    if not file.is_file():
        raise NoDocuments(f"there is no {file}; give a folder of documents with its questions")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = rows[:: max(1, len(rows) // questions)][:questions]
    frame = prompt_frame(model.tokenizer)
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
        _Asked(
            (root, states[row["document"]]),
            [*before, *model.encode_untrusted(row["question"]), *after],
        )
        for row in rows
    ]


def _first_tokens(model: LoadedModel, asked: Sequence[_Asked], kind: KVDtype) -> list[int]:
    requests = []
    for each in asked:
        kept = [restored(quantize(states, kind)) for states in each.states]
        context = assemble(kept, each.own, window=model.causal.window, max_new_tokens=1)
        requests.append(Request(context, 1))
    return [done.token_ids[0] for done in complete(model.causal, requests)]


def _errors(asked: Sequence[_Asked], kind: KVDtype) -> dict[str, float]:
    exact = list({id(states): states for each in asked for states in each.states}.values())
    kept = [quantize(states, kind) for states in exact]
    found = [restored(states) for states in kept]
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
