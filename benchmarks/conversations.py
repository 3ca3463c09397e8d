"""`ragcache bench conversations` on a shape with random weights, on a CPU or a GPU.

python benchmarks/conversations.py --shape 1.5b --tokens 8192 --runs 1 --json FILE
python benchmarks/conversations.py --shape 8b --device cuda --tokens 8192 --json FILE
"""

from __future__ import annotations

from typing import Annotated

import typer
from harness import (
    SHAPES,
    JsonFile,
    plain_table,
    print_figures,
    run_benchmark,
    shaped_model,
)

from ragcache.bench.conversations import ConversationsSetting, bench_conversations
from ragcache.bench.harness import LlamaShape

SMALL = {
    "0.5b": LlamaShape(24, 896, 14, 2, 4864, 151_936, 32_768, 1e6, tied=True),
    "1.5b": LlamaShape(28, 1536, 12, 2, 8960, 151_936, 32_768, 1e6, tied=True),
}
"""Shapes of small instruct models, for a CPU."""


def main(
    shape: Annotated[str, typer.Option(help="0.5b, 1.5b, 7b or 8b.")] = "0.5b",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a long conversation.")] = 8192,
    runs: Annotated[int, typer.Option(min=1, help="runs of each timing.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Chats and agents that outlive the engine's pool, with and without kept states."""
    model = shaped_model({**SMALL, **SHAPES}[shape], None if device == "cpu" else device)
    setting = ConversationsSetting(long_tokens=tokens, runs=runs)
    result = run_benchmark(lambda progress: bench_conversations(setting, model, progress))
    figures = ((k, v) for k, v in result.items() if isinstance(v, float))
    rows = [(name, f"{value:.3f}") for name, value in figures]
    print_figures([plain_table(f"conversations, {shape}", "", rows=rows)], result, json_file)


if __name__ == "__main__":
    typer.run(main)
