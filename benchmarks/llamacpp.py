"""A GGUF model here and in llama.cpp, side by side in one process and in turn.

    pip install llama-cpp-python
    python benchmarks/llamacpp.py MODEL.gguf --json FILE
    python benchmarks/llamacpp.py MODEL.gguf --texts TEXTS.json

Both have the same documents: random tokens, read once before anything is timed. A prompt has them
in another order and then a question. llama.cpp keeps its last prompt and computes what follows the
common beginning. Concurrent answers are over the same documents: llama.cpp copies their sequence,
which copies no states. Figures are ratios of the shortest times, because other processes disturb
each of them. (The module is not named `llama_cpp`, which is the name of the bindings.)

Memory is that of a process which opens the model, reads documents and answers over them, beyond
what it had before it opened the model: the most that was resident, with pages of mapped files,
which the system takes back when it needs them, and what is left at the end without these pages.
"""

from __future__ import annotations

import ctypes
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark
from papers import encode_one, engine_config

from ragcache.engine import LLMEngine, Request, assemble_context
from ragcache.machine import process_memory
from ragcache.models import CausalLM, load_model
from ragcache.models.gguf import convert_gguf
from ragcache.states import KVStates

PARTS = ("first", "decode", "memory")
MARGIN = 64  # tokens of the context beyond prompts and answers
CONTROL = 1024  # tokens at the end of a vocabulary that no document has


@dataclass(frozen=True, slots=True)
class BesideSetting:
    """documents: how many a prompt has; tokens: of each; question: tokens of it; answer: tokens
    that are decoded; answers: how many at once; runs: of each time, in turn."""

    documents: tuple[int, ...] = (4, 16)
    tokens: int = 512
    question: int = 16
    answer: int = 32
    answers: tuple[int, ...] = (1, 8)
    runs: int = 3
    threads: int = 2
    quantization: str | None = "auto"

    @property
    def context(self) -> int:
        """Tokens that both sides have room for."""
        prompt = max(self.documents) * self.tokens + self.question
        return prompt + max(self.answers) * (self.question + self.answer) + MARGIN


class LlamaCpp:
    """llama.cpp with one context, greedy, by its own functions.

    Attributes:
        kept: The tokens of sequence 0, whose states llama.cpp holds.
    """

    def __init__(self, file: Path, context: int, sequences: int, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        path = str(file).encode()
        self.model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = context, sequences + 1, True
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.size = int(llama_cpp.llama_n_batch(self.context))
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.size, 0, 1)
        self.kept: list[int] = []

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def first_token(self, tokens: Sequence[int]) -> int:
        """The first token after a prompt. Computes what follows the kept beginning."""
        common = 0
        while common < min(len(self.kept), len(tokens) - 1) and self.kept[common] == tokens[common]:
            common += 1
        self.api.llama_memory_seq_rm(self.memory, 0, common, -1)
        self.kept = list(tokens)
        for at in range(common, len(tokens), self.size):
            rows = [(token, at + n, 0) for n, token in enumerate(tokens[at : at + self.size])]
            found = self._step(rows)
        return found[-1]

    def decode(self, questions: Sequence[Sequence[int]], answer: int) -> float:
        """Tokens a second of concurrent answers to questions after the kept tokens."""
        begin = len(self.kept)
        sequences = range(1, len(questions) + 1)
        for number in sequences:
            self.api.llama_memory_seq_cp(self.memory, 0, number, -1, -1)
        last = [
            self._step([(token, begin + n, number) for n, token in enumerate(question)])[-1]
            for number, question in zip(sequences, questions, strict=True)
        ]
        at, began = begin + len(questions[0]), time.perf_counter()
        for step in range(answer - 1):
            rows = [(token, at + step, s) for token, s in zip(last, sequences, strict=True)]
            last = self._step(rows, every=True)
        seconds = time.perf_counter() - began
        for number in sequences:
            self.api.llama_memory_seq_rm(self.memory, number, -1, -1)
        return len(questions) * (answer - 1) / seconds

    def _step(self, rows: Sequence[tuple[int, int, int]], *, every: bool = False) -> list[int]:
        """One pass over rows of token, position and sequence: next tokens of the last or every."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n] = token, position
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            batch.logits[n] = every or n == len(rows) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp could not compute a pass; give it a larger context")
        wanted = range(len(rows)) if every else [len(rows) - 1]
        logits = (self.api.llama_get_logits_ith(self.context, n) for n in wanted)
        return [int(np.ctypeslib.as_array(each, (self.words,)).argmax()) for each in logits]


class Ours:
    """This project's engine over states of documents in memory."""

    def __init__(self, causal: CausalLM, tokens: int) -> None:
        self.causal = causal
        config = engine_config(self.causal, [self._request([], list(range(tokens)), 1)])
        self.engine = LLMEngine(self.causal, config)

    def _request(self, states: Sequence[KVStates], question: Sequence[int], answer: int) -> Request:
        context = assemble_context(states, question, window=self.causal.window, max_tokens=answer)
        return Request(context, answer, ignore_eos=True)

    def first_token(self, states: Sequence[KVStates], question: Sequence[int]) -> float:
        done = self.engine.submit_request(self._request(states, question, 1)).result()
        return done.first_token_at - done.submitted_at

    def decode(
        self, states: Sequence[KVStates], questions: Sequence[Sequence[int]], answer: int
    ) -> float:
        """Tokens a second of concurrent answers, from the last first token on."""
        handles = [
            self.engine.submit_request(self._request(states, each, answer)) for each in questions
        ]
        done = [handle.result() for handle in handles]
        seconds = max(e.finished_at for e in done) - max(e.first_token_at for e in done)
        return len(questions) * (answer - 1) / seconds


