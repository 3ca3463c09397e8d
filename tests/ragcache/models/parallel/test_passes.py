"""Passes over several ranks give what one process gives, in float32: ranks as threads."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ragcache.engine import Context, EncodeJob, Request, SamplingParams, Segment, encode
from ragcache.engine.engine import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, trial, wrap_causal
from ragcache.models.checkpoint import text_class
from ragcache.models.families import FAMILIES, family_of
from ragcache.models.fp8 import quantize_fp8
from ragcache.models.parallel.leader import ParallelLM
from ragcache.models.parallel.plans import check_split, weights_of
from ragcache.states import KVStates
from tests.ragcache.models.parallel.thread_ranks import split_in_threads
from tests.ragcache.models.test_trial import CHANGES
from tests.tiny_models import VOCABULARY, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def parallel(request: pytest.FixtureRequest) -> Iterator[ParallelLM]:
    family, ranks, changes = request.param
    split = split_in_threads(wrap_causal(tiny_model(family, **changes)), ranks)
    yield split
    split.close()


def answers(causal: CausalLM) -> tuple[list[KVStates], list[Any]]:
    """States of documents, and answers over them in several orders, greedy and drawn."""
    rng = random.Random(3)

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    [root] = encode(causal, [EncodeJob(draw(16))])
    under = Segment(root, 0)
    states = list(encode(causal, [EncodeJob(draw(length), 16, under) for length in (70, 33, 50)]))
    requests = []
    for number, order in enumerate([(0, 1, 2), (2, 0), (), (1, 2, 0, 1)]):
        at, segments = 16, [Segment(root, 0)]
        for index in order:
            segments.append(Segment(states[index], at))
            at = segments[-1].end
        own = draw(3 + 9 * number)
        context = Context(
            tuple(segments), tuple(own), tuple(range(at, at + len(own))), at + len(own)
        )
        for sampling in (SamplingParams(logprobs=3), SamplingParams(temperature=0.8, seed=number)):
            requests.append(Request(context, 8, sampling=sampling, n=1 + number % 2))
    outputs = complete(causal, requests)
    return states, [[list(each.token_ids) for each in output.choices] for output in outputs]


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama over 2": ("llama", 2, {}),
    "repeated key heads over 4": ("llama", 4, {}),
    "one key head over 4": ("qwen3", 4, {"num_key_value_heads": 1}),
    "biases": ("qwen2", 2, {}),
    "an odd vocabulary": ("llama", 4, {"vocab_size": 333}),
    "a tied head": ("llama", 2, {"tie_word_embeddings": True}),
    "a window": ("mistral", 2, {"sliding_window": 40}),
    "heads of query, key and value": ("gpt_neox", 2, {}),
    "merged projections over 4": ("phi3", 4, {}),
    "a parallel attention with biases": ("phi", 2, {}),
}
QUICK = ("llama over 2", "repeated key heads over 4", "an odd vocabulary")


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
    indirect=True,
)
def test_answers_and_states_are_as_of_one_process(
    parallel: ParallelLM, request: pytest.FixtureRequest
) -> None:
    family, _, changes = request.node.callspec.params["parallel"]
    whole = wrap_causal(tiny_model(family, **changes))
    expected, tokens = answers(whole)
    states, found = answers(parallel)
    assert found == tokens
    for ours, theirs in zip(states, expected, strict=True):
        assert ours.start == theirs.start
        torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)
        torch.testing.assert_close(ours.values, theirs.values, **CLOSE)
    assert parallel.fingerprint == whole.fingerprint
    assert parallel.bytes_per_token == whole.bytes_per_token


SPLIT = (
    *("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt_neox", "granite", "helium", "hyperclovax", "internlm3"),
    "iquestcoder",
    *("jais2", "llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo"),
    *("phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "seed_oss", "smollm3"),
    *("starcoder2", "vaultgemma"),
)
"""Types of models that are split. All others are refused."""
OFTEN = (
    *("apertus", "arcee", "glm", "gpt_neox", "llama", "nanochat", "phi", "phi3", "qwen3"),
    "starcoder2",
)
"""A type for each plan in transformers. The other types have one of these plans."""


def tiny_trial(model_type: str) -> tuple[type[Any], Any]:
    """The class and the configuration of the trial's model of a family."""
    config = AutoConfig.for_model(model_type, **CHANGES.get(model_type, {}))
    return text_class(config), trial.tiny_config(config, family_of(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in SPLIT],
)
def test_a_family_is_split_right(model_type: str) -> None:
    kind, config = tiny_trial(model_type)
    whole, same = (wrap_causal(trial.tiny_model(kind, config, 7)) for _ in range(2))
    with closing(split_in_threads(same, 2)) as split:
        (expected, tokens), (states, found) = answers(whole), answers(split)
    assert found == tokens
    for ours, theirs in zip(states, expected, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - set(SPLIT)))
def test_every_other_family_is_refused_by_name(model_type: str) -> None:
    kind, config = tiny_trial(model_type)
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel=2: {model_type} models"):
        check_split(kind, config, 2)


@pytest.mark.slow
def test_one_model_is_split_several_times_and_stays_usable() -> None:
    """Its weights move, and the ranks of the first split keep theirs."""
    whole = wrap_causal(tiny_model("llama"))
    _, tokens = answers(whole)
    with closing(split_in_threads(whole, 2)) as first:
        for weight in weights_of(whole.model):
            assert first._arena.place_of(weight) is not None
        with closing(split_in_threads(whole, 4)) as second:
            for _ in range(2):
                gc.collect()
                assert [answers(each)[1] for each in (first, second, whole)] == [tokens] * 3


@pytest.mark.parametrize("parallel", [("llama", 2, {})], indirect=True)
def test_states_are_read_by_any_number_of_ranks(parallel: ParallelLM) -> None:
    whole = wrap_causal(tiny_model("llama"))
    tokens = list(range(100))
    [ours], [theirs] = encode(parallel, [EncodeJob(tokens)]), encode(whole, [EncodeJob(tokens)])

    def request(states: KVStates) -> Request:
        context = Context((Segment(states, 0),), (5, 6, 7), (100, 101, 102), 103)
        return Request(context, 8)

    answers = {
        tuple(complete(causal, [request(states)])[0].token_ids)
        for causal in (whole, parallel)
        for states in (ours, theirs)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_in_fp8_are_those_of_one_process(family: str) -> None:
    """Both round whole rows of the weights; on a CPU activations are exact."""

    def rounded_model() -> CausalLM:
        model = tiny_model(family, intermediate_size=128, hidden_size=64)
        assert quantize_fp8(model, model.get_output_embeddings(), torch.device("cpu"))
        return wrap_causal(model)

    whole, other = rounded_model(), rounded_model()
    fingerprint = other.fingerprint
    expected = answers(whole)
    with closing(split_in_threads(other, 2)) as split:
        assert split.fingerprint == fingerprint == whole.fingerprint
        states, found = answers(split)
    assert found == expected[1]
    for ours, theirs in zip(states, expected[0], strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)


def test_weights_in_fp8_that_cannot_be_split_are_refused() -> None:
    model = tiny_model("llama", intermediate_size=48)
    quantize_fp8(model, model.get_output_embeddings(), torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="fp8 cannot split"):
        split_in_threads(wrap_causal(model), 2)
