"""An ordinary LCEL chain, with recognition and without; recognition alone; batches."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from harness import (
    BenchDTypeOption,
    JsonFile,
    LlamaShape,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
    shaped_model,
)
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from rich.table import Table

from ragcache_connectors.langchain.chat_models import ChatRagCache
from ragcache_connectors.langchain.retrievers import RagCacheRetriever

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.db import ModuleRow

HEADER = "Handbook of the harbour, third edition > Rules\nNot to be copied without leave.\n\n"
_SYLLABLES = "ba be bo da de do fa fi fo ga ge go ka ki ko la le lo ma mi mo na ne no pa".split()
_COMMON = (
    "the of and to in is was for on with at by from that which are were be has had its every "
    "water harbour engine report winter office boat paper window quiet number answer market"
).split()
QUESTIONS = (
    "Who do I ring first if the cold store alarm goes off?",
    "How long may I stay inside the freezer at most?",
    "Where does the key of the pool car hang?",
    "By what time on the day before do I have to order a packed lunch?",
    "What are fires in the boat hall fought with?",
)
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question from the context, in a few words."),
        ("human", "Context:\n\n{context}\n\nQuestion: {question}"),
    ]
)


@dataclass(frozen=True, slots=True)
class LangChainSetting:
    """shape: of the model over the synthetic modules. modules: how many there are; module_words:
    the words of each. questions, runs: how many questions, and how often each is asked each way.
    batch: conversations over `shared` documents in different orders; new_tokens: of each answer.
    lengths, sizes: of prompts in characters and of indexes in modules, for recognition alone.
    headed_words: words of the modules that begin alike, of recognition alone."""

    handbook: Path = Path("examples/handbook")
    shape: LlamaShape = LlamaShape(num_layers=6)
    modules: int = 10_000
    module_words: int = 300
    questions: int = 4
    runs: int = 3
    k: int = 4
    batch: int = 16
    dtype: Any = "auto"
    shared: int = 4
    new_tokens: int = 32
    lengths: tuple[int, ...] = (8_192, 32_768, 131_072)
    sizes: tuple[int, ...] = (100, 1_000, 10_000)
    headed_words: int = 35
    finds: int = 20


def bench_langchain(
    setting: LangChainSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Medians, and ratios of ways that ran in turn.

    ratio_recognized_to_plain: how many times sooner the first token of `retriever | prompt | model`
    is known where the retrieved modules are recognized, over the synthetic modules;
    `handbook.ratio` is the same for the embedded reader. Both take everything from the question's
    text on; neither side shares states between its runs. recognize_ms_32k_10000: milliseconds to
    find the modules in a prompt of 32,768 characters among 10,000; with `_common_header`, among
    10,000 that begin alike. batch_ratio: tokens a second of one `batch` over those of single calls.
    """
    setting = setting or LangChainSetting()
    with tempfile.TemporaryDirectory() as folder:
        handbook = _handbook(setting, Path(folder) / "handbook", progress)
        synthetic, found, batch = _synthetic(setting, Path(folder) / "synthetic", progress)
    return {
        "ratio_recognized_to_plain": synthetic["ratio"],
        "recognize_ms_32k_10000": _typical(found["plain"]),
        "recognize_ms_32k_10000_common_header": _typical(found["headed"]),
        "batch_ratio": batch["ratio"],
        "handbook": handbook,
        "synthetic": synthetic,
        "recognition": found["plain"],
        "recognition_common_header": found["headed"],
        "batch": batch,
        "setting": asdict(setting) | {"handbook": str(setting.handbook)},
        "machine": describe_machine(),
    }


def _typical(rows: Sequence[dict[str, Any]]) -> float | None:
    return next(
        (row["ms"] for row in rows if (row["characters"], row["modules"]) == (32_768, 10_000)), None
    )


def _handbook(setting: LangChainSetting, folder: Path, progress: Progress) -> dict[str, Any]:
    from ragcache import RagCache

    with RagCache.open(folder, dtype=setting.dtype, embedding="none", force_modes=True) as rag:
        progress("ingesting the handbook")
        rag.ingest("handbook", [setting.handbook])
        return _chains(rag, "handbook", QUESTIONS, setting, progress)


