"""First tokens of chats on a GPU, over HTTP and from the engine, with documents in the text.

    python benchmarks/service_gpu.py --shape 7b --check --json FILE

The service runs in this process, with its ledger, recognition and store, over a model of a shape
with random weights; its client in another. Each chat holds four of the ingested documents in random
order, and a question. The engine answers as many tokens over states of the same sizes, right before
or after.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer
from gpu import new_document
from gpu_table import GpuWorkload, missed, render_text, rows_of
from harness import (
    DeviceOption,
    JsonFile,
    LlamaShape,
    Progress,
    made_up_key,
    named_shapes,
    print_figures,
    run_benchmark,
    shaped_model,
)
from service import serving
from service_clients import ClientProcess, request

from ragcache import RagCache, SourceDocument
from ragcache.engine import Request, TextStream
from ragcache.models import LoadedModel
from ragcache.pipeline.chat import ChatCall
from ragcache.pipeline.chat_template import Message
from ragcache.pipeline.prompt import build_context
from ragcache.states import KVStates

_COLLECTION = "bench"
_WORDS = ("mooring", "lantern", "ledger", "harbour", "cable", "winch", "survey", "tide", "signal")


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """documents: ingested; each: in a chat; runs: chats that count, after `warm` others."""

    documents: int = 8
    document_tokens: int = 1024
    each: int = 4
    runs: int = 40
    warm: int = 8
    store_bytes: str = "8GiB"


def bench_chats(
    shapes: dict[str, LlamaShape], device: str, progress: Progress = lambda _: None,
    setting: ChatSetting | None = None, document: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Adds the part `http` to the document of a run of the table, by default to a new one."""
    document = document or new_document(shapes, [], GpuWorkload(), device)
    document["parts"] = [*(part for part in document["parts"] if part != "http"), "http"]
    for name, shape in shapes.items():
        begin = time.perf_counter()
        document["shapes"][name] = asdict(shape)
        results = document["results"].setdefault(name, {})
        results["http"] = _chats(shape, device, setting or ChatSetting(), progress)
        document["seconds"][f"{name} http"] = round(time.perf_counter() - begin, 2)
    document["rows"] = rows_of(document)
    return document


def _chats(
    shape: LlamaShape, device: str, setting: ChatSetting, progress: Progress
) -> dict[str, Any]:
    progress("building the model")
    model = shaped_model(shape, device)
    texts = [_text(model, setting.document_tokens, number) for number in range(setting.documents)]
    options: Any = {"device_bytes": setting.store_bytes} if device != "cpu" else {}
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-bench-") as place,
        RagCache.open(
            place, model, module_tokens=2 * setting.document_tokens, warm_up=True,
            host_bytes=setting.store_bytes, embedding="none", force_modes=True, **options,
        ) as rag,
    ):  # fmt: skip
        progress("ingesting documents")
        documents = [SourceDocument(str(number), text) for number, text in enumerate(texts)]
        begin = time.perf_counter()
        rag.ingest(_COLLECTION, documents)
        ingested = time.perf_counter() - begin
        progress("first tokens")
        with serving(rag) as port:
            return {"ingest_s": ingested} | _first_tokens(rag, port, texts, setting)


def _first_tokens(
    rag: RagCache, port: int, texts: Sequence[str], setting: ChatSetting
) -> dict[str, Any]:
    rng, own, cached = random.Random(1), 0, 0
    served: list[float] = []
    called: list[float] = []
    with ClientProcess(port) as client:
        for number in range(setting.warm + setting.runs):
            chosen = rng.sample(texts, setting.each)
            content = "\n\n".join([*chosen, f"Number {number}: what is kept in which berth?"])
            messages: list[Message] = [{"role": "user", "content": content}]
            body = {
                "model": rag.stats().model, "messages": messages, "max_tokens": 2, "stream": True,
                "ignore_eos": True,
            }  # fmt: skip
            engine = _engine_request(rag, messages)
            own, cached = len(engine.context.token_ids), engine.context.cached_tokens
            if cached < 0.9 * setting.each * setting.document_tokens:
                raise RuntimeError(f"only {cached} tokens of the chat were recognized")
            pair = [
                (served, lambda body=body: client.first_token(request(_PATH, body, port))),
                (called, lambda engine=engine: _answered(rag, engine)),
            ]
            for times, run in pair if number % 2 else reversed(pair):
                times.append(1e3 * run())
    del served[: setting.warm], called[: setting.warm]
    return {
        "over_engine_ms": statistics.median(s - c for s, c in zip(served, called, strict=True)),
        "served_ms": statistics.median(served),
        "engine_ms": statistics.median(called),
        "own_tokens": own,
        "cached_tokens": cached,
        "served_runs_ms": [round(each, 3) for each in served],
        "engine_runs_ms": [round(each, 3) for each in called],
    }


_PATH = "/v1/chat/completions"


def _engine_request(rag: RagCache, messages: Sequence[Message]) -> Request:
    """A request of the sizes and places of the chat's, over states that hold nothing."""
    namespace, model = rag.internals, rag.internals.shared.model
    [prompt] = namespace.chat.prepare_prompts([messages], ChatCall())
    states = []
    for group in range(1 + max(span.group for span in prompt.spans)):
        length = max((span.end for span in prompt.spans if span.group == group), default=0)
        keys, values = model.causal.new_states(length)
        states.append(KVStates(keys.zero_(), values.zero_(), 0))
    names = [made_up_key(group) for group, _ in enumerate(states)]
    context = build_context(prompt, names, states)
    return Request(context, 2, text=partial(TextStream, model.tokenizer))


def _answered(rag: RagCache, asked: Request) -> float:
    """Seconds to the first token."""
    begin = time.perf_counter()
    handle = rag.internals.shared.engine.submit_request(asked)
    for _ in handle:
        seconds = time.perf_counter() - begin
        handle.result()
        return seconds
    raise AssertionError("an answer without a token")


def _text(model: LoadedModel, tokens: int, seed: int) -> str:
    """A text of about so many tokens, whose beginning is like none of the others'."""
    draw = random.Random(seed)
    text = f"Survey {seed} of the {draw.choice(_WORDS)}."
    while len(model.encode(text)) < tokens - 16:
        text += (
            f" The {draw.choice(_WORDS)} of berth {draw.randrange(100, 999)} is by the "
            f"{draw.choice(_WORDS)} {draw.randrange(100, 999)}."
        )
    return text


def main(
    shape: Annotated[str, typer.Option(help="Shapes, with commas.")] = "7b,8b",
    device: DeviceOption = "cuda",
    check: Annotated[bool, typer.Option("--check", help="Exit 1 where a must is missed.")] = False,
    json_file: JsonFile = None,
) -> None:
    """First tokens of chats. FILE may be that of a run of the table, which then gets this row."""
    before = None
    if json_file is not None and json_file.exists():
        before = json.loads(json_file.read_text(encoding="utf-8"))
    shapes = named_shapes(shape)
    document = run_benchmark(
        lambda progress: bench_chats(shapes, device, progress, document=before)
    )
    print_figures([], document, json_file)
    typer.echo(render_text(document))
    if document["errors"] or (check and missed(document)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
