"""Documents that one kernel composes into a slot, beside `compose_layers`."""

from __future__ import annotations

import pytest
import torch

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.models import wrap_causal
from ragcache.models.composition import compose_layers, orders_of
from ragcache.models.recurrent import HybridLM, recurrent_mixers
from ragcache.states.recurrent import LayerState
from tests.interpreted import interpreted
from tests.tiny_hybrids import tiny_hybrid
from tests.tiny_models import random_tokens

pytestmark = interpreted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "qwen3_5_text", "kimi_linear"])
def test_a_kernel_composes_as_the_equations_do(family: str) -> None:
    """From a state and from the begin of a text, in one order and in both."""
    from ragcache.attention.triton.recurrent_launch import SlotPool
    from ragcache.engine.device_recurrent import new_composer

    causal = wrap_causal(tiny_hybrid(family))
    assert isinstance(causal, HybridLM)
    [root] = encode(causal, [EncodeJob(random_tokens(5, seed=1))])
    jobs = [EncodeJob(random_tokens(n, seed=n), 5, Segment(root, 0)) for n in (6, 9, 4)]
    documents = [each.recurrent for each in (root, *encode(causal, jobs)) if each.recurrent]
    mixers = list(recurrent_mixers(causal.model))
    pool = SlotPool(causal.layer_states(), 3)
    before, into = pool.take(), pool.take()
    assert pool.states is not None
    pool.states.normal_()
    pool.windows.normal_()
    composer = new_composer(mixers, pool)
    assert composer is not None
    assert composer.fits(documents)
    for begins in (True, False):
        for both in (True, False):
            states = [LayerState() for _ in mixers] if begins else pool.layers(before)
            with torch.inference_mode():
                expected = compose_layers(mixers, states, documents, both=both)
                orders = orders_of(documents, begins=begins, both=both)
                composer.compose(orders, None if begins else before, into)
                for found, wanted in zip(pool.layers(into), expected, strict=True):
                    pairs = zip(found.tensors(), wanted.tensors(), strict=True)
                    for ours, theirs in pairs:
                        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_documents_shorter_than_the_convolution_do_not_fit() -> None:
    from ragcache.attention.triton.recurrent_launch import SlotPool
    from ragcache.engine.device_recurrent import new_composer

    causal = wrap_causal(tiny_hybrid("bamba"))
    assert isinstance(causal, HybridLM)
    states = list(encode(causal, [EncodeJob(random_tokens(n)) for n in (3, 4)]))
    pool = SlotPool(causal.layer_states(), 1)
    composer = new_composer(list(recurrent_mixers(causal.model)), pool)
    assert composer is not None
    short, long = (each.recurrent for each in states)
    assert short is not None
    assert long is not None
    assert not composer.fits([short, long])
    assert composer.fits([long])
