"""The measurement of modes of reuse: `exact`, whole recomputation, and the figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import reuse

from ragcache.documents import SourceDocument
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.evaluation import Dataset, Question
from ragcache.models import LoadedModel
from tests.tiny_models import random_tokens

TOKENS = 6


def prompt(number: int) -> reuse.ReusePrompt:
    modules = [random_tokens(size, seed=number + size) for size in (21, 9, 30)]
    return reuse.ReusePrompt("set", 3, 64, number, modules, random_tokens(5, seed=number), ["a"])


def test_modes_are_measured_against_an_ordinary_prefill(tiny_reader: LoadedModel) -> None:
    modes = [reuse.MeasuredMode.parse(text) for text in ("rooted", "primed", "primed:999")]
    with LLMEngine(tiny_reader.causal, EngineConfig(pool_bytes=2**23)) as engine:
        reader = reuse.ReuseReader(tiny_reader, engine, modes)
        stop = min(tiny_reader.stop_ids)
        rows = list(reuse.measured(reader, [prompt(1), prompt(2)], TOKENS, stop, timed=False))
    for row in rows:
        found = row["modes"]
        assert found["exact"]["same"]
        assert found["exact"]["kl"] == pytest.approx(0, abs=1e-9)
        assert found["primed:999"]["kl"] == pytest.approx(0, abs=1e-6)
        assert found["primed:999"]["answer"] == found["exact"]["answer"]
        assert (found["primed:999"]["computed"], found["primed"]["computed"]) == (39, 0)
        assert min(found["rooted"]["kl"], found["primed"]["kl"]) > 1e-6
        for each in found.values():
            each |= {"exact_match": False, "contains": True, "f1": 0.5}
    figures = reuse.summarize(json.loads(json.dumps(rows)))
    assert figures["rooted"]["ratio"] == [1.0, 1.0, 1.0]
    assert figures["primed:999"]["ratio"][0] < 1e-2
    assert figures["primed"]["f1_over_exact"] == [0.0, 0.0, 0.0]


def test_similar_states_stand_behind_the_companions(tiny_reader: LoadedModel) -> None:
    """Behind the modules that the prompt has before it, a module has the states of `exact`."""
    asked = prompt(1)
    first, second, _ = asked.modules
    asked = replace(
        asked,
        companions=[[], first, [*first, *second]],
        similar=[[], [second, first], []],
    )
    modes = [
        reuse.MeasuredMode.parse(text)
        for text in ("rooted", "primed", "primed+similar", "primed+near")
    ]
    with LLMEngine(tiny_reader.causal, EngineConfig(pool_bytes=2**23)) as engine:
        reader = reuse.ReuseReader(tiny_reader, engine, modes)
        stop = min(tiny_reader.stop_ids)
        [row] = reuse.measured(reader, [asked], TOKENS, stop, timed=True)
    found = row["modes"]
    assert found["primed+similar"]["kl"] == pytest.approx(0, abs=1e-6)
    assert found["primed+similar"]["answer"] == found["exact"]["answer"]
    kl = [found[mode]["kl"] for mode in ("rooted", "primed", "primed+near")]
    assert min(kl) > 1e-6
    assert len(set(kl)) == 3
    assert found["primed+similar"]["computed"] == 0


def test_companions_are_of_other_documents_of_the_set() -> None:
    own = "The red kettle in the boathouse.\n\nThe blue kettle in the boathouse."
    texts = [own, "A key is in the boathouse.", "Das Wetter"]
    documents = [SourceDocument(str(n), text) for n, text in enumerate(texts)]
    modules = reuse.SetModules(Dataset("test", "", (), tuple(documents)), list, tokens=40)
    red, blue = modules.find("red kettle", ("0",), 2)
    [other] = modules.find("key", (), 1)
    [alone] = modules.find("Wetter", (), 1)
    assert modules.like(red, ()) == [blue, other]
    assert modules.companion(red) == other
    assert modules.companion(alone) == ""


def test_questions_are_drawn_until_enough_have_k_modules() -> None:
    texts = ["\n\n".join(f"The fact of number {n}." for n in range(count)) for count in range(1, 7)]
    documents = [SourceDocument(str(n), text) for n, text in enumerate(texts)]
    questions = [Question(str(n), "Which fact?", (), own=(str(n),)) for n in range(6)]
    dataset = Dataset("test", "", tuple(questions), tuple(documents))
    modules = reuse.SetModules(dataset, lambda text: [0] * len(text), tokens=32)
    found = list(modules.drawn(3, most=3))
    assert len(found) == 3
    assert found == list(modules.drawn(3, most=3))
    for question, chosen in found:
        assert question.own[0] in "2345", "the other documents have fewer modules"
        assert len(set(chosen)) == 3
