"""Asks the engine what the hybrid toy was evaluated on, and compares the answers.

    python3 training/hybrid_evaluate.py --contexts training/build/hybrid --model training/build/hybrid-exact

The trainer's forward reads a context in batches; here every question is a request to the engine, in
`exact` and over modules that compose. Prints, for each set and way, the share of answers that are
right, and the share of answers on whose being right the engine and the trainer agree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_model import Mode, forward
from hybrid_train import DEVICE, Batch, evaluation_arrays
from ragcache.engine import Context, EncodeJob, EngineConfig, LLMEngine, Request, Segment
from ragcache.models import wrap_causal
from ragcache.states import KVStates
from samples import PREAMBLE

MODES: tuple[Mode, ...] = ("exact", "order", "both")
Contexts = dict[str, np.ndarray]


@torch.no_grad()
def right_by_trainer(model: Any, contexts: Contexts, preamble: Tensor, mode: Mode) -> list[bool]:
    """Whether each question's answer is right, teacher-forced."""
    batch = Batch.of(contexts, preamble)
    hidden = forward(model, batch.tokens, mode).questions[:, :, :-1]
    answers = batch.kinds[:, :, 1:] == 3
    chosen = F.linear(hidden, model.lm_head.weight).argmax(-1)
    right = ~((chosen != batch.tokens.questions[:, :, 1:]) & answers).any(-1)
    return right[batch.asked >= 0].tolist()


def right_by_engine(
    engine: LLMEngine, root: KVStates, contexts: Contexts, mode: Mode
) -> list[bool]:
    """Whether each question's answer is right, token by token."""
    handles, wanted = [], []
    for modules, questions, kinds, asked in zip(
        *(contexts[name] for name in ("modules", "questions", "kinds", "asked")), strict=True
    ):
        segments, own, at = [Segment(root, 0, "root")], [], root.length
        if mode == "exact":
            own = modules.flatten().tolist()
        else:
            before = Segment(root, 0, "root")
            jobs = [EncodeJob(row.tolist(), root.length, before) for row in modules]
            for states in engine.encode(jobs):
                segments.append(Segment(states, at))
                at += states.length
        for row, kind in zip(questions[asked >= 0], kinds[asked >= 0], strict=True):
            answer = row[kind == 3].tolist()
            tokens = (*own, *row[kind == 2].tolist())
            end = at + len(tokens)
            compose = "both" if mode == "both" else "order"
            context = Context(tuple(segments), tokens, tuple(range(at, end)), end, compose)
            handles.append(engine.submit_request(Request(context, len(answer), frozenset())))
            wanted.append(tuple(answer))
    return [handle.result().token_ids == each for handle, each in zip(handles, wanted, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=Path, required=True, help="folder of hybrid_samples.py")
    parser.add_argument("--model", type=Path, required=True, help="folder of hybrid_train.py")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent.parent / "ragcache" / "reader")
    parser.add_argument("--count", type=int, default=8, help="contexts of each set")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(DEVICE).eval()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    tokens = tokenizer.encode(PREAMBLE).ids
    preamble = torch.tensor([tokens], device=DEVICE)
    sets = {
        name: {key: rows[: arguments.count] for key, rows in arrays.items()}
        for name, arrays in evaluation_arrays(arguments.contexts / "evaluation.npz").items()
    }
    expected = {
        (name, mode): right_by_trainer(model, each, preamble, mode)
        for name, each in sets.items()
        for mode in MODES
    }
    rows = []
    config = EngineConfig.for_device(DEVICE, pool_bytes=2**30, running=48)
    with LLMEngine(wrap_causal(model), config) as engine:
        [root] = engine.encode([EncodeJob(tokens)])
        for (name, mode), trained in expected.items():
            found = right_by_engine(engine, root, sets[name], mode)
            agree = sum(a == b for a, b in zip(found, trained, strict=True)) / len(found)
            row = {"set": name, "mode": mode, "questions": len(found),
                   "match": round(sum(found) / len(found), 4), "agree": round(agree, 4)}  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
