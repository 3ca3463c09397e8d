"""Filters and draws against plain definitions, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine.draw import SHARES, draw, keep_likeliest, shares_of
from ragcache.engine.sampling import Sampling

SETTINGS = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


def kept_by_definition(shares: Tensor, sampling: Sampling) -> set[int]:
    """One token after another, in Python's exact integers. shares: [V]."""
    values: list[int] = shares.tolist()
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if sampling.top_k:
        least = values[order[min(sampling.top_k, len(values)) - 1]]
        order = [token for token in order if values[token] >= least]
    if sampling.top_p < 1:
        mass, before = sampling.top_p * sum(values[token] for token in order), 0
        for token in order:
            if before >= mass:
                break
            before, least = before + values[token], values[token]
        order = [token for token in order if values[token] >= least]
    return {t for t in order if values[t] and values[t] >= sampling.min_p * values[order[0]]}


def kept(shares: Tensor) -> set[int]:
    return set(shares.nonzero().squeeze(-1).tolist())


def test_shares_are_the_probabilities() -> None:
    logits = random_logits(3, 500)
    shares = shares_of(logits, [1.0, 0.5, 2])
    expected = (logits.double() / torch.tensor([[1.0], [0.5], [2.0]])).softmax(-1)
    assert torch.allclose(shares.double() / SHARES, expected, atol=1e-7)


def test_a_tiny_temperature_leaves_the_likeliest_token() -> None:
    logits = torch.tensor([[3e4, 1e5, -1e38]])
    assert shares_of(logits, [1e-5]).tolist() == [[0, SHARES, 0]]


@given(
    st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([1, 4, 64])
)
def test_filters_keep_what_their_definitions_keep(
    samplings: list[Sampling], seed: int, head: int
) -> None:
    logits = random_logits(len(samplings), 50, seed).round()  # many equal ones
    shares = shares_of(logits, [s.temperature for s in samplings])
    filtered = keep_likeliest(shares, samplings, head)
    for row, sampling in enumerate(samplings):
        assert kept(filtered[row]) == kept_by_definition(shares[row], sampling)
        assert kept(filtered[row] - shares[row]).isdisjoint(kept(filtered[row]))


def test_a_nucleus_wider_than_the_head_is_found_by_sorting() -> None:
    shares = shares_of(torch.zeros(1, 5000) - torch.arange(5000) / 1e5, [1.0])
    filtered = keep_likeliest(shares, [Sampling(temperature=1, top_p=0.6)])
    assert 2900 < len(kept(filtered[0])) < 3000
    assert kept(filtered[0]) == set(range(len(kept(filtered[0]))))


def test_draws_invert_the_distribution_function() -> None:
    shares = torch.tensor([[0, 1, 0, 3, 0]]).expand(5, -1)
    uniforms = [0.0, 0.2499, 0.25, 0.9, 1 - 2**-48]
    assert draw(shares, uniforms).tolist() == [1, 1, 3, 3, 3]


def test_draws_are_distributed_as_the_shares() -> None:
    logits = random_logits(1, 6)
    shares = shares_of(logits, [1.0])
    count = 4000
    drawn = draw(shares.expand(count, -1), [(n + 0.5) / count for n in range(count)])
    frequencies = torch.bincount(drawn, minlength=6) / count
    assert torch.allclose(frequencies, logits.softmax(-1)[0], atol=1 / count)


@pytest.mark.parametrize("vocabulary", [37, 8192, 50257])
def test_a_row_is_the_same_alone_and_among_others(vocabulary: int) -> None:
    logits = random_logits(5, vocabulary)
    logits = torch.cat([logits, logits.bfloat16().float()])  # with equal ones
    samplings = [Sampling(1, k, p) for k in (0, 40) for p in (0.5, 0.8, 0.9, 0.95, 0.999)]
    together = keep_likeliest(shares_of(logits, [1.0] * 10), samplings)
    for row, sampling in enumerate(samplings):
        alone = keep_likeliest(shares_of(logits[row : row + 1], [1.0]), [sampling])
        assert torch.equal(alone[0], together[row])
