"""LongRoPE is served up to the length where its frequencies switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.engine import EncodeJob, Request, assemble, encode
from ragcache.engine.offline import complete
from ragcache.errors import PromptTooLong
from ragcache.models import CausalLM
from tests.conftest import random_tokens, tiny_model

SWITCH = 128
PARAMETERS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SWITCH,
}


def longrope(family: str) -> Any:
    changes = {"original_max_position_embeddings": SWITCH} if family == "phi3" else {}
    return tiny_model(family, rope_parameters=dict(PARAMETERS), **changes)


@pytest.fixture(params=["llama", "phi3"])
def model(request: pytest.FixtureRequest) -> Any:
    return longrope(request.param)


def test_the_window_ends_at_the_switch(model: Any) -> None:
    causal = CausalLM.patch(model)
    assert causal.window == SWITCH < model.config.max_position_embeddings
    assert causal.scheme.name == "rotary:longrope:8"
    with pytest.raises(PromptTooLong):
        assemble([], random_tokens(SWITCH), window=causal.window, max_new_tokens=1)


def test_a_window_before_the_switch_stays() -> None:
    model = tiny_model("llama", rope_parameters=dict(PARAMETERS), max_position_embeddings=100)
    assert CausalLM.patch(model).window == 100


def test_moved_modules_answer_as_modules_encoded_in_place(model: Any) -> None:
    causal = CausalLM.patch(model)
    modules, question = [random_tokens(n, seed=n) for n in (24, 17)], random_tokens(6)
    moved = list(encode(causal, [EncodeJob(tokens, 60) for tokens in modules]))
    in_place = list(encode(causal, [EncodeJob(modules[0]), EncodeJob(modules[1], 24)]))
    answers = [
        complete(
            causal,
            [Request(assemble(s, question, window=SWITCH, max_new_tokens=4), 4, frozenset())],
        )[0].token_ids
        for s in (moved, in_place)
    ]
    assert answers[0] == answers[1]


def test_an_ordinary_call_past_the_switch_changes_nothing(model: Any) -> None:
    """transformers overwrites the frequencies in place there."""
    causal = CausalLM.patch(model)
    frequency = causal.scheme.relocation(torch.tensor([1])).cos
    context = assemble([], random_tokens(30), window=SWITCH, max_new_tokens=4)
    [before] = complete(causal, [Request(context, 4, frozenset())])
    with torch.no_grad():
        model(torch.tensor([random_tokens(SWITCH + 50)]))
    assert torch.equal(causal.scheme.relocation(torch.tensor([1])).cos, frequency)
    [after] = complete(causal, [Request(context, 4, frozenset())])
    assert before.token_ids == after.token_ids
    assert torch.equal(CausalLM.patch(model).scheme.relocation(torch.tensor([1])).cos, frequency), (
        "patching anew takes the frequencies before the switch, too"
    )
