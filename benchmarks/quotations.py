"""Constrained answers: quotations and grammars, their compilation, and the mask of each token.

python benchmarks/quotations.py --json FILE
python benchmarks/quotations.py --grammars   # 150,000 tokens; an answer beside two compilations
python benchmarks/quotations.py --grammars --tokenizer MODEL.gguf   # the vocabulary of a real model
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragcache import GenerationParams, RagCache, SourceDocument
from ragcache.answers.quotation_index import (
    QuotableText,
    Quotation,
    QuotationIndex,
    TokenSpellings,
)
from ragcache.documents import load_sources
from ragcache.models import LoadedModel, load_model
from ragcache.structured import Grammar, compile_constraint
from ragcache_api.cli.console import example_handbook


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


@dataclass(frozen=True, slots=True)
class GrammarsSetting:
    """Sizes of the benchmark of grammars."""

    vocabulary: int = 150_000
    """Tokens of the made-up vocabulary, or rows of the logits of the tokenizer's model."""
    masks: int = 256
    """Minimum number of masks that are timed for each grammar."""
    answers: int = 5
    """Ordinary answers that are timed alone, and as many beside two compilations."""
    answer_tokens: int = 24
    """Tokens of each ordinary answer."""
    strings: int = 10_000
    """Strings of the enum that is compiled, near the largest grammar that is accepted."""


def bench_grammars(
    setting: GrammarsSetting | None = None,
    progress: Progress = lambda _: None,
    model: LoadedModel | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Time grammars over a large vocabulary, and answers beside compilations.

    Args:
        setting: Sizes of the benchmark.
        progress: Takes the name of each step.
        model: Gives the answers. Defaults to the embedded reader.
        tokenizer: Folder or GGUF file of the tokenizer. Defaults to a made-up vocabulary.

    Returns:
        By grammar, processor milliseconds of its compilation, and of a mask along the tokens of a
        sample answer. Seconds of an answer
        alone and beside two threads that compile, with their ratio and the longest pause between
        two tokens in milliseconds.
    """
    setting = setting or GrammarsSetting()
    progress(f"a vocabulary of {setting.vocabulary} tokens")
    vocabulary = _large_vocabulary(setting.vocabulary, tokenizer)
    begin = time.perf_counter()
    compile_constraint(Grammar.regex("a"), vocabulary)
    vocabulary_ms = 1e3 * (time.perf_counter() - begin)
    rows = [
        {"grammar": name, **_time_grammar(*sample, vocabulary, setting)}
        for name, sample in _grammars(setting).items()
    ]
    progress("answers alone and beside two compilations")
    return {
        "setting": asdict(setting) | {"tokenizer": tokenizer and tokenizer.name},
        "machine": describe_machine(), "vocabulary_ms": vocabulary_ms,
        "by_grammar": rows, "beside": _answers_beside_compilations(setting, model),
    }  # fmt: skip


class _Head:
    """A stand-in for a model that has only a width of logits."""

    def __init__(self, size: int) -> None:
        head = SimpleNamespace(weight=torch.empty(size, 0))
        self.model = SimpleNamespace(get_output_embeddings=lambda: head, generation_config=None)
        self.logits_width = size


def _large_vocabulary(size: int, path: Path | None) -> LoadedModel:
    """A tokenizer with no model behind it: a real one, or random joins of shorter tokens."""
    if path is not None:
        file = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        real = AutoTokenizer.from_pretrained(folder, **file)
        return LoadedModel("vocabulary", cast("Any", _Head(max(size, len(real)))), real)
    rng, letters = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate(letters)}
    tokens, merges = letters + [each for each in letters if each.isascii()] * 20, []
    while len(vocabulary) < size - 1:
        pair = rng.choice(tokens), rng.choice(tokens)
        if len("".join(pair)) <= 12 and "".join(pair) not in vocabulary:
            merges.append(pair)
            tokens.append("".join(pair))
            vocabulary["".join(pair)] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    return LoadedModel("vocabulary", cast("Any", _Head(size)), tokenizer)


def _grammars(setting: GrammarsSetting) -> dict[str, tuple[Grammar, str]]:
    """Return grammars by name, each with a sample answer."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
            "boss": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "required": ["name", "age", "tags", "boss"],
    }  # fmt: skip
    kim = '{"name": "Kim Larsen of the office", "age": 42, "tags": ["a", "b"], "boss": "Zoë"}'
    answer = (
        '{"answer": "The key hangs in the boathouse.", "page": 3, "from": ["keys", {"x": 1.5}]}'
    )
    dated = r"[A-Z][a-z]+( [A-Z][a-z]+)*, [0-9]{4}-[0-9]{2}-[0-9]{2}"
    return {
        "JSON schema": (Grammar.json_schema(person), kim),
        "any JSON object": (Grammar.json_object(), answer),
        "regex": (Grammar.regex(dated), "Kim Larsen, 2024-05-17"),
        f"enum of {setting.strings}": (
            _enum(setting.strings, 0),
            f'"00000-{setting.strings - 1:09}"',
        ),
    }


