"""Ranks that execute the leader's tables, under Triton's interpreter: the answers of one rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    Segment,
    assemble_context,
    encode,
)
from ragcache.engine import engine as engine_module
from ragcache.engine.runner import ModelRunner, runner_for
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.parallel import device_leader
from ragcache.models.parallel.collectives import GlooCollectives
from ragcache.models.parallel.device_leader import split_over_devices
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import wait_for_arrival
from ragcache.states.serialization import to_blob
from ragcache.store.tiers.device import DeviceTier
from ragcache.store.tiers.host import HostTier
from tests.interpreted import interpreted
from tests.tiny_models import tiny_model

pytestmark = [interpreted, pytest.mark.slow]

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
LIMIT, SECONDS = 3, 200


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(model: CausalLM, **_: int) -> ModelRunner:
        if model.ranks > 1:
            return runner_for(model, prefill_tokens=64)
        from ragcache.engine.device_runner import DeviceModelRunner

        return DeviceModelRunner(model, prefill_tokens=64)

    monkeypatch.setattr(engine_module, "runner_for", small)


def whole() -> CausalLM:
    return wrap_causal(tiny_model("llama", num_hidden_layers=1))


def answers(causal: CausalLM, given: list[KVStates]) -> tuple[list[KVStates], list[list[int]]]:
    """States of documents in main memory, and answers over states that come from there."""
    with LLMEngine(causal, EngineConfig(2**20)) as engine:
        [root] = engine.encode([EncodeJob([5, 6, 7])])
        jobs = [EncodeJob(list(range(10 + n, 20 + n)), 3, Segment(root, 0)) for n in range(2)]
        ranks = causal.copies
        host = HostTier(2**22, pinned=False, ranks=ranks)
        kept = [host.begin_copy(each) for each in engine.encode(jobs)]
        for each in kept:
            wait_for_arrival(each)
        kept = [replace(each, arrival=None) for each in given or kept]
        tier = DeviceTier(2**22, causal.device, ranks=ranks)
        names = [KVKey(str(number)) for number in range(2)]
        tier.put_all(list(zip(names, kept, strict=True)))
        documents = [tier.get(each) for each in names]
        for name, source, there in zip(names, kept, documents, strict=True):
            back = host.begin_copy(there)
            wait_for_arrival(back)
            assert to_blob(name, back) == to_blob(name, source), "byte for byte, with all heads"
        handles = []
        for number, order in enumerate([(0, 1), (1,), ()]):
            context = assemble_context(
                [root, *(documents[each] for each in order)], [1, 2, 3 + number], window=512,
                max_tokens=LIMIT,
            )  # fmt: skip
            handles.append(engine.submit_request(Request(context, LIMIT, n=1 + number % 2)))
        outputs = [handle.result(SECONDS) for handle in handles]
        found = [list(choice.token_ids) for each in outputs for choice in each.choices]
    return kept, found


def test_ranks_with_a_device_each_answer_as_one_does(
    forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, tokens = answers(whole(), [])
    with closing(split_over_devices(whole(), 2, torch.device("cpu"))) as split:
        assert (split.num_kv_heads, split.kept_heads) == (1, 2)
        states, found = answers(split, [])
        assert found == tokens
        for ours, theirs in zip(states, expected, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)
            torch.testing.assert_close(ours.values, theirs.values, **CLOSE)
        passes = list[None]()
        monkeypatch.setattr(split.collectives, "begin_pass", lambda: passes.append(None))
        assert answers(split, expected)[1] == tokens
        assert passes
    assert not any(each.nbytes for each in split.model.parameters())


def test_a_split_that_fails_closes_what_has_connected(
    forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise GPUs would keep a default group, and the next model could not be split."""
    ended = list[str]()

    def fail(*_: object) -> NoReturn:
        raise ValueError("no plan")

    monkeypatch.setattr(device_leader, "attach", fail)
    for name in ("release", "close"):
        monkeypatch.setattr(GlooCollectives, name, lambda _, name=name: ended.append(name))
    with pytest.raises(ValueError, match="no plan"):
        split_over_devices(whole(), 2, torch.device("cpu"))
    assert ended[-1] == "close"
    assert "release" in ended


def test_repeated_heads_are_stored_once() -> None:
    def one_head() -> CausalLM:
        model = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1)
        return wrap_causal(model)

    job = EncodeJob(list(range(9)))
    [expected] = encode(one_head(), [job])
    with closing(split_over_devices(one_head(), 2, torch.device("cpu"))) as split:
        [found] = encode(split, [job])
        host = HostTier(2**22, pinned=False, ranks=split.copies)
        kept = host.begin_copy(found)
        wait_for_arrival(kept)
        torch.testing.assert_close(kept.keys, expected.keys, **CLOSE)
