"""Mode `blend:R`: which tokens are computed again, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache import GenerationParams, RagCache
from ragcache.engine import EncodeJob, Segment, encode
from ragcache.errors import PromptTooLong
from ragcache.models import CausalLM, LoadedModel, prompt_frame, wrap_causal
from ragcache.modes import ROOTED
from ragcache.pipeline import blend
from ragcache.pipeline.ask import lay_out
from ragcache.pipeline.blend import RUN, blend_prompt, choose_runs, most_blended
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, TokenPrompt, build_context
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, quantize
from tests.ragcache.pipeline.conftest import DOCUMENTS, last_logits
from tests.tiny_models import LATENT, random_tokens, tiny_model

PREAMBLE, QUESTION = random_tokens(7, seed=1), random_tokens(6, seed=2)
MODULES = tuple(tuple(random_tokens(n, seed=n)) for n in (21, 9, 30))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Here:
    """Encodes in the calling thread, and keeps the jobs that it was given."""

    def __init__(self, causal: CausalLM) -> None:
        self.causal, self.jobs = causal, list[EncodeJob]()

    def encode(self, jobs: Sequence[EncodeJob], /) -> Iterator[KVStates]:
        self.jobs += jobs
        return encode(self.causal, jobs)


def built(
    modules: Sequence[tuple[int, ...]], preamble: Sequence[int] = PREAMBLE
) -> tuple[TokenPrompt, list[tuple[int, ...]]]:
    """A prompt in mode `rooted`, and the tokens of what it reads."""
    layout = PromptLayout(preamble)
    starts = accumulate(map(len, modules), initial=len(preamble))
    groups = [ModuleGroup((n,), ids, next(starts)) for n, ids in enumerate(modules)]
    lay_out(layout, groups, QUESTION, ROOTED)
    return layout.prompt(), [group.token_ids for group in layout.groups]


def encoded(causal: CausalLM, *, movable: bool = True) -> list[StoredStates]:
    """States of the preamble and of each module right behind it, or at its place."""
    [root] = encode(causal, [EncodeJob(PREAMBLE)])
    starts = accumulate(map(len, MODULES), initial=len(PREAMBLE))
    places = [len(PREAMBLE) if movable else at for at in starts]
    jobs = [EncodeJob(ids, at, Segment(root, 0)) for ids, at in zip(MODULES, places, strict=False)]
    return [root, *encode(causal, jobs)]


def logits_of(causal: CausalLM, prompt: TokenPrompt, states: Sequence[StoredStates]) -> Tensor:
    keys = [KVKey(f"{number:064x}") for number in range(len(states))]
    return last_logits(causal, [build_context(prompt, keys, states)])[0]


def exact_logits(causal: CausalLM) -> Tensor:
    tokens = (*PREAMBLE, *chain(*MODULES), *QUESTION)
    whole = TokenPrompt(tuple(enumerate(tokens)), (), len(tokens))
    return logits_of(causal, whole, [])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, [[], []]),
        (1, [[], [(8, 16)]]),
        (8, [[], [(8, 16)]]),
        (9, [[], [(8, 20)]]),
        (14, [[(0, 8)], [(8, 20)]]),
        (99, [[(0, 10)], [(0, 20)]]),
    ],
)
def test_runs_are_chosen_by_their_mean_until_they_hold_enough(
    tokens: int, expected: list[list[tuple[int, int]]]
) -> None:
    """The last run of a span is shorter, and counts by its mean like any other."""
    first = torch.tensor([2.0] * 8 + [0.5] * 2)
    second = torch.tensor([1.0] * 8 + [9.0] * 8 + [7.0] * 4)
    assert choose_runs([first, second], tokens) == expected


def test_runs_that_deviate_alike_are_chosen_from_the_front() -> None:
    assert choose_runs([torch.zeros(20), torch.zeros(20)], 9) == [[(0, 16)], []]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), max_size=5),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(1, 99),
    st.integers(0, 9),
)
def test_every_position_is_read_or_computed_once(
    modules: list[list[int]], preamble: list[int], percent: int, seed: int
) -> None:
    """Whatever deviates; and as many are computed as was said, or up to a run more."""
    causal = wrap_causal(tiny_model("llama", num_hidden_layers=1))
    prompt, token_ids = built(list(map(tuple, modules)), preamble)
    torch.manual_seed(seed)
    shapes = [(1, 2, len(ids), 16) for ids in token_ids]
    states = [KVStates(torch.randn(shape), torch.randn(shape), 3) for shape in shapes]
    found = blend_prompt(prompt, percent, states, token_ids, causal, Here(causal))
    tokens = sum(map(len, modules))
    again = len(found.computed_tokens) - len(prompt.computed_tokens)
    assert again == found.recomputed
    assert min(tokens, tokens * percent / 100) <= again <= most_blended(prompt, percent)
    assert again < tokens * percent / 100 + RUN or not tokens
    kept = [
        (span.start + i, token_ids[span.group][span.begin + i])
        for span in found.spans
        for i in range(span.length)
    ]
    assert all(span.offset == span.begin for span in found.spans)
    placed = sorted([*kept, *found.computed_tokens])
    assert placed == list(enumerate([*preamble, *chain(*modules), *QUESTION]))
    assert [at for at, _ in found.computed_tokens] == sorted(at for at, _ in found.computed_tokens)
    assert (found.end, found.read_tokens + len(found.computed_tokens)) == (prompt.end, prompt.end)


@pytest.mark.parametrize("family", ["llama", "bloom", LATENT])
def test_what_is_all_computed_is_exact(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    states = encoded(causal)
    prompt, token_ids = built(MODULES)
    found = blend_prompt(prompt, 99, states, token_ids, causal, Here(causal))
    assert found.recomputed == sum(map(len, MODULES))
    torch.testing.assert_close(logits_of(causal, found, states), exact_logits(causal), **CLOSE)


@pytest.mark.parametrize("family", ["llama", "falcon-rw", "bloom", "gpt2", LATENT])
def test_what_deviates_most_in_context_is_chosen(family: str) -> None:
    """Beside states of the whole prompt, whose second layer a pass over two layers must give. The
    first module stands as it was encoded, so that none of it is chosen while others are left."""
    causal = wrap_causal(tiny_model(family, num_hidden_layers=3))
    movable = causal.scheme.movable
    states = encoded(causal, movable=movable)
    prompt, token_ids = built(MODULES)
    here = Here(causal)
    found = blend_prompt(prompt, 30, states, token_ids, causal, here)
    [job] = here.jobs
    assert (job.layers, job.start, len(job.token_ids)) == (2, 7, 60)
    [whole] = encode(causal, [EncodeJob((*PREAMBLE, *chain(*MODULES)))])
    at, deviations = len(PREAMBLE), []
    for each in states[1:]:
        span = slice(at, at + each.length)
        if causal.value_dim:
            away = whole.values[1][:, span] - each.values[1]
        else:  # of a latent, the part that does not turn
            away = (whole.keys[1][:, span] - each.keys[1])[..., 8:]
        deviations.append(away.square().sum((0, 2)))
        at += each.length
    assert deviations[0].max() < 1e-6
    own = {at for at, _ in found.computed_tokens} - {at for at, _ in prompt.computed_tokens}
    assert 18 <= len(own) < 18 + RUN
    assert not own & set(range(28)), "the preamble and the first module"
    if causal.value_dim:
        expected = choose_runs(deviations, 18)
        begins = (7, 28, 37)
        chosen = zip(begins, expected, strict=True)
        assert own == {b + n for b, runs in chosen for run in runs for n in range(*run)}


@pytest.mark.parametrize("family", ["llama", LATENT])
def test_keys_that_serve_as_values_are_turned_to_be_compared(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary part of a latent's key carries its position. Of a single layer, which knows
    nothing of the context, no token deviates once that is turned back."""
    causal = wrap_causal(tiny_model(family, num_hidden_layers=1))
    prompt, token_ids = built(MODULES)
    compared: list[Tensor] = []

    def watched(deviations: Sequence[Tensor], tokens: int) -> list[list[tuple[int, int]]]:
        compared.extend(deviations)
        return choose_runs(deviations, tokens)

    monkeypatch.setattr(blend, "choose_runs", watched)
    blend_prompt(prompt, 1, encoded(causal), token_ids, causal, Here(causal))
    assert [len(each) for each in compared] == [len(module) for module in MODULES]
    assert max(float(each.max()) for each in compared) < 1e-6


