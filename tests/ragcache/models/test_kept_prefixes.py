"""In every family, a prompt that starts from kept states continues as the computed one does.

Kept states are read in parts. Hybrids resume from snapshots of their recurrent layers, which
`tests/ragcache/engine/test_recurrent.py` compares.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.engine import Context, EncodeJob, Request, SamplingParams, Segment, encode
from ragcache.engine.engine import complete
from ragcache.engine.request import ComputedTokens
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.families import FAMILIES
from ragcache.pipeline.conversations import PrefixRun, placed_segments
from ragcache.states import KVKey, KVStates
from tests.ragcache.models.test_parity_wide import DIVISIBLE
from tests.ragcache.models.test_trial import VARIANTS, make_config, tiny

MODULE, BEFORE, AFTER = 9, 11, 12  # tokens of a document, and of the prompt around it
QUICK = ("llama", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss")


def tokens(count: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def prompt(causal: CausalLM) -> Context:
    """Own tokens with a document between them, as a chat has that names one."""
    document = tokens(MODULE, 1)
    [states] = encode(causal, [EncodeJob(document, BEFORE)])
    end = BEFORE + MODULE + AFTER
    positions = (*range(BEFORE), *range(BEFORE + MODULE, end))
    segment = Segment(states, BEFORE, "document", document)
    return Context((segment,), tokens(BEFORE + AFTER, 2), positions, end)


def answer(causal: CausalLM, context: Context, **options: Any) -> tuple[Any, tuple[int, ...]]:
    sampling = SamplingParams(first_logprobs=True)
    [output] = complete(causal, [Request(context, 5, sampling=sampling, **options)])
    return output.choices[0].first_logprobs, output.token_ids


def continues_equally(causal: CausalLM) -> None:
    kept: list[KVStates] = []

    def keep(computed: ComputedTokens) -> None:
        assert computed.token_ids[: BEFORE + AFTER] == list(context.token_ids)
        kept.extend([computed.read(0, 4), computed.read(4, BEFORE + 6)])

    context = prompt(causal)
    expected = answer(causal, context, keep=keep)
    runs = [PrefixRun(KVKey("a"), 0, 4), PrefixRun(KVKey("b"), 4, BEFORE + 6)]
    segments = [
        each
        for run, states in zip(runs, kept, strict=True)
        for each in placed_segments(run, states, context)
    ]
    assert [(each.start, each.states.length) for each in segments] == [
        (0, 4),
        (4, BEFORE - 4),
        (BEFORE + MODULE, 6),
    ]
    resumed = Context(
        (*context.segments, *segments),
        context.token_ids[BEFORE + 6 :],
        context.position_ids[BEFORE + 6 :],
        context.next_position,
    )
    logprobs, answered = answer(causal, resumed)
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-5, atol=1e-5)
    assert answered == expected[1]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow, pytest.mark.nightly))
        for name in sorted(DIVISIBLE & FAMILIES.keys())
    ],
)
def test_a_resumed_prompt_continues_as_the_computed_one(model_type: str) -> None:
    continues_equally(wrap_causal(tiny(make_config(model_type))))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("variant", sorted(DIVISIBLE & VARIANTS.keys()))
def test_a_variant_continues_as_well(variant: str) -> None:
    model_type, changes = VARIANTS[variant]
    continues_equally(wrap_causal(tiny(make_config(model_type, **changes))))