def _synthetic(
    setting: LangChainSetting, folder: Path, progress: Progress
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, Any]]:
    from ragcache import RagCache

    progress("building the model")
    model = shaped_model(setting.shape, dtype=setting.dtype)
    with RagCache.open(
        folder, model, module_tokens=setting.module_words * 8, embedding="none", force_modes=True
    ) as rag:
        progress(f"storing {setting.modules:,} modules")
        fill(rag, "synthetic", setting.modules, setting.module_words)
        asked = subjects(setting.modules)[: setting.questions]
        questions = [f"What is said of the {subject}?" for subject in asked]
        chains = _chains(rag, "synthetic", questions, setting, progress)
        batch = _batch(rag, setting, progress)
        rows = rag.internals.catalog.modules("synthetic")
        found = {
            "plain": _recognition(rows, setting, progress),
            "headed": _recognition(headed(rows, setting.headed_words), setting, progress),
        }
        return chains, found, batch


def chain(rag: RagCache, collection: str, k: int, **options: Any) -> Runnable[str, Any]:
    """The chain that any program has: documents are pasted into the prompt as they come."""
    retriever = RagCacheRetriever(rag=rag, collection=collection, k=k, relative_threshold=0.0)
    model = ChatRagCache(rag=rag, **options).bind(share=False)
    told: Any = {"context": retriever | _joined, "question": RunnablePassthrough()}
    whole: Runnable[str, Any] = told | PROMPT | model
    return whole