def test_states_of_eight_bits_are_compared_too() -> None:
    causal = wrap_causal(tiny_model("llama", num_hidden_layers=3))
    plain = encoded(causal)
    prompt, token_ids = built(MODULES)
    kept = [quantize(each, "int8") for each in plain if isinstance(each, KVStates)]
    expected = blend_prompt(prompt, 50, plain, token_ids, causal, Here(causal))
    found = blend_prompt(prompt, 50, kept, token_ids, causal, Here(causal))
    assert found == expected


def test_a_prompt_without_modules_stays_as_it_is(tiny_reader: LoadedModel) -> None:
    causal = tiny_reader.causal
    prompt, token_ids = built([])
    [root] = encode(causal, [EncodeJob(PREAMBLE)])
    here = Here(causal)
    assert blend_prompt(prompt, 30, [root], token_ids, causal, here) is prompt
    assert here.jobs == []
    assert most_blended(prompt, 30) == 0


ASKED = "Where is the spare key of the boat?"


def test_answers_say_what_was_read_and_computed(rag: RagCache, model: LoadedModel) -> None:
    options = {"collection": "notes", "k": 3, "relative_threshold": 0.0}
    rooted = rag.ask(ASKED, **options)  # type: ignore[arg-type]
    some = rag.ask(ASKED, **options, mode="blend:20")  # type: ignore[arg-type]
    assert (some.mode, some.finish_reason) == ("blend:20", rooted.finish_reason)
    assert some.reuse.prompt_tokens == rooted.reuse.prompt_tokens
    again = rooted.reuse.cached_tokens - some.reuse.cached_tokens
    frame = prompt_frame(model.tokenizer, model.instruction)
    modules = rooted.reuse.cached_tokens - len(model.encode(frame.preamble))
    assert 0.2 * modules <= again < 0.2 * modules + RUN
    assert [s.tier for s in some.sources] == ["host"] * 3


