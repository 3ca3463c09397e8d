"""Learned positions: nothing moves."""

from __future__ import annotations

import pytest
import torch

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.engine.context import Context
from ragcache.models import CausalLM
from ragcache.models.positions import Learned
from tests.conftest import random_tokens, tiny_model
from tests.ragcache.models.reference import last_logits


def test_states_that_stand_where_they_were_encoded_need_no_turn() -> None:
    scheme = Learned()
    assert not scheme.movable
    assert scheme.slopes is None
    assert scheme.name == "learned"
    assert scheme.relocation(torch.tensor([0, 0])) is None


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_moved_segment_is_an_error_of_the_caller(family: str) -> None:
    causal = CausalLM.patch(tiny_model(family))
    [states] = encode(causal, [EncodeJob(random_tokens(12), start=5)])
    context = Context((Segment(states, 0),), (1, 2, 3), (12, 13, 14), 15)
    with pytest.raises(AssertionError, match="stand where they were encoded"):
        last_logits(causal, [context])
