"""First tokens, decode rates and memory of models by their size, on a few cores.

    python benchmarks/laptop.py --shapes 0.5b,1.5b,3b,7b --quantization int4 --json FILE

The models have the shapes of Qwen2.5 and random weights, packed as `quantization` says: times and
bytes do not depend on what weights say. The states of documents are in memory. One layer is packed,
and the others are copies of it, so that no model takes more memory than its packed weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
import typer
from harness import (
    JsonFile,
    LlamaShape,
    Progress,
    describe_machine,
    dtypes_of,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
)
from llamacpp import DrawnTokens, Ours
from papers import encode_one
from torch import Tensor

from ragcache.machine import keep_freed_memory, process_memory
from ragcache.models import CausalLM
from ragcache.models.dtype import AUTO, choose_dtypes, convert, measure_anew
from ragcache.models.plain import HEAD, PlainConfig, PlainForCausalLM, PlainLM
from ragcache.models.quantized import (
    auto_quantization,
    check_gain,
    quantize_model,
    use_packed_products,
)

SHAPES: Mapping[str, LlamaShape] = {
    "0.5b": LlamaShape(24, 896, 14, 2, 4864, 151_936, 32_768, 1e6),
    "1.5b": LlamaShape(28, 1536, 12, 2, 8960, 151_936, 32_768, 1e6),
    "3b": LlamaShape(36, 2048, 16, 2, 11_008, 151_936, 32_768, 1e6),
    "7b": LlamaShape(28, 3584, 28, 4, 18_944, 152_064, 32_768, 1e6, tied=False),
    "14b": LlamaShape(48, 5120, 40, 8, 13_824, 152_064, 32_768, 1e6, tied=False),
}
"""The shapes of Qwen2.5, without the biases of queries, keys and values."""

DRAWN = 2**22  # random numbers that weights are pieces of


@dataclass(frozen=True, slots=True)
class LaptopSetting:
    """documents: of a prompt; tokens: of each; question: tokens of it; answer: tokens that are
    decoded; answers: how many at once; runs: of each time."""

    documents: int = 4
    tokens: int = 512
    question: int = 16
    answer: int = 32
    answers: tuple[int, ...] = (1, 8)
    runs: int = 3
    threads: int = 2


@torch.no_grad()
def build_shape(shape: LlamaShape, quantization: str | None) -> CausalLM:
    """A model of the shape with random packed weights, as `load_model` opens one."""
    keep_freed_memory()
    entries = shape.config(torch.bfloat16).to_dict()
    whole = PlainForCausalLM(PlainConfig(**entries)).to(torch.bfloat16)  # without weights
    model = PlainForCausalLM(PlainConfig(**{**entries, "num_hidden_layers": 1}))
    choice = choose_dtypes(whole, torch.device("cpu"), "auto", quantized=quantization is not None)
    if quantization == AUTO:
        check = partial(check_gain, whole)
        quantization = auto_quantization(whole, choice.compute, measure_anew, check)
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weights = {name: _drawn(each.shape, drawn) for name, each in model.state_dict().items()}
    if shape.tied:
        del weights[HEAD]
    model.load_weights(weights)
    if quantization is not None:
        quantize_model(model, quantization)
        use_packed_products(model, choice.compute)
    model = convert(model, choice.compute)
    _repeat_layer(model, shape.num_layers)
    causal = PlainLM(model)
    causal.states_dtype = choice.states
    return causal


def _repeat_layer(model: PlainForCausalLM, layers: int) -> None:
    """Give a model of one layer copies of it, with memory of their own."""
    for number in range(1, layers):
        layer: Any = deepcopy(model.model.layers[0])
        layer.self_attn.layer = number
        model.model.layers.append(layer)
    model.config.num_hidden_layers = layers


def _drawn(shape: Sequence[int], drawn: Tensor) -> Tensor:
    """A weight of drawn numbers, or of ones for a norm and a bias."""
    weight = torch.ones(*shape, dtype=drawn.dtype)
    if weight.dim() > 1:
        for piece in torch.split(weight.view(-1), len(drawn)):
            piece.copy_(drawn[: len(piece)])
    return weight


def bench_laptop(
    shapes: Mapping[str, LlamaShape], quantization: str | None,
    setting: LaptopSetting | None = None, progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """For each shape: first_token_seconds, exact_seconds of the same prompt when it is computed,
    tokens_per_second by number of answers, and bytes of the weights and of a token's states."""
    setting = setting or LaptopSetting()
    rows = []
    for name, shape in shapes.items():
        progress(f"making {name}")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        causal = build_shape(shape, quantization)
        torch.set_num_threads(setting.threads)
        progress(f"measuring {name}")
        rows.append({"shape": name, **_measure(causal, setting)})
        del causal
    return {
        "setting": asdict(setting), "quantization": quantization, "rows": rows,
        "machine": describe_machine(),
    }  # fmt: skip


def _measure(causal: CausalLM, setting: LaptopSetting) -> dict[str, Any]:
    model = causal.model
    held = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    cached = setting.documents * setting.tokens
    most = max(setting.answers)
    ours = Ours(causal, cached + most * (setting.question + setting.answer))
    draw = DrawnTokens(causal.vocabulary)
    documents = [draw(setting.tokens) for _ in range(setting.documents)]
    states = [encode_one(causal, each) for each in documents[:-1]]
    encoding = seconds(lambda: states.append(encode_one(causal, documents[-1])))
    first = min(ours.first_token(states, draw(setting.question)) for _ in range(setting.runs))
    exact = ours.first_token([], [*chain.from_iterable(documents), *draw(setting.question)])
    rates = {}
    for answers in setting.answers:
        questions = [draw(setting.question) for _ in range(answers)]
        rates[str(answers)] = max(
            ours.decode(states, questions, setting.answer) for _ in range(setting.runs)
        )
    ours.engine.close()
    return {
        "first_token_seconds": first, "exact_seconds": exact, "tokens_per_second": rates,
        "encoded_tokens_per_second": setting.tokens / encoding,
        "weight_bytes": sum(held.values()), "token_bytes": causal.bytes_per_token,
        "rss_bytes": process_memory()["rss_bytes"], "dtypes": dtypes_of(causal),
    }  # fmt: skip


def main(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "0.5b,1.5b",
    quantization: Annotated[str, typer.Option(help="auto, int8, int4 or none.")] = "int4",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure models by their size."""
    chosen = {name: SHAPES[name] for name in shapes.split(",")}
    setting = LaptopSetting(threads=threads, runs=runs)
    kind = None if quantization == "none" else quantization
    result = run_benchmark(lambda progress: bench_laptop(chosen, kind, setting, progress))
    print_figures([_table(result["rows"])], result, json_file)


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    table = plain_table("shape", "weights", "first token", "computed", "decode", "of eight", left=1)
    for row in rows:
        one, *_, eight = (f"{rate:.1f}/s" for rate in row["tokens_per_second"].values())
        table.add_row(
            row["shape"], f"{row['weight_bytes'] / 1e9:.1f} GB",
            f"{row['first_token_seconds']:.2f} s", f"{row['exact_seconds']:.2f} s", one, eight,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
