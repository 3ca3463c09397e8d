"""RelayAttention's interactive serving: a long system prompt under Poisson arrivals.

python benchmarks/papers/relay_attention.py --json FILE [--shape 7b --device cuda]
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from comparison import (
    SHAPES,
    Comparison,
    ModelSetting,
    ShapeOption,
    print_comparisons,
    result_of,
)

from ragcache.bench.harness import Progress
from ragcache.bench.serve import ServeSetting, bench_serve
from ragcache_api.cli.measure import (
    BenchDTypeOption,
    DeviceOption,
    JsonFile,
    run_benchmark,
)


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """system: lengths of the system prompt. user, new_tokens: of each request (the paper draws them
    from ShareGPT). requests, seconds, most_rates, growth: as in
    `ServeSetting`."""

    system: tuple[int, ...] = (512, 2048)
    user: int = 64
    new_tokens: int = 16
    requests: int = 8
    seconds: float = 2.0
    most_rates: int = 4
    growth: float = 2.0


def bench_relay_attention(
    model: ModelSetting | None = None, setting: ChatSetting | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """The rate up to which the latency of a token stays below twice that of a lone request: where
    the system prompt's states are read once for all, over where every request computes it."""
    model, setting = model or ModelSetting(), setting or ChatSetting()
    comparisons, loads = [], {}
    for length in setting.system:
        progress(f"a system prompt of {length} tokens")
        served = bench_serve(
            ServeSetting(
                shape=SHAPES[model.shape], documents=1, document_tokens=length, each=1,
                preamble_tokens=1, question_tokens=setting.user, new_tokens=setting.new_tokens,
                requests=setting.requests, seconds=setting.seconds, most_rates=setting.most_rates,
                growth=setting.growth, device=model.device, dtype=model.dtype,
            ),
            progress,
        )  # fmt: skip
        loads[str(length)] = served
        ratio, knee = served["knee_ratio_to_exact"], served["knee"]
        comparisons.append(
            Comparison(
                f"system prompt of {length}",
                "up to 2.2x the rate of vLLM at 0.5 s a token, with 2,048 tokens",
                "Llama2-7B, 1,000 requests of ShareGPTv3, A40 and A100 (§4.3, figure 8)",
                ratio,
                f"{ratio:.1f}x the rate ({knee['cached']:.2f} against {knee['exact']:.2f} a "
                "second)",
                f"{setting.user} tokens of a user, {setting.new_tokens} of an answer, at "
                f"{1000 * served['limit_s_a_token']:.0f} ms a token",
            )
        )
    return result_of(comparisons, None, model=asdict(model), chats=asdict(setting), loads=loads)


def main(
    shape: ShapeOption = "small", device: DeviceOption = "cpu", dtype: BenchDTypeOption = "auto",
    system: Annotated[str, typer.Option(help="Lengths of the system prompt.")] = "512,2048",
    seconds: Annotated[float, typer.Option(help="Of each rate.")] = 2.0,
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """A long system prompt under Poisson arrivals, beside RelayAttention's figure."""
    lengths = tuple(int(each) for each in system.split(","))
    setting = ChatSetting(system=lengths, seconds=seconds)
    model = ModelSetting(shape, device, dtype)
    result = run_benchmark(lambda progress: bench_relay_attention(model, setting, progress))
    print_comparisons(result, json_file)


if __name__ == "__main__":
    typer.run(main)
