"""First-token divergence and agreement of a mode with `exact`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ragcache import GenerationParams, RagCache
from ragcache.engine import Choice
from ragcache.errors import InvalidRequest
from ragcache.fidelity import compare_first_tokens, kl_divergence
from ragcache.models import LoadedModel


def choice(probabilities: Sequence[float]) -> Choice:
    return Choice((0,), "", "length", first_logprobs=torch.tensor(probabilities).log())


def test_divergence_is_of_the_reference_from_the_mode_in_nats() -> None:
    p, q = [0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]
    found = compare_first_tokens([choice(p), choice(q)], [choice(q), choice(q)])
    expected = 0.5 * math.log(2)
    assert found.divergences == pytest.approx((expected, 0.0))
    assert found.kl_divergence == pytest.approx(expected / 2)
    assert found.agreements == (True, True)
    reverse = kl_divergence(torch.tensor(q).log(), torch.tensor(p).log())
    assert reverse == math.inf, "the mode rules out what the reference holds possible"


def test_agreement_is_of_the_likeliest_tokens() -> None:
    mine, other = [0.6, 0.4], [0.4, 0.6]
    found = compare_first_tokens([choice(mine)] * 3, [choice(mine), choice(other), choice(mine)])
    assert found.agreements == (True, False, True)
    assert found.agreement == pytest.approx(2 / 3)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 and 0 first tokens cannot be compared"):
        compare_first_tokens([], [])
    with pytest.raises(InvalidRequest, match="1 and 2 first tokens"):
        compare_first_tokens([choice([1.0])], [choice([1.0])] * 2)
    with pytest.raises(InvalidRequest, match="first_logprobs=True"):
        compare_first_tokens([choice([1.0])], [Choice((0,), "", "length")])


def test_modes_over_documents_are_compared(
    tmp_path: Path, quick_reader: LoadedModel, notes: Path
) -> None:
    """All that `primed:400` computes in context is `exact`; isolated documents differ from it."""
    first = GenerationParams(first_logprobs=True, max_tokens=1)
    asked = ["Where does the spare key hang?", "Who serviced the engine of the Pipit?"]
    with RagCache.open(tmp_path / "state", quick_reader, embedding="none", force_modes=True) as rag:
        rag.ingest("notes", [notes])
        exact, primed, isolated = (
            [
                answer.choices[0]
                for answer in rag.ask_batch(
                    asked, collection="notes", k=2, relative_threshold=0.0, mode=mode,
                    generation=first,
                )
            ]
            for mode in ("exact", "primed:400", "isolated")
        )  # fmt: skip
        plain = rag.ask(asked[0], collection="notes", generation=first).to_dict()
    assert compare_first_tokens(exact, exact).kl_divergence == 0.0
    near, far = (compare_first_tokens(exact, mode).kl_divergence for mode in (primed, isolated))
    assert near < 1e-6 < 1e-4 < far
    assert "first_logprobs" not in plain["choices"][0]