def bench_beside(
    file: Path, setting: BesideSetting | None = None, parts: Sequence[str] = PARTS,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Seconds to the first token by number of documents, in a new order and with the whole prefix;
    tokens a second by number of answers; memory of both; seconds, rss_bytes and disk_bytes of
    both when opened. parts: of `PARTS`."""
    setting = setting or BesideSetting()
    torch.set_num_threads(setting.threads)
    progress("converting the file, unless it was")
    folder = convert_gguf(file)
    result: dict[str, Any] = {
        "setting": asdict(setting), "file": file.name, "machine": describe_machine(),
    }  # fmt: skip
    if "memory" in parts:
        result["memory"] = _memory(file, setting, progress)
    if {"first", "decode"}.isdisjoint(parts):
        return result
    began, before = time.perf_counter(), process_memory()["rss_bytes"]
    progress("opening the model here")
    ours = open_ours(file, setting)
    opened = {"ours": _opened(began, before, folder)}
    began, before = time.perf_counter(), process_memory()["rss_bytes"]
    progress("opening the model in llama.cpp")
    theirs = open_theirs(file, setting)
    opened["llama.cpp"] = _opened(began, before, file)
    draw = DrawnTokens(min(theirs.words, ours.causal.vocabulary) - CONTROL)
    documents = [draw(setting.tokens) for _ in range(max(setting.documents))]
    states = []
    for number, tokens in enumerate(documents):
        progress(f"document {number + 1} of {len(documents)}")
        states.append(encode_one(ours.causal, tokens))
    result["opened"] = opened
    if "first" in parts:
        firsts = result["first_token_seconds"] = {}
        for count in setting.documents:
            firsts |= _first_tokens(ours, theirs, states, documents, count, draw, setting, progress)
    if "decode" in parts:
        shared = setting.documents[0]
        progress("reading the shared documents in llama.cpp")
        theirs.first_token([*chain.from_iterable(documents[:shared])])
        rates = _rates(ours, theirs, states[:shared], draw, setting, progress)
        result["tokens_per_second"] = rates
    ours.engine.close()
    theirs.close()
    return result


def count_equal_tokens(file: Path, texts: Sequence[str]) -> dict[str, int]:
    """How many texts the tokenizer of a converted file and llama.cpp's split alike."""
    import llama_cpp
    from tokenizers import Tokenizer

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    ours = Tokenizer.from_file(str(convert_gguf(file) / "tokenizer.json"))
    equal = 0
    for text in texts:
        data = text.encode()
        room = len(data) + MARGIN
        tokens = (ctypes.c_int32 * room)()
        count = llama_cpp.llama_tokenize(
            vocabulary, data, len(data), tokens, room, False, True
        )  # without an opening token, with control tokens
        equal += tokens[:count] == ours.encode(text, add_special_tokens=False).ids
    llama_cpp.llama_model_free(model)
    return {"texts": len(texts), "equal": equal}


def open_ours(file: Path, setting: BesideSetting) -> Ours:
    return Ours(load_model(file, quantization=setting.quantization).causal, setting.context)


def open_theirs(file: Path, setting: BesideSetting) -> LlamaCpp:
    return LlamaCpp(file, setting.context, max(setting.answers), setting.threads)


def _memory(file: Path, setting: BesideSetting, progress: Progress) -> dict[str, dict[str, int]]:
    """The memory of a process of either side, which reads and answers."""
    found = {}
    for name, run in (("ours", _answer_here), ("llama.cpp", _answer_there)):
        progress(f"memory of {name}")
        with get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(_memory_of, (run, file, setting))
    return found


def _memory_of(
    run: Callable[[Path, BesideSetting], object], file: Path, setting: BesideSetting
) -> dict[str, int]:
    torch.set_num_threads(setting.threads)
    before = _status_bytes()
    kept = run(file, setting)
    after = _status_bytes()
    del kept
    return {
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "anonymous_bytes": after["RssAnon"] - before["RssAnon"],
    }


def _status_bytes() -> dict[str, int]:
    """Memory of this process as Linux counts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    lines = (line.split() for line in status.splitlines() if line.startswith(("Vm", "Rss")))
    return {name.rstrip(":"): 1024 * int(count) for name, count, *_ in lines}


def _answer_here(file: Path, setting: BesideSetting) -> object:
    """Returns what holds the memory."""
    ours, draw = open_ours(file, setting), DrawnTokens(CONTROL)
    documents = [draw(setting.tokens) for _ in range(setting.documents[0])]
    states = [encode_one(ours.causal, each) for each in documents]
    questions = [draw(setting.question) for _ in range(max(setting.answers))]
    ours.decode(states, questions, setting.answer)
    return ours, states


def _answer_there(file: Path, setting: BesideSetting) -> object:
    """Returns what holds the memory."""
    theirs, draw = open_theirs(file, setting), DrawnTokens(CONTROL)
    theirs.first_token(draw(setting.documents[0] * setting.tokens))
    questions = [draw(setting.question) for _ in range(max(setting.answers))]
    theirs.decode(questions, setting.answer)
    return theirs


class DrawnTokens:
    """Draws random tokens below a number, the same in every run."""

    def __init__(self, words: int) -> None:
        self.rng, self.words = random.Random(5), words

    def __call__(self, count: int) -> list[int]:
        return [self.rng.randrange(self.words) for _ in range(count)]


def _rates(
    ours: Ours, theirs: LlamaCpp, states: Sequence[KVStates], draw: DrawnTokens,
    setting: BesideSetting, progress: Progress,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Most tokens a second of concurrent answers over the same documents."""
    rates: dict[str, dict[str, float]] = {}
    for answers in setting.answers:
        row = rates[f"{answers} answers"] = {"ours": 0.0, "llama.cpp": 0.0}
        for run in range(setting.runs):
            progress(f"{answers} answers, run {run + 1} of {setting.runs}")
            questions = [draw(setting.question) for _ in range(answers)]
            row["ours"] = max(row["ours"], ours.decode(states, questions, setting.answer))
            row["llama.cpp"] = max(row["llama.cpp"], theirs.decode(questions, setting.answer))
    return rates


def _first_tokens(
    ours: Ours, theirs: LlamaCpp, states: Sequence[KVStates], documents: Sequence[list[int]],
    count: int, draw: DrawnTokens, setting: BesideSetting, progress: Progress,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Shortest seconds to the first token over some documents, in a new order and in the last."""
    order, rng = list(range(count)), random.Random(count)
    best: dict[str, dict[str, float]] = {
        f"{count} documents, {kind}": {"ours": float("inf"), "llama.cpp": float("inf")}
        for kind in ("new order", "whole prefix")
    }
    for run in range(setting.runs):
        first = order[0]
        while order[0] == first:  # no common beginning
            rng.shuffle(order)
        for name, row in best.items():
            progress(f"{name}, run {run + 1} of {setting.runs}")
            question = draw(setting.question)
            row["ours"] = min(row["ours"], ours.first_token([states[n] for n in order], question))
            began = time.perf_counter()
            theirs.first_token([*chain.from_iterable(documents[n] for n in order), *question])
            row["llama.cpp"] = min(row["llama.cpp"], time.perf_counter() - began)
    return best


def _opened(began: float, before: int, place: Path) -> dict[str, float]:
    files = [place] if place.is_file() else list(place.iterdir())
    return {
        "seconds": time.perf_counter() - began,
        "rss_bytes": process_memory()["rss_bytes"] - before,
        "disk_bytes": sum(each.stat().st_size for each in files),
    }


def _table(result: dict[str, Any]) -> Any:
    """Ratios: above 1 this project is quicker or smaller."""
    table = plain_table("", "here", "llama.cpp", "llama.cpp / here", left=1)
    for name, row in result.get("first_token_seconds", {}).items():
        mine, other = row["ours"], row["llama.cpp"]
        table.add_row(
            f"first token, {name}", f"{mine:.3f} s", f"{other:.3f} s", f"{other / mine:.2f}"
        )
    for name, row in result.get("tokens_per_second", {}).items():
        mine, other = row["ours"], row["llama.cpp"]
        table.add_row(f"decode, {name}", f"{mine:.1f}/s", f"{other:.1f}/s", f"{mine / other:.2f}")
    rows: dict[str, tuple[dict[str, Any], float]] = {}
    if memory := result.get("memory"):
        for name in ("peak_bytes", "anonymous_bytes"):
            rows[f"memory, {name}"] = {side: each[name] for side, each in memory.items()}, 1e6
    if opened := result.get("opened"):
        for name, unit in (("seconds", 1), ("rss_bytes", 1e6), ("disk_bytes", 1e6)):
            rows[f"open, {name}"] = {side: each[name] for side, each in opened.items()}, unit
    for name, (row, unit) in rows.items():
        mine, other = row["ours"], row["llama.cpp"]
        table.add_row(name, f"{mine / unit:,.1f}", f"{other / unit:,.1f}", f"{other / mine:.2f}")
    return table


def main(
    file: Annotated[Path, typer.Argument(metavar="MODEL.gguf", exists=True)],
    documents: Annotated[str, typer.Option(help="Of a prompt.")] = "4,16",
    tokens: Annotated[int, typer.Option(min=1, help="Of a document.")] = 512,
    answer: Annotated[int, typer.Option(min=2, help="Tokens that are decoded.")] = 32,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quantization: Annotated[str, typer.Option(help="auto, int8, int4 or none.")] = "auto",
    parts: Annotated[str, typer.Option(help="Of the figures.")] = ",".join(PARTS),
    texts: Annotated[
        Path | None, typer.Option(help="Compare the tokens of a JSON list of texts, and end.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare a GGUF model here and in llama.cpp."""
    if texts is not None:
        told = count_equal_tokens(file, json.loads(texts.read_text(encoding="utf-8")))
        counts = f"{told['equal']} of {told['texts']} texts have the same tokens"
        print_figures([counts], told, json_file)
        return
    setting = BesideSetting(
        documents=tuple(map(int, documents.split(","))), tokens=tokens, answer=answer, runs=runs,
        threads=threads, quantization=None if quantization == "none" else quantization,
    )  # fmt: skip
    result = run_benchmark(lambda progress: bench_beside(file, setting, parts.split(","), progress))
    print_figures([_table(result)], result, json_file)


if __name__ == "__main__":
    typer.run(main)
