"""`ragcache bench conversations` on a shape with random weights, and its agents on vLLM.

    python benchmarks/conversations.py shape --shape tiny --parts chats --json FILE --plot FILE
    python benchmarks/conversations.py shape --shape 8b --device cuda --parts resume,decode
    python benchmarks/conversations.py vllm --model MODEL --offload 80 --json FILE

`vllm` needs vLLM, which is no dependency of the project. It answers the turns of the same sessions
in waves of the same size, with a prefix cache of the same size alone and with vLLM's native
offloading to host memory.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from harness import (
    ALL_SHAPES,
    DeviceOption,
    JsonFile,
    PlotFile,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
    shaped_model,
)
from plots import draw_conversations

from ragcache.bench.conversation_turns import AGENTS, SessionKind, Trace
from ragcache.bench.conversations import ConversationsSetting, bench_conversations, words_of
from ragcache.models import load_model

app = typer.Typer(add_completion=False, help=__doc__)

Sessions = Annotated[int | None, typer.Option(min=1, help="sessions of agents.")]
Turns = Annotated[int | None, typer.Option(min=2, help="turns of an agent's session.")]
Concurrent = Annotated[int, typer.Option(min=1, help="sessions that are answered at once.")]


def _agents(kind: SessionKind, sessions: int | None, turns: int | None) -> SessionKind:
    return replace(kind, sessions=sessions or kind.sessions, turns=turns or kind.turns)


@app.command()
def shape(
    shape: Annotated[str, typer.Option(help="tiny, 0.5b, 1.5b, 7b or 8b.")] = "tiny",
    device: DeviceOption = "cpu",
    reduced: Annotated[bool, typer.Option(help="Few sessions, for a CPU.")] = False,
    parts: Annotated[
        str, typer.Option(help="Parts with commas between.")
    ] = "chats,agents,resume,restart,decode",
    sessions: Sessions = None,
    turns: Turns = None,
    concurrent: Concurrent = 8,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a long conversation.")] = 8192,
    runs: Annotated[int, typer.Option(min=1, help="runs of each timing.")] = 5,
    host_bytes: Annotated[str, typer.Option(help="Budget of the host tier.")] = "4GiB",
    device_bytes: Annotated[str | None, typer.Option(help="Budget of the device tier.")] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Chats and agents that outlive the engine's pool, with and without kept states."""
    sizes = ALL_SHAPES[shape]
    words = words_of(load_model().decode, sizes.vocabulary)
    model = shaped_model(sizes, None if device == "cpu" else device, answers=words)
    make = ConversationsSetting.reduced if reduced else ConversationsSetting
    setting = make(
        long_tokens=tokens, runs=runs, concurrent=concurrent, parts=tuple(parts.split(",")),
        host_bytes=host_bytes, device_bytes=device_bytes,
    )  # fmt: skip
    setting = replace(setting, agents=_agents(setting.agents, sessions, turns))
    result = run_benchmark(lambda progress: bench_conversations(setting, model, progress))
    result |= {"shape": shape, "device": device}
    figures = ((k, v) for k, v in result.items() if isinstance(v, float))
    rows = [(name, f"{value:.3f}") for name, value in figures]
    print_figures([plain_table(f"conversations, {shape}", "", rows=rows)], result, json_file)
    if plot is not None:
        draw_conversations(result).savefig(plot)


@app.command()
def vllm(
    model: Annotated[str, typer.Option(help="Folder or name of a model.")],
    offload: Annotated[float, typer.Option(help="GiB of host memory for offloaded blocks.")],
    pool: Annotated[int, typer.Option(help="Tokens of the prefix cache, in both runs.")],
    sessions: Sessions = None,
    turns: Turns = None,
    concurrent: Concurrent = 8,
    json_file: JsonFile = None,
) -> None:
    """Agents on vLLM: its prefix cache alone, and with its native offloading to host memory."""
    kind = _agents(AGENTS, sessions, turns)
    words = words_of(load_model().decode, 2**31)
    native = {"kv_offloading_backend": "native", "kv_offloading_size": offload}
    lost = _play(model, Trace(kind, words), pool, concurrent, {})
    kept = _play(model, Trace(kind, words), pool, concurrent, native)
    result = {
        "peer": "vllm",
        "agents_rate_ratio": lost["seconds"] / kept["seconds"],
        "recomputed_share_agents": kept["computed"] / kept["history"],
        "pool_share_agents": lost["computed"] / lost["history"],
        "seconds": {"none": lost["seconds"], "native": kept["seconds"]},
        "model": model,
        "setting": asdict(kind) | {"pool": pool, "offload": offload, "concurrent": concurrent},
        "machine": describe_machine(),
    }
    names = ("agents_rate_ratio", "recomputed_share_agents", "pool_share_agents")
    rows = [(name, f"{result[name]:.3f}") for name in names]
    print_figures([plain_table("agents on vLLM", "", rows=rows)], result, json_file)


def _play(
    model: str, trace: Trace, pool: int, concurrent: int, options: dict[str, Any]
) -> dict[str, float]:
    """Answer all turns of a trace.

    Returns the seconds of all turns, the tokens of earlier turns, and how many of them vLLM
    computed again.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model,
        enable_prefix_caching=True,
        max_num_seqs=concurrent,
        num_gpu_blocks_override=pool // 16,
        block_size=16,
        **options,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=trace.kind.answer_tokens, ignore_eos=True, detokenize=False
    )
    sums = {"seconds": 0.0, "history": 0.0, "computed": 0.0}
    for wave in trace.waves(concurrent):
        prompts = [TokensPrompt(prompt_token_ids=[*session.tokens]) for session in wave]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        sums["seconds"] += time.perf_counter() - begun
        for session, output in zip(wave, outputs, strict=True):
            sums["history"] += session.history
            sums["computed"] += max(0, session.history - (output.num_cached_tokens or 0))
            session.tokens += output.outputs[0].token_ids
            session.history = len(session.tokens)
            session.turns += 1
    del engine
    return sums


if __name__ == "__main__":
    app()
