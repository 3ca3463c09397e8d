"""The hybrid toy's forward, which trains it, equals Hugging Face's model and the definition of a
composition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_model import Mode, Pieces, _inverse, config_of, forward, new_model

from ragcache.models.hybrid_trial import MixerOracle

PREAMBLE, MODULE, QUESTION = 9, 37, 6
MODULES, QUESTIONS = 3, 2


@pytest.fixture(scope="module")
def model() -> Any:
    made = new_model(config_of(vocabulary=200, hidden=64, layers=4), seed=0).eval()
    for name, weight in made.named_parameters():
        if weight.dim() == 2 and "A_log" not in name:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return made


@pytest.fixture(scope="module")
def tokens() -> Pieces:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(3, 200, shape, generator=generator)

    return Pieces(draw(1, PREAMBLE), draw(1, MODULES, MODULE), draw(1, QUESTIONS, QUESTION))


def log_probs(model: Any, tokens: Pieces, mode: Mode) -> torch.Tensor:
    """Return log-probabilities of all questions of the first context, [Q, L, vocabulary]."""
    with torch.no_grad():
        found: torch.Tensor = model.lm_head(forward(model, tokens, mode).questions[0])
    return found.log_softmax(-1)


def test_exact_is_the_model_itself(model: Any, tokens: Pieces) -> None:
    found = log_probs(model, tokens, "exact")
    context = [tokens.preamble[0], tokens.modules[0].flatten()]
    for question, rows in zip(tokens.questions[0], found, strict=True):
        text = torch.cat([*context, question])[None]
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[0, -QUESTION:].log_softmax(-1)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["order", "both"])
@torch.no_grad()
def test_modules_compose_as_the_definition_says(model: Any, tokens: Pieces, mode: Mode) -> None:
    found = log_probs(model, tokens, mode)
    oracle = MixerOracle(model, tokens.preamble[0])
    noted = [oracle.note_document(each) for each in tokens.modules[0]]
    for question, rows in zip(tokens.questions[0], found, strict=True):
        cache = oracle.start()
        feed = oracle.feed if mode == "order" else oracle.feed_both
        expected = oracle.read(cache, question, feed(cache, noted, PREAMBLE))
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)


def test_ways_to_read_differ(model: Any, tokens: Pieces) -> None:
    modes: tuple[Mode, ...] = ("exact", "order", "both", "alone")
    found = [log_probs(model, tokens, mode) for mode in modes]
    for number, one in enumerate(found):
        for other in found[:number]:
            assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("size", [16, 48, 128])
def test_triangular_systems_are_solved_by_products(size: int) -> None:
    keys = torch.nn.functional.normalize(torch.randn(3, size, 64) + 1, dim=-1)
    lower = (keys @ keys.mT * 0.7).tril(-1)
    expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower.double())
    torch.testing.assert_close(_inverse(lower).double(), expected, rtol=0, atol=1e-4)