def _enum(strings: int, seed: int) -> Grammar:
    return Grammar.json_schema({"enum": [f"{seed:05}-{number:09}" for number in range(strings)]})


def _time_grammar(
    grammar: Grammar, answer: str, model: LoadedModel, setting: GrammarsSetting
) -> dict[str, float]:
    begin = time.thread_time()
    make = compile_constraint(grammar, model)
    compile_ms = 1e3 * (time.thread_time() - begin)
    times: list[float] = []
    while len(times) < setting.masks:
        constraint = make()
        for token in model.tokenizer.encode(answer, add_special_tokens=False):
            begin = time.thread_time()
            constraint.mask()
            times.append(1e3 * (time.thread_time() - begin))
            constraint.accept(token)
    return {
        "compile_ms": compile_ms,
        "mask_ms": statistics.mean(times),
        "mask_p99_ms": float(np.percentile(times, 99)),
    }


def _answers_beside_compilations(
    setting: GrammarsSetting, model: LoadedModel | None
) -> dict[str, float]:
    """Ordinary answers alone and beside two compilations, in turn, in one process."""
    params = GenerationParams(
        max_tokens=setting.answer_tokens, ignore_eos=True, extractive=False, confidence=False
    )
    totals: dict[str, list[float]] = {"alone": [], "beside": []}
    pauses: dict[str, list[float]] = {"alone": [], "beside": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        RagCache.open(folder, model=model, embedding="none", force_modes=True) as rag,
    ):
        text = "Kim is on call on Monday. The spare key hangs in the boathouse. " * 20
        rag.ingest("handbook", [SourceDocument("rota.md", text)])
        for number in range(setting.answers + 1):
            for name, seconds in totals.items():
                with _compiling(rag, setting, 2 if name == "beside" else 0, number) as compiled:
                    begin = last = time.perf_counter()
                    pause = 0.0
                    stream = rag.stream("Who is on call?", collection="handbook", generation=params)
                    for _ in stream.pieces():
                        now = time.perf_counter()
                        pause, last = max(pause, now - last), now
                if number and (compiled or name == "alone"):  # the first answer warms up
                    seconds.append(last - begin)
                    pauses[name].append(1e3 * pause)
    alone, beside = (statistics.median(totals[name]) for name in totals)
    return {
        "alone_s": alone, "beside_s": beside, "ratio": beside / alone,
        "pause_alone_ms": statistics.median(pauses["alone"]),
        "pause_beside_ms": statistics.median(pauses["beside"]),
    }  # fmt: skip


@contextmanager
def _compiling(
    rag: RagCache, setting: GrammarsSetting, threads: int, number: int
) -> Iterator[list[int]]:
    """Compile new grammars in some threads; yields the seeds of the grammars compiled so far."""
    ended, done, model = threading.Event(), list[int](), rag.internals.shared.model

    def compile_grammars(thread: int) -> None:
        seed = 1000 * number + 100 * thread
        while not ended.is_set():
            seed += 1
            compile_constraint(_enum(setting.strings, seed), model)
            done.append(seed)

    running = [threading.Thread(target=compile_grammars, args=(each,)) for each in range(threads)]
    for each in running:
        each.start()
    try:
        if threads:
            time.sleep(0.2)
        yield done
    finally:
        ended.set()
        for each in running:
            each.join()


def _print_grammars(json_file: Path | None, tokenizer: Path | None) -> None:
    torch.set_num_threads(1)  # OpenMP's threads would wait in a loop for cores that compile
    result = run_benchmark(lambda progress: bench_grammars(None, progress, None, tokenizer))
    table = plain_table("grammar", "compile", "a mask", "99th percentile")
    for row in result["by_grammar"]:
        cells = (f"{row[name]:.3f} ms" for name in ("compile_ms", "mask_ms", "mask_p99_ms"))
        table.add_row(str(row["grammar"]), *cells)
    beside = result["beside"]
    said = (
        f"{result['setting']['vocabulary']:,} tokens, read once in {result['vocabulary_ms']:.0f} "
        f"ms. An answer takes {beside['alone_s']:.3f} s alone and {beside['beside_s']:.3f} s "
        f"beside two compilations: {beside['ratio']:.2f} times; longest pause "
        f"{beside['pause_alone_ms']:.0f} and {beside['pause_beside_ms']:.0f} ms"
    )
    print_figures([table, said], result, json_file)


def main(
    json_file: JsonFile = None,
    model: Path | None = None,
    grammars: bool = False,
    tokenizer: Path | None = None,
) -> None:
    """Prints the table of quotations or, with --grammars, of grammars."""
    if grammars:
        _print_grammars(json_file, tokenizer)
        return
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
