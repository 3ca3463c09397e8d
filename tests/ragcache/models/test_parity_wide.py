"""The whole table through the engine: prefixes, roots, orders, batches and decoding, as Hugging
Face computes them. `.ci/run` runs one case a family (test_trial) and
some families at length (test_parity)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ragcache.engine import EncodeJob, EngineConfig, Request, Segment, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.checkpoint import text_class
from ragcache.models.families import FAMILIES, family_of
from ragcache.models.trial import tiny_config, tiny_model
from tests.peak_memory import peak_bytes
from tests.ragcache.models.reference import Module, last_logits, prompt, reference
from tests.ragcache.models.test_trial import HYBRIDS, VARIANTS, make_config
from tests.tiny_models import random_tokens

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
DIVISIBLE = (FAMILIES.keys() | VARIANTS.keys()) - HYBRIDS - {"state spaces beside attention"}
"""Families and variants whose states can be read in parts: those without recurrent layers."""
CASES = sorted(DIVISIBLE)
NEAR = {"rtol": 1e-3, "atol": 2e-4}  # of logits
NEW = 6


@dataclass(frozen=True)
class Pair:
    """A model as Hugging Face computes it, and patched."""

    plain: Any
    causal: CausalLM

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits of every token of a text."""
        with torch.no_grad():
            found: torch.Tensor = self.plain(torch.tensor([tokens]), use_cache=False).logits[0]
        return found


@pytest.fixture(scope="module", params=CASES)  # all tests of a model, then the next
def pair(request: pytest.FixtureRequest) -> Pair:
    case = str(request.param)
    model_type, changes = VARIANTS.get(case, (case, {}))
    config = make_config(model_type, **changes)
    tiny = tiny_config(config, family_of(config))
    plain = tiny_model(text_class(config), tiny, 7)
    return Pair(plain, wrap_causal(copy.deepcopy(plain)))


def encoded(causal: CausalLM, tokens: list[int], start: int) -> Any:
    """States that were encoded elsewhere, where they can move."""
    [states] = encode(causal, [EncodeJob(tokens, 41 if causal.scheme.movable else start)])
    return states


def test_an_answer_after_a_moved_prefix(pair: Pair) -> None:
    """Decoding through blocks, teacher-forced: every token that Hugging Face would choose."""
    tokens = random_tokens(50, seed=3)
    states = encoded(pair.causal, tokens[:31], 0)
    context = assemble_context([states], tokens[31:], window=400, max_tokens=NEW)
    config = EngineConfig(step_tokens=7, prefill_tokens=7)  # in portions
    [completion] = complete(pair.causal, [Request(context, NEW, frozenset())], config)
    answer = list(completion.token_ids)
    logits = pair.logits([*tokens, *answer])[len(tokens) - 1 : -1]
    best = logits.max(-1).values
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, best, **NEAR)


def test_a_rooted_module(pair: Pair) -> None:
    tokens = random_tokens(60, seed=4)
    [root] = encode(pair.causal, [EncodeJob(tokens[:15])])
    [module] = encode(pair.causal, [EncodeJob(tokens[15:45], 15, Segment(root, 0))])
    context = assemble_context([root, module], tokens[45:], window=400, max_tokens=1)
    [logits] = last_logits(pair.causal, [context])
    torch.testing.assert_close(logits, pair.logits(tokens)[-1], **NEAR)


def test_batched_requests_over_shared_modules(pair: Pair) -> None:
    one, other = (Module(random_tokens(n, seed=n)) for n in (24, 31))
    pieces = [
        [one, other, random_tokens(9, seed=5)],
        [other, one, random_tokens(5, seed=6)],
        [random_tokens(8, seed=7)],
    ]
    contexts = [prompt(pair.causal, each) for each in pieces]
    together = last_logits(pair.causal, contexts)
    alone = torch.cat([last_logits(pair.causal, [context]) for context in contexts])
    torch.testing.assert_close(together, alone, **NEAR)


def test_memory_of_a_pass_is_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.engine.engine.MAX_TOKENS_PER_PASS", 64)
    monkeypatch.setattr("ragcache.attention.cpu.WORKSPACE", 2**15)
    causal, tokens = pair.causal, min(300, pair.causal.window)
    job = EncodeJob(random_tokens(tokens, seed=8))
    list(encode(causal, [job]))  # workspaces stay
    peak = peak_bytes(lambda: list(encode(causal, [job])))
    assert peak - tokens * causal.computed_bytes_per_token < causal.pass_bytes(64, tokens)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_modules_in_any_order(pair: Pair, order: tuple[int, ...]) -> None:
    """Skips models with windows or shared states, which Hugging Face's cache cannot hold."""
    if pair.causal.windows or pair.causal.num_layers < pair.plain.config.num_hidden_layers:
        pytest.skip("the reference is a cache of whole layers")
    modules = [Module(random_tokens(n, seed=n)) for n in (24, 31, 17)]
    pieces = [*(modules[i] for i in order), random_tokens(9, seed=5)]
    [logits] = last_logits(pair.causal, [prompt(pair.causal, pieces)])
    torch.testing.assert_close(logits, reference(pair.plain, pieces), **NEAR)