def _joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def _chains(
    rag: RagCache, collection: str, questions: Sequence[str], setting: LangChainSetting,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Seconds from the question's text to the first token, of both chains in turn."""
    ways = {
        "recognized": chain(rag, collection, setting.k, max_tokens=1),
        "plain": chain(rag, collection, setting.k, max_tokens=1, recognize=False),
    }
    progress(f"the chain over {collection}: encoding what it reads")
    tokens = [ways["recognized"].invoke(q).usage_metadata["input_tokens"] for q in questions]
    times: dict[str, list[float]] = {way: [] for way in ways}
    cached = []
    for question in islice(cycle(questions), len(questions) * setting.runs):
        for way, runnable in ways.items():
            progress(f"the chain over {collection}: {way}")
            begin = time.perf_counter()
            answer = runnable.invoke(question)
            times[way].append(time.perf_counter() - begin)
            if way == "recognized":
                cached.append(answer.usage_metadata["input_token_details"]["cache_read"])
    medians = {way: statistics.median(runs) for way, runs in times.items()}
    return {
        "ratio": medians["plain"] / medians["recognized"],
        "seconds": medians,
        "prompt_tokens": statistics.median(tokens),
        "cached_tokens": statistics.median(cached),
        "runs": times,
    }


def _recognition(
    rows: Sequence[ModuleRow], setting: LangChainSetting, progress: Progress
) -> list[dict[str, Any]]:
    """Milliseconds to find modules, by the prompt's length and the number of modules; how many
    stand in the prompt, and how many were found."""
    from ragcache.recognition import Fingerprints, FingerprintTable, find

    result = []
    for size in setting.sizes:
        if size > len(rows):
            continue
        progress(f"recognition among {size:,} modules")
        table = FingerprintTable(Fingerprints.of(rows[:size]))
        for length in setting.lengths:
            pasted = [row.text for row in rows[: min(size, 500)]]
            text = prompt_of(pasted, length)
            times = [seconds(partial(find, text, table)) for _ in range(setting.finds)]
            result.append(
                {
                    "characters": length,
                    "modules": size,
                    "ms": 1000 * statistics.median(times),
                    "found": len(find(text, table)),
                    "standing": sum(map(text.count, pasted)),
                }
            )
    return result


def _batch(rag: RagCache, setting: LangChainSetting, progress: Progress) -> dict[str, Any]:
    """Tokens a second of conversations over the same documents: together, and one by one."""
    new = setting.new_tokens
    model = ChatRagCache(rag=rag, max_tokens=new, min_tokens=new)
    texts = [row.text for row in rag.internals.catalog.modules("synthetic")[: setting.shared]]

    def asked(run: str) -> list[Any]:
        orders = [texts[i % len(texts) :] + texts[: i % len(texts)] for i in range(setting.batch)]
        return [
            PROMPT.invoke({"context": "\n\n".join(order), "question": f"{run}, part {i}?"})
            for i, order in enumerate(orders)
        ]

    progress("a batch: encoding what it reads")
    model.invoke(asked("warm")[0])
    times: dict[str, list[float]] = {"batch": [], "single": []}
    for number in range(2):
        progress(f"a batch of {setting.batch}")
        some = asked(f"together {number}")
        times["batch"].append(seconds(partial(model.batch, some)))
        progress(f"{setting.batch} single calls")
        some = asked(f"singly {number}")
        times["single"].append(sum(seconds(partial(model.invoke, each)) for each in some))
    together, single = (statistics.mean(times[way]) for way in ("batch", "single"))
    tokens = setting.batch * new
    return {
        "ratio": single / together,
        "tokens_per_second": {"batch": tokens / together, "single": tokens / single},
        "seconds": {"batch": together, "single": single},
        "runs": times,
    }


def subjects(count: int) -> list[str]:
    """Names that stand in one module each: "bakido", ... in an order of their own."""
    names = (a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES)
    chosen = [name for name, _ in zip(names, range(count), strict=False)]
    random.Random(5).shuffle(chosen)
    return chosen


def text_of(subject: str, others: Sequence[str], words: int) -> str:
    """A module's text: its subject twice, three others once, common words between."""
    rng = random.Random(subject)
    said = rng.choices(_COMMON, k=words)
    for place, name in zip((3, words // 2, words // 3, words // 4, words - 2),
                           (subject, subject, *others), strict=False):  # fmt: skip
        said[place] = name
    return " ".join(said).capitalize() + "."


def fill(rag: RagCache, collection: str, count: int, words: int) -> None:
    """Stores modules without encoding them: those that are read are encoded at the first use."""
    from ragcache.db import NewDocument, NewModule

    names = subjects(count)
    rng = random.Random(6)
    encoder = rag.internals.ingestor.encoder
    rows = []
    for name in names:
        text = text_of(name, rng.choices(names, k=3), words)
        ids = encoder.model.encode_untrusted(text)
        module = NewModule(f"{name}#1", text, ids, encoder.key(ids))
        rows.append(NewDocument(name, name, name, [module], {}, text))
    rag.internals.catalog.replace_documents(collection, rows)


def headed(rows: Sequence[ModuleRow], words: int) -> list[ModuleRow]:
    """Modules of so many words, with the subjects of these, all under one header."""
    return [replace(row, text=HEADER + text_of(row.document, (), words)) for row in rows]


def prompt_of(texts: Sequence[str], length: int) -> str:
    """A prompt of so many characters: texts with words of its own between them."""
    parts, size = [], 0
    for number, text in enumerate(cycle(texts)):
        parts.append(f"Part {number}, which nobody ingested, says what follows:\n\n{text}\n\n")
        size += len(parts[-1])
        if size >= length:
            return "".join(parts)[:length]
    return ""


def main(
    handbook: Annotated[
        Path, typer.Option(help="The folder of documents.", show_default=True)
    ] = Path("examples/handbook"),
    modules: Annotated[int, typer.Option(min=16, max=17_000, help="Synthetic modules.")] = 10_000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model that reads them.")] = 6,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each question, each way.")] = 3,
    batch: Annotated[int, typer.Option(min=2, help="Conversations of the batch.")] = 16,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """An LCEL chain with recognition and without; recognition alone; a batch and single calls."""
    shape = LlamaShape(num_layers=layers)
    setting = LangChainSetting(
        handbook=handbook, shape=shape, modules=modules, runs=runs, batch=batch, dtype=dtype
    )
    result = run_benchmark(lambda progress: bench_langchain(setting, progress))
    shown = [_chain_table(result, modules, layers), _recognition_table(result)]
    print_figures([*shown, _batch_sentence(result)], result, json_file)


def _chain_table(result: dict[str, Any], modules: int, layers: int) -> Table:
    table = plain_table(
        "retriever | prompt | model", "prompt", "from the cache", "plain", "recognized", "sooner"
    )
    for name, key in (
        ("handbook, embedded reader", "handbook"),
        (f"{modules:,} modules, {layers} layers of the shape", "synthetic"),
    ):
        row = result[key]
        seconds = row["seconds"]
        table.add_row(
            name, f"{row['prompt_tokens']:.0f}", f"{row['cached_tokens']:.0f}",
            f"{seconds['plain']:.3f} s", f"{seconds['recognized']:.3f} s", f"{row['ratio']:.1f}x",
        )  # fmt: skip
    return table


def _recognition_table(result: dict[str, Any]) -> Table:
    lengths = sorted({row["characters"] for row in result["recognition"]})
    table = plain_table("recognition among", *(f"{length:,} characters" for length in lengths))
    for key, name in (
        ("recognition", "modules"),
        ("recognition_common_header", "modules under one header"),
    ):
        for modules in sorted({row["modules"] for row in result[key]}):
            cells = [f"{row['ms']:.2f} ms" for row in result[key] if row["modules"] == modules]
            table.add_row(f"{modules:,} {name}", *cells)
    return table


def _batch_sentence(result: dict[str, Any]) -> str:
    batch = result["batch"]
    rates = batch["tokens_per_second"]
    return (
        f"a batch: {rates['batch']:.0f} tokens a second, {batch['ratio']:.1f}x of "
        f"{rates['single']:.0f} by single calls"
    )


if __name__ == "__main__":
    typer.run(main)
