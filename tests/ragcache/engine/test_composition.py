"""Documents that compose in hybrid models, against mixers of Hugging Face that are fed again."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    Request,
    RequestHandle,
    SamplingParams,
    Segment,
    encode,
    engine,
)
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.kv_cache_manager import HybridCacheManager
from ragcache.engine.recurrent import SnapshotCache
from ragcache.errors import InvalidRequest
from ragcache.models import CausalLM, recurrent, wrap_causal
from ragcache.models.composition import compose_layers
from ragcache.models.hybrid_trial import MixerInputs, MixerOracle
from ragcache.modes import Compose
from ragcache.states import KVStates
from ragcache.states.quantization import quantize
from tests.conftest import scaled
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    Answer,
    SmallBlockRunner,
    SteppedCore,
    assert_all_blocks_free,
    plain_context,
)
from tests.tiny_hybrids import HYBRID_PARAMS, tiny_hybrid
from tests.tiny_models import random_tokens

NEAR = {"rtol": 0.0, "atol": 1e-4}  # of log-probabilities
LIMIT = 4
PREAMBLE = random_tokens(11, seed=99)


@dataclass(frozen=True)
class Document:
    """Tokens that were read right behind the preamble."""

    token_ids: list[int]


Piece = Document | list[int]


class Composed:
    """A model with documents: patched, and as Hugging Face computes it."""

    def __init__(self, family: str) -> None:
        plain = tiny_hybrid(family)
        self.oracle = MixerOracle(plain, torch.tensor(PREAMBLE))
        self.causal: CausalLM = wrap_causal(copy.deepcopy(plain))
        [self.root] = encode(self.causal, [EncodeJob(PREAMBLE)])
        self.kept: dict[tuple[int, ...], KVStates] = {}
        self._noted: dict[tuple[int, ...], MixerInputs] = {}

    def states(self, document: Document) -> KVStates:
        key = tuple(document.token_ids)
        if key not in self.kept:
            job = EncodeJob(document.token_ids, len(PREAMBLE), Segment(self.root, 0))
            [self.kept[key]] = encode(self.causal, [job])
        return self.kept[key]

    def context(self, pieces: Sequence[Piece], compose: Compose = "order") -> Context:
        """The preamble, then the pieces: documents are read, texts computed."""
        segments, own, at = [Segment(self.root, 0, "root")], list[tuple[int, int]](), len(PREAMBLE)
        for piece in pieces:
            if isinstance(piece, Document):
                segments.append(Segment(self.states(piece), at, str(piece.token_ids)))
                at += len(piece.token_ids)
            else:
                own += enumerate(piece, at)
                at += len(piece)
        positions, tokens = zip(*own, strict=True)
        return Context(tuple(segments), tokens, positions, at, compose)

    @torch.no_grad()
    def log_probs(
        self, pieces: Sequence[Piece], answer: Sequence[int], compose: Compose = "order"
    ) -> Tensor:
        """Log-probabilities before each token of an answer to pieces, the last of which is text."""
        oracle, at, waiting = self.oracle, len(PREAMBLE), list[MixerInputs]()
        cache, found = oracle.start(), torch.empty(0)
        feed = oracle.feed_both if compose == "both" else oracle.feed
        for piece in [*pieces, list(answer)]:
            if isinstance(piece, Document):
                waiting.append(self._inputs(piece))
                continue
            if waiting:
                at, waiting = feed(cache, waiting, at), []
            behind = found[-1:]
            found = oracle.read(cache, torch.tensor(piece), at)
            at += len(piece)
        return torch.cat([behind, found[:-1]])

    def _inputs(self, document: Document) -> MixerInputs:
        key = tuple(document.token_ids)
        if key not in self._noted:
            self._noted[key] = self.oracle.note_document(torch.tensor(document.token_ids))
        return self._noted[key]

    def request(
        self, pieces: Sequence[Piece], compose: Compose = "order", n: int = 1, new: int = LIMIT
    ) -> Request:
        sampling = SamplingParams(logprobs=0)
        return Request(self.context(pieces, compose), new, n=n, sampling=sampling, tenant="a")

    def check(
        self, core: SteppedCore, pieces: Sequence[Piece], compose: Compose = "order", n: int = 1
    ) -> None:
        """Ask a core, and assert that the tokens of the answers are as likely as by the oracle."""
        [output] = core.run(self.request(pieces, compose, n))
        for choice in output.choices:
            expected = self.log_probs(pieces, choice.token_ids, compose)
            chosen = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
            found = torch.tensor([each.logprob for each in choice.chosen])
            torch.testing.assert_close(found, chosen, **NEAR)
            torch.testing.assert_close(chosen, expected.max(-1).values, **NEAR)

    def core(self, blocks: int = 200, states: int = 60, **limits: int) -> SteppedCore:
        nbytes = blocks * BLOCK_SIZE * self.causal.computed_bytes_per_token
        nbytes += states * self.causal.recurrent_bytes
        return SteppedCore(SmallBlockRunner(self.causal), EngineConfig(nbytes, **limits))


@pytest.fixture(scope="module", params=HYBRID_PARAMS)
def composed(request: pytest.FixtureRequest) -> Composed:
    return Composed(str(request.param))


@pytest.fixture(scope="module")
def mamba() -> Composed:
    return Composed("bamba")


@pytest.fixture(scope="module")
def delta() -> Composed:
    return Composed("qwen3_5_text")


def snapshots_of(core: SteppedCore) -> SnapshotCache:
    assert isinstance(core.kv_manager, HybridCacheManager)
    return core.kv_manager.snapshots


def documents(*lengths: int) -> list[Document]:
    return [Document(random_tokens(length, seed=length)) for length in lengths]


QUESTION = random_tokens(9, seed=5)


@pytest.mark.parametrize("compose", ["order", "both"])
def test_documents_in_any_order_are_as_fed_again(composed: Composed, compose: Compose) -> None:
    choose = random.Random(3)
    core = composed.core()
    for count in (1, 2, 5, 12):
        found = documents(*(choose.choice((1, 2, 3, 4, 17, 64, 70)) + n for n in range(count)))
        composed.check(core, [*choose.sample(found, count), QUESTION], compose)
    assert_all_blocks_free(core)


def test_one_document_is_an_ordinary_prefill(composed: Composed) -> None:
    core = composed.core()
    for length in (1, 3, 40):
        [document] = documents(length)
        [output] = core.run(composed.request([document, QUESTION]))
        prompt = [*PREAMBLE, *document.token_ids, *QUESTION]
        with torch.no_grad():
            text = torch.tensor([[*prompt, *output.token_ids]])
            expected = composed.oracle.model(text).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = torch.tensor([each.logprob for each in output.choices[0].chosen])
        torch.testing.assert_close(chosen, expected.max(-1).values, **NEAR)


def test_own_tokens_stand_between_documents(mamba: Composed, delta: Composed) -> None:
    """A token of its own, a block and more; behind the last document and before the first."""
    first, second, third = documents(20, 3, 9)
    between, lead = random_tokens(1, seed=8), random_tokens(6, seed=9)
    for model in (mamba, delta):
        core = model.core(step_tokens=4, prefill_tokens=4)
        pieces = [lead, first, between, second, third, QUESTION]
        model.check(core, pieces)
        model.check(core, pieces, "both")
        model.check(core, [first, lead, second, between])


def test_documents_are_encoded_in_portions(
    mamba: Composed, delta: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portions of one token and of fewer than the convolution sees."""
    [document] = documents(12)
    for model in (mamba, delta):
        whole = model.states(document)
        for size in (1, 2, 5):
            monkeypatch.setattr(engine, "MAX_TOKENS_PER_PASS", size)
            job = EncodeJob(document.token_ids, len(PREAMBLE), Segment(model.root, 0))
            [found] = encode(model.causal, [job])
            assert found.recurrent is not None
            assert whole.recurrent is not None
            for name, tensor in found.recurrent.tensors().items():
                expected = whole.recurrent.tensors()[name]
                torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_prompts_share_the_tokens_behind_their_documents(mamba: Composed) -> None:
    core = mamba.core()
    first, second = documents(20, 7)
    lead = random_tokens(10, seed=4)
    for end, shared in ((3, 0), (6, 0), (5, 8)):  # kept where the second left the first
        pieces = [first, second, [*lead, *random_tokens(end, seed=end)]]
        [output] = core.run(mamba.request(pieces))
        assert output.shared_tokens == shared
        mamba.check(mamba.core(), pieces)
        expected = mamba.log_probs(pieces, output.token_ids).argmax(-1)
        assert output.token_ids == tuple(expected.tolist())


