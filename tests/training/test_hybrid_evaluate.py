"""The hybrid toy: its evaluation through the engine agrees with the forward that trains it, its
words are asked of the right module, and the reader's attention stays what it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_evaluate import WAYS, marks_of, summary
from hybrid_model import Pieces, config_of, forward, model_of_reader, new_model
from hybrid_samples import ContextBuilder
from hybrid_train import training_batches
from model import Reader, Shape
from samples import Builder
from tokenizers import Tokenizer

from ragcache.engine import EncodeJob, EngineConfig, LLMEngine
from ragcache.models import wrap_causal
from ragcache.models.reader import read_reader

READER = Path(__file__).parents[2] / "ragcache" / "reader"
VOCABULARY, PREAMBLE = 24, list(range(3, 12))


@pytest.fixture(scope="module")
def model() -> Any:
    made = new_model(config_of(VOCABULARY, hidden=64, layers=4), seed=0).eval()
    for name, weight in made.named_parameters():
        if weight.dim() == 2 and "A_log" not in name:
            weight.data.normal_(0, 3 * weight.shape[-1] ** -0.5)
    return made


@pytest.fixture(scope="module")
def contexts() -> dict[str, np.ndarray]:
    """Return one context of three modules, with two questions of two tokens."""
    rng = np.random.default_rng(1)
    kinds = np.array([[2, 2, 3, 3], [2, 2, 3, 3], [0, 0, 0, 0]])
    return {
        "modules": rng.integers(3, VOCABULARY, (1, 3, 17)),
        "questions": rng.integers(3, VOCABULARY, (1, 3, 4)) * (kinds > 0),
        "kinds": kinds[None],
        "asked": np.array([[2, 0, -1]]),
    }


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[LLMEngine]:
    config = EngineConfig.for_device(torch.device("cpu"), pool_bytes=2**24, running=8)
    with LLMEngine(wrap_causal(model), config) as engine:
        yield engine


@torch.no_grad()
def test_the_engine_agrees_with_the_trainer(
    model: Any, contexts: dict[str, np.ndarray], engine: LLMEngine
) -> None:
    [root] = engine.encode([EncodeJob(PREAMBLE)])
    marks = list(marks_of(engine, root, contexts, 0))
    questions = torch.from_numpy(contexts["questions"])[:, :2]
    tokens = Pieces(torch.tensor([PREAMBLE]), torch.from_numpy(contexts["modules"]), questions)
    rows = {
        way: model.lm_head(forward(model, tokens, way).questions[0, :, 1:3]).log_softmax(-1)
        for way in WAYS
    }
    found = iter(marks)
    for way in WAYS:
        right = (rows[way].argmax(-1) == questions[0, :, 2:]).all(-1)
        kl = (rows["exact"].exp() * (rows["exact"] - rows[way])).sum(-1).mean(-1)
        for number, module in enumerate((2, 0)):
            mark = next(found)
            assert (mark["way"], mark["module"]) == (way, module)
            assert mark["right"] == right[number]
            assert mark["kl"] == pytest.approx(kl[number].item(), rel=0.02, abs=1e-4)


def test_a_summary_pairs_contexts() -> None:
    marks = [
        {"context": context, "module": module, "way": way, "right": right, "kl": kl}
        for context in (0, 1)
        for way, kl in (("exact", 0.0), ("order", 0.5 + context))
        for module, right in ((0, way == "exact"), (1, 1.0))
    ]
    exact, order = summary(marks, {"first": {0}})
    assert (exact["match"], order["match"], order["cost"], order["kl"]) == (1, 0, 1, 1)
    assert order["cost_interval"] == {"low": 1, "high": 1}
    assert order["kl_interval"] == {"low": 0.5, "high": 1.5}
    assert (order["questions"], order["contexts"]) == (2, 2)


def test_words_are_asked_of_the_module_that_has_them(corpus: Any) -> None:
    tokenizer = Tokenizer.from_file(str(READER / "tokenizer.json"))
    builder = ContextBuilder(Builder(corpus, tokenizer, 0), 32, recall=True)
    context = builder.training(4, random.Random(3))
    assert context["modules"].shape == (4, 32)
    texts = [tokenizer.decode(row.tolist()) for row in context["modules"]]
    for module, row, kind in zip(
        *(context[name] for name in ("asked", "questions", "kinds")), strict=True
    ):
        key = tokenizer.decode(row[kind == 2].tolist()).removeprefix("Question:")
        value = tokenizer.decode(row[kind == 3].tolist())
        assert [f"{key}:{value}" in text for text in texts].index(True) == module


@pytest.mark.slow  # reads the embedded reader
@torch.no_grad()
def test_attention_of_the_reader_stays_what_it_was() -> None:
    given, _ = read_reader(READER)
    reader = Reader(Shape()).eval()
    reader.load_state_dict({
        name.removeprefix("model."): weight.float()
        for name, weight in given.state_dict().items()
        if name != "lm_head.weight"
    })  # fmt: skip
    text = torch.tensor(Tokenizer.from_file(str(READER / "tokenizer.json")).encode(
        "The harbour office was opened in 1904 by Anna Quill. It keeps seven boats. "
        "Question: When was the harbour office opened?"
    ).ids)  # fmt: skip
    hidden = reader(text[None], torch.arange(len(text))[None])
    expected = (hidden @ reader.embed_tokens.weight.T)[0].argmax(-1)
    made = model_of_reader(READER, text, 0, attention=range(8)).float()
    found = made(text[None], use_cache=False).logits[0].argmax(-1)
    assert (found == expected).float().mean() > 0.6


def test_contexts_without_questions_are_not_trained_on(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "training-1-00000.npz",
        modules=np.full((2, 1, 4), 7),
        questions=np.array([[[5, 6, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]),
        kinds=np.array([[[2, 3, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]),
        asked=np.array([[0, -1], [-1, -1]]),
    )
    batches = training_batches(tmp_path, 1, torch.tensor([PREAMBLE]), 0)
    for batch in islice(batches, 3):
        assert batch.tokens.questions.tolist() == [[[5, 6]]]
