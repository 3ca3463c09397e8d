"""Extractive answers: what making documents quotable costs, and the mask of each token.

python benchmarks/quotations.py --json FILE
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark

from ragcache.answers.quotation_index import (
    QuotableText,
    Quotation,
    QuotationIndex,
    TokenSpellings,
)
from ragcache.documents import load_sources
from ragcache.models import LoadedModel, load_model
from ragcache_api.cli.ask import example_handbook


@dataclass(frozen=True, slots=True)
class QuotationsSetting:
    """modules: how many a request reads, in turn; tokens: of each, about. vocabulary: of the masks,
    those of large models."""

    modules: tuple[int, ...] = (4, 32, 256)
    tokens: int = 384
    answers: int = 100
    answer_tokens: int = 16
    vocabulary: int = 152_000


def bench_quotations(
    setting: QuotationsSetting | None = None, progress: Progress = lambda _: None,
    model: LoadedModel | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times, of processor, in milliseconds. spellings_ms: of a model's tokens, once; module_ms: of
    a module, once, the median; for each number of modules `join_ms`, once a request, and of a token
    (mask and acceptance) the mean, `token_ms`, and the 99th percentile, `token_p99_ms`."""
    setting, model = setting or QuotationsSetting(), model or load_model()
    progress("reading the handbook")
    texts = [each.text for each in load_sources([example_handbook()]).documents]
    model.encode_untrusted("")  # finds the control tokens
    begin = time.thread_time()
    spellings = TokenSpellings(model)
    spellings_ms = 1e3 * (time.thread_time() - begin)
    spellings.width = max(spellings.width, setting.vocabulary)
    rng = random.Random(1)
    graphs, times = [], []
    for number in range(max(setting.modules)):
        progress(f"module {number + 1} of {max(setting.modules)}")
        text = _shuffled(texts, setting.tokens, rng)
        begin = time.thread_time()
        graphs.append(QuotableText.of(text, spellings))
        times.append(1e3 * (time.thread_time() - begin))
    rows = []
    for count in setting.modules:
        progress(f"answers from {count} modules")
        begin = time.thread_time()
        index = QuotationIndex(graphs[:count], spellings)
        join = 1e3 * (time.thread_time() - begin)
        each = [ms for _ in range(setting.answers) for ms in _answer(index, setting, rng)]
        rows.append({
            "modules": count, "join_ms": join, "token_ms": statistics.mean(each),
            "token_p99_ms": float(np.percentile(each, 99)),
        })  # fmt: skip
    return {
        "setting": asdict(setting), "machine": describe_machine(), "spellings_ms": spellings_ms,
        "module_ms": statistics.median(times), "by_modules": rows,
    }  # fmt: skip


def _shuffled(texts: list[str], tokens: int, rng: random.Random) -> str:
    """A text of sentences of all documents, of about four characters a token."""
    sentences = [each for text in texts for each in text.split(". ")]
    return ". ".join(rng.sample(sentences, len(sentences)))[: 4 * tokens]


def _answer(index: QuotationIndex, setting: QuotationsSetting, rng: random.Random) -> list[float]:
    """The milliseconds of each token of an answer, whose tokens are drawn."""
    quotation, times = Quotation(index), list[float]()
    stops = set(index.spellings.stop_ids.tolist())
    while len(times) < setting.answer_tokens and not quotation.finished:
        begin = time.thread_time()
        mask = quotation.mask()
        asked = time.thread_time()
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        token = rng.choice([each for each in np.flatnonzero(bits).tolist() if each not in stops])
        drawn = time.thread_time()
        quotation.accept(token)
        times.append(1e3 * (time.thread_time() - drawn + asked - begin))
    return times


def main(json_file: JsonFile = None, model: Path | None = None) -> None:
    """Prints the table."""
    loaded = None if model is None else load_model(model)
    result = run_benchmark(lambda progress: bench_quotations(None, progress, loaded))
    table = plain_table("modules", "join", "a token", "99th percentile")
    for row in result["by_modules"]:
        cells = (f"{row[name]:.3f} ms" for name in ("join_ms", "token_ms", "token_p99_ms"))
        table.add_row(str(row["modules"]), *cells)
    said = (
        f"once: {result['spellings_ms']:.0f} ms a model, {result['module_ms']:.1f} ms a module of "
        f"{result['setting']['tokens']} tokens"
    )
    print_figures([table, said], result, json_file)


if __name__ == "__main__":
    typer.run(main)