def test_orders_do_not_share(mamba: Composed) -> None:
    core, [first, second] = mamba.core(), documents(20, 7)
    for compose in ("order", "both"):
        [output] = core.run(mamba.request([first, second, QUESTION], compose))  # type: ignore[arg-type]
        assert output.shared_tokens == 0


def test_a_list_that_recurs_is_composed_twice(
    mamba: Composed, delta: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions that have nothing in common, one of a single token. An order is a list."""
    first, second, third = documents(20, 7, 9)
    composed = list[int]()

    def counting(*args: Any, **options: Any) -> Any:
        composed.append(len(args[2]))
        return compose_layers(*args, **options)

    monkeypatch.setattr(recurrent, "compose_layers", counting)
    questions = [random_tokens(length, seed=40 + length) for length in (5, 6, 1, 30, 7)]
    for model in (mamba, delta):
        core = model.core()
        model.context([first, second, third, QUESTION])  # encodes
        for found in ([first, second], [second, first]):
            composed.clear()
            for question in questions:
                model.check(core, [*found, question])
            assert len(composed) == 2
            model.check(core, [*found, random_tokens(9, seed=50), third, QUESTION])
            assert composed[2:] == [3, 1], "with a document behind own tokens it is another list"
            model.check(core, [*found, questions[0], third, QUESTION])
            assert composed[4:] == [1], "a block in front of that document is known"
        assert_all_blocks_free(core)


def test_a_list_without_a_tenant_is_not_kept(mamba: Composed) -> None:
    core = mamba.core()
    for _ in range(3):
        request = replace(mamba.request([*documents(20, 7), QUESTION]), tenant=None)
        core.run(request)
    assert snapshots_of(core).snapshot_count == 0


def test_lists_are_dropped_with_states_that_are_not_finite(mamba: Composed) -> None:
    core, pieces = mamba.core(), [*documents(20, 7), QUESTION]
    cache = snapshots_of(core)
    for seed in (1, 2):
        core.run(mamba.request([*pieces[:-1], random_tokens(9, seed=seed)]))
    root = mamba.request(pieces).root
    assert cache.find_list(root) is not None
    core.fail_all(RuntimeError("a step has failed"))
    assert cache.find_list(root) is None


def test_several_answers_continue_composed_documents(mamba: Composed) -> None:
    core, [first, second] = mamba.core(), documents(20, 7)
    mamba.check(core, [first, second, QUESTION], n=3)
    mamba.check(core, [first, QUESTION, second, QUESTION[:1]], n=3)


def test_preempted_answers_compose_again(mamba: Composed) -> None:
    core = mamba.core(running=4)
    core.pool.allocate_blocks(core.pool.free_count - 15)
    found = documents(20, 7, 3, 30)
    prompts = [[*found[n:], *found[:n], QUESTION] for n in range(4)]
    outputs = core.run(*(mamba.request(pieces, new=12) for pieces in prompts))
    for pieces, output in zip(prompts, outputs, strict=True):
        expected = mamba.log_probs(pieces, output.token_ids).argmax(-1)
        assert output.token_ids == tuple(expected.tolist())
    assert core.stats.preempted > 0


def test_wrong_compositions_are_far_from_the_oracle(delta: Composed) -> None:
    """Another order, a document left out, the mean of two orders."""
    first, second = documents(20, 7)
    prompt = [first, second, QUESTION]
    expected = delta.log_probs(prompt, [5])
    for wrong in ([second, first, QUESTION], [first, QUESTION]):
        assert (delta.log_probs(wrong, [5]) - expected).abs().max() > 0.1
    assert (delta.log_probs(prompt, [5], "both") - expected).abs().max() > 0.01


def test_the_states_of_a_text_are_counted(composed: Composed) -> None:
    [states] = [composed.states(each) for each in documents(40)]
    assert states.nbytes == composed.causal.module_bytes(40)


def test_states_in_eight_bits_keep_their_maps(mamba: Composed) -> None:
    [document] = documents(40)
    states = mamba.states(document)
    assert quantize(states, "int8").restore().recurrent is states.recurrent


def test_states_without_maps_are_refused(mamba: Composed) -> None:
    states = mamba.states(documents(20)[0])
    bare = KVStates(states.keys, states.values, states.start)
    context = Context((Segment(bare, 0),), (5,), (20,), 21)
    with pytest.raises(InvalidRequest, match=r"recurrent layers do not fit .* none are kept"):
        mamba.core().submit(Request(context, 1))


def test_a_part_of_a_document_is_refused(mamba: Composed) -> None:
    states = mamba.states(documents(20)[0])
    for each in (states, quantize(states, "int8")):
        with pytest.raises(InvalidRequest, match="read the module as a whole"):
            each.part(0, 5, 0)


class Play:
    """Prompts over documents, prompts without any and encodings in one core, at random.

    They join, fork, are canceled and preempted. Every answer is compared with the oracle.
    """

    def __init__(self, model: Composed, seed: int) -> None:
        self.model, self.choose = model, random.Random(seed)
        choose = self.choose
        self.core = model.core(
            blocks=choose.choice((30, 60)),
            states=choose.choice((30, 60)),
            step_tokens=9,
            prefill_tokens=choose.choice((9, 40)),
            running=6,
        )
        taken = max(0, self.core.pool.free_count - choose.choice((16, 20)))  # few
        self._taken = self.core.pool.allocate_blocks(taken)
        self._known = documents(1, 2, 5, 17, 30)
        self._fresh = [random_tokens(n, seed=seed * 50 + n) for n in (3, 8, 21, 33)]
        self._encoding: list[tuple[Document, RequestHandle[KVStates, None]]] = []
        self._asked: list[tuple[list[Piece], Compose, Answer]] = []

    def step(self) -> None:
        """Let requests come and go, and compute a step."""
        if self.choose.random() < 0.5:
            self._ask()
        if self._fresh and self.choose.random() < 0.15:
            self._encode()
        if self._asked and self.choose.random() < 0.05:
            self._asked.pop(self.choose.randrange(len(self._asked)))[2].cancel()
        self.core.step()
        for document, handle in [each for each in self._encoding if each[1].done]:
            [self.model.kept[tuple(document.token_ids)]] = handle
            self._encoding.remove((document, handle))
            self._known.append(document)

    def finish(self) -> None:
        """Compute what is left, and compare all answers."""
        self.core.drain()
        for pieces, compose, handle in self._asked:
            for choice in {each.token_ids: each for each in handle.result(0).choices}.values():
                expected = self.model.log_probs(pieces, choice.token_ids, compose)
                chosen = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
                found = torch.tensor([each.logprob for each in choice.chosen])
                torch.testing.assert_close(found, chosen, **NEAR)
                torch.testing.assert_close(chosen, expected.max(-1).values, **NEAR)
        self.core.pool.free_blocks(self._taken)
        assert_all_blocks_free(self.core)

    def _ask(self) -> None:
        choose = self.choose
        pieces: list[Piece] = list(choose.sample(self._known, choose.randrange(4)))
        for _ in range(choose.randrange(3)):
            own = random_tokens(choose.randrange(1, 7), seed=choose.randrange(5))
            pieces.insert(choose.randrange(len(pieces) + 1), own)
        pieces.append(random_tokens(choose.randrange(1, 9), seed=choose.randrange(5)))
        compose: Compose = choose.choice(("order", "both"))
        n, new = choose.choice(((1, 16), (1, 3), (3, 5), (1, 9)))
        request = self.model.request(pieces, compose, n, new)
        if choose.random() < 0.25:  # the preamble is computed, too, and no document is read
            texts = [each for each in pieces if not isinstance(each, Document)]
            pieces = [[token for text in texts for token in text]]
            context = plain_context([*PREAMBLE, *pieces[0]])
            request = replace(request, context=context, tenant=choose.choice(("a", "b", None)))
        self._asked.append((pieces, compose, self.core.submit(request)))

    def _encode(self) -> None:
        document, channel = Document(self._fresh.pop()), StatesChannel(lambda: None)
        job = EncodeJob(document.token_ids, len(PREAMBLE), Segment(self.model.root, 0))
        self.core.add_encoding([job], channel)
        self._encoding.append((document, RequestHandle(channel)))


def play(model: Composed, seed: int, steps: int) -> Play:
    played = Play(model, seed)
    for _ in range(steps):
        played.step()
    played.finish()
    return played


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(scaled(4)))
def test_mixed_batches_are_as_fed_again(composed: Composed, seed: int) -> None:
    play(composed, seed, scaled(60, quick=0.5))


def test_a_short_mixed_batch_is_as_fed_again(mamba: Composed) -> None:
    play(mamba, 12, 15)


@pytest.mark.slow
def test_mixed_batches_fork_preempt_and_share(mamba: Composed) -> None:
    """The comparisons above are of batches in which everything happens."""
    stats = [play(mamba, seed, 60).core.stats for seed in range(4)]
    assert sum(each.preempted for each in stats) > 0
    assert sum(each.shared_tokens for each in stats) > 0