def test_texts_of_a_chat_are_blended_too(rag: RagCache) -> None:
    pasted = "\n\n".join(["Read this.", *(each.text for each in DOCUMENTS), ASKED])
    conversation = [{"role": "user", "content": pasted}]
    kept = rag.chat(conversation)
    some = rag.chat(conversation, mode="blend:30")
    assert (kept.mode, some.mode) == ("recognized:rooted", "recognized:blend:30")
    assert 0 < some.reuse.cached_tokens < kept.reuse.cached_tokens
    exact = rag.chat(conversation, mode="exact")
    whole = rag.chat(conversation, mode="blend:99")
    assert whole.choices[0].token_ids == exact.choices[0].token_ids


def test_what_is_computed_again_needs_room_in_the_pool(tmp_path: Path, model: LoadedModel) -> None:
    """Refused before anything is leased."""
    options = {"collection": "notes", "k": 3, "relative_threshold": 0.0}
    block = 64 * model.causal.computed_bytes_per_token
    with RagCache.open(tmp_path / "state", model, max_tokens=8, private_bytes=block) as small:
        small.ingest("notes", DOCUMENTS)
        small.ask(ASKED, **options)  # type: ignore[arg-type]
        full = GenerationParams(min_tokens=8)
        with pytest.raises(PromptTooLong, match=r"needs \d+ tokens of its own"):
            small.ask(ASKED, **options, mode="blend:99", generation=full)  # type: ignore[arg-type]
