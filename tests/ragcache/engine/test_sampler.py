"""Sampling: what tokens are by definition, with Triton's kernels (interpreted) and without."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine import LogprobFormat
from ragcache.engine.sampler import (
    CPU_ROWS,
    SampledToken,
    Sampler,
    SamplerState,
    _PendingTokens,
)
from ragcache.engine.sampling import SHARES, draw, keep_likeliest, shares_of
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import InvalidRequest, RequestError, UnusableLogits
from tests.conftest import scaled
from tests.interpreted import interpreted
from tests.ragcache.engine.stepped_engine import sample_tokens

V = 40
DEVICE = torch.get_default_device()
RANDOM = SamplingParams(temperature=1.0, seed=3)
MIXED = (
    SamplingParams(),
    SamplingParams(logprobs=2),
    RANDOM,
    SamplingParams(temperature=0.7, top_k=5, seed=1),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=2, logprobs=0),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, first_logprobs=True),
    SamplingParams(temperature=1.0, presence_penalty=1.5, seed=4),
    SamplingParams(
        temperature=1.5, repetition_penalty=0.7, presence_penalty=-1, seed=5, logprobs=3
    ),
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1, 2]),
    top_k=st.sampled_from([0, 1, 5, V, V + 1]),
    top_p=st.sampled_from([1, 1, 0.01, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0, 0, 0.05, 0.5, 1]),
    repetition_penalty=st.sampled_from([1, 1, 0.4, 3]),
    frequency_penalty=st.sampled_from([0, 0, 0.5]),
    presence_penalty=st.sampled_from([0, 0, 1.5]),
    seed=st.integers(0, 5),
    logprobs=st.sampled_from([None, None, 0, 3]),
    first_logprobs=st.booleans(),
)
BOTH = [False, pytest.param(True, marks=interpreted)]


def random_logits(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(rows, V, generator=generator) * 2


def start(
    sampling: SamplingParams, prompt: Sequence[int] = (1, 2, 3), index: int = 0
) -> SamplerState:
    return SamplerState.start(sampling, prompt, index)


def one(logits: Tensor, state: SamplerState, banned: Collection[int] = ()) -> SampledToken:
    """Chooses for a single row [V]."""
    [chosen] = sample_tokens(logits[None], [state], [banned])
    assert isinstance(chosen, SampledToken)
    return chosen


def tokens_of(state: SamplerState, steps: int, seed: int = 0) -> list[int]:
    return [one(random_logits(1, seed + step)[0], state).token for step in range(steps)]


def kept_by_definition(shares: Tensor, sampling: SamplingParams) -> set[int]:
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


class DefinedRow:
    """One row by definition: a token at a time, of its own logits alone."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], index: int) -> None:
        self.sampling, self.prompt = sampling, set(prompt)
        self.numbers = SamplerState.start(sampling, prompt, index)
        self.generated: list[int] = []

    def penalized(self, logits: Tensor) -> Tensor:
        values = logits.tolist()
        for token, value in enumerate(values):
            count = self.generated.count(token)
            if count or token in self.prompt:
                penalty = self.sampling.repetition_penalty
                value = value / penalty if value > 0 else value * penalty
            value -= count * self.sampling.frequency_penalty
            values[token] = value - (count > 0) * self.sampling.presence_penalty
        return torch.tensor(values)

    def choose(self, logits: Tensor, allowed: Collection[int]) -> int | None:
        """The next token of logits [V], among those allowed."""
        refused = [token for token in range(V) if token not in allowed]
        left = self.penalized(logits).index_fill(0, torch.tensor(refused, dtype=torch.long), -inf)
        if not left.max().isfinite():
            return None
        token = int(left.argmax())
        if self.sampling.temperature > 0:
            token = self.drawn((left - left.max()).div(self.sampling.temperature).softmax(-1))
        self.numbers.drawn += 1
        self.generated.append(token)
        return token

    def drawn(self, probabilities: Tensor) -> int:
        shares = (probabilities * SHARES).long()
        kept = sorted(kept_by_definition(shares, self.sampling))
        wanted = int(self.numbers.uniform() * sum(int(shares[token]) for token in kept))
        for token in kept:
            wanted -= int(shares[token])
            if wanted < 0:
                return token
        raise AssertionError("the shares do not reach their sum")


def masks_of(rows: int, seed: int) -> tuple[list[Tensor | None], list[set[int]]]:
    """Masks shorter and longer than the vocabulary, and what each allows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=generator, device="cpu").int()
    bits = [token for token in range(64) if int(packed[token // 32]) >> token % 32 & 1]
    kinds: list[tuple[Tensor | None, set[int]]] = [
        (None, set(range(V))),
        (packed, {*bits}),
        (packed[:1], {token for token in bits if token < 32}),
    ]
    drawn = [kinds[(row + seed) % 3] for row in range(rows)]
    return [mask for mask, _ in drawn], [allowed for _, allowed in drawn]


def check_reported(
    chosen: SampledToken, row: DefinedRow, state: SamplerState, logits: Tensor, allowed: set[int]
) -> None:
    """Its log-probabilities are of the model's own distribution, whatever was penalized."""
    expected = logits.double().log_softmax(-1)
    count = row.sampling.logprobs
    if count is None:
        assert (chosen.logprob, chosen.alternatives) == (None, ())
    else:
        assert chosen.logprob == pytest.approx(float(expected[chosen.token]), abs=1e-5)
        best = expected.topk(count)
        assert [token for token, _ in chosen.alternatives] == best.indices.tolist()
        values = [value for _, value in chosen.alternatives]
        assert values == pytest.approx(best.values.tolist(), abs=1e-5)
        inside = sorted(token for token in allowed if token < V)
        assert chosen.allowed == pytest.approx(float(expected[inside].logsumexp(-1)), abs=1e-5)
    if row.sampling.first_logprobs and len(row.generated) == 1:
        assert state.first_logprobs is not None
        first = state.first_logprobs.double()
        torch.testing.assert_close(first, expected.cpu(), rtol=0, atol=1e-5)


def check_sampling(
    samplings: Sequence[SamplingParams], seed: int, *, kernels: bool, banned: bool, masked: bool
) -> None:
    """Over some steps, after which requests leave and join."""
    prompt = (*range(0, V, 2), V + 5)
    states = [SamplerState.start(each, prompt, index) for index, each in enumerate(samplings)]
    rows = [DefinedRow(each, prompt, index) for index, each in enumerate(samplings)]
    sampler = Sampler(DEVICE, kernels=kernels)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    likely = torch.randn(V, generator=generator) * 2  # so that tokens come again
    for step in range(8):
        if step == 4:
            states, rows = states[::-2], rows[::-2]
        logits = likely + torch.randn(len(rows), V, generator=generator) / 4
        logits[::2] -= 8  # all below zero
        bans = [
            {row, V - 1, V + 1, -1} if banned and row % 2 else set() for row in range(len(rows))
        ]
        masks, allowed = masks_of(len(rows), seed if masked else -1)
        given = logits.clone()
        pending = sampler.launch(given, states, bans if banned else None, masks if masked else None)
        results = pending.wait()
        assert torch.equal(given, logits), "they are left as they are"
        for at, (row, found) in enumerate(zip(rows, results, strict=True)):
            mine = allowed[at] if masked else set(range(V))
            token = row.choose(logits[at], mine - bans[at])
            if token is None:
                assert isinstance(found, UnusableLogits)
                assert str(found).startswith(f"after {len(row.generated)} tokens")
                continue
            assert isinstance(found, SampledToken)
            assert found.token == pending.inputs[at] == token
            check_reported(found, row, states[at], logits[at], mine)
        assert [state.drawn for state in states] == [len(row.generated) for row in rows]


@pytest.mark.parametrize("kernels", BOTH)
def test_tokens_and_log_probabilities_equal_the_definition(kernels: bool) -> None:
    check_sampling(MIXED, 5, kernels=kernels, banned=True, masked=True)


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=[interpreted, pytest.mark.slow])]
)
@settings(max_examples=scaled(60, quick=0.1))
@given(
    samplings=st.lists(SAMPLINGS, max_size=2 * CPU_ROWS + 1),
    seed=st.integers(0, 99),
    banned=st.booleans(),
    masked=st.booleans(),
)
def test_rows_of_any_batch_are_those_of_the_definition(
    kernels: bool, samplings: list[SamplingParams], seed: int, banned: bool, masked: bool
) -> None:
    check_sampling(samplings, seed, kernels=kernels, banned=banned, masked=masked)


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_is_the_first_of_equals_in_finite_rows(
    kernels: bool, dtype: torch.dtype
) -> None:
    states = [start(SamplingParams()) for _ in range(7)]
    logits = torch.randn(7, 9000).clamp(max=3).to(dtype)
    logits[0, [8200, 4095, 4096]] = 7  # equal, in two blocks
    logits[1, 8999] = 9
    logits[2, 17] = torch.nan
    logits[3, 5000] = torch.inf
    logits[4] = -torch.inf
    logits[5, :8999] = -torch.inf
    logits[6, 0] = 11
    pending = Sampler(DEVICE, kernels=kernels).launch(logits, states)
    found = [getattr(each, "token", None) for each in pending.wait()]
    assert found == [4095, 8999, None, None, None, 8999, 0]
    assert pending.inputs.tolist() == [4095, 8999, 0, 0, 0, 8999, 0]


def test_a_seed_repeats_and_an_index_has_its_own_stream() -> None:
    first = tokens_of(start(RANDOM), 12)
    assert tokens_of(start(RANDOM), 12) == first
    others = [tokens_of(start(RANDOM, index=i), 12) for i in (1, 2)]
    other_seed = tokens_of(start(SamplingParams(temperature=1.0, seed=-3)), 12)
    assert len({tuple(t) for t in (first, *others, other_seed)}) == 4


def test_without_a_seed_every_sequence_takes_one_and_keeps_it() -> None:
    state, other = start(SamplingParams(temperature=1.0)), start(SamplingParams(temperature=1.0))
    assert state.seed != other.seed
    again = start(SamplingParams(temperature=1.0, seed=state.seed))
    assert tokens_of(state, 8) == tokens_of(again, 8)


def test_a_stream_depends_only_on_how_many_tokens_were_drawn() -> None:
    whole = start(RANDOM)
    tokens_of(whole, 5)
    assert SamplerState(RANDOM, seed=3, drawn=5).uniform() == whole.uniform()
    numbers = {SamplerState(RANDOM, 3, index, n).uniform() for index in range(5) for n in range(20)}
    assert len(numbers) == 100
    assert all(0 <= number < 1 for number in numbers)


def test_logprobs_with_zero_or_too_many_alternatives() -> None:
    logits = torch.full((1, 12), -torch.inf)
    logits[0, :3] = torch.tensor([1.0, 3.0, 1.0])
    [bare] = sample_tokens(logits, [start(SamplingParams(logprobs=0))], [()])
    [full] = sample_tokens(logits, [start(SamplingParams(logprobs=20))], [()])
    assert isinstance(bare, SampledToken)
    assert isinstance(full, SampledToken)
    assert bare.alternatives == ()
    assert bare.logprob == full.logprob == full.alternatives[0][1]
    assert [token for token, _ in full.alternatives] == [1, 0, 2]


class CountingSampler(Sampler):
    """A sampler that counts the steps in which every row takes its likeliest token."""

    plain_steps = 0

    def _launch_likeliest(self, logits: Tensor, states: Sequence[SamplerState]) -> Any:
        self.plain_steps += 1
        return super()._launch_likeliest(logits, states)


@pytest.mark.parametrize("rows", [1, CPU_ROWS + 1])
def test_first_logprobs_make_the_first_step_alone_slower(rows: int) -> None:
    sampler, logits = CountingSampler(DEVICE), random_logits(rows)
    states = [start(SamplingParams(first_logprobs=True)) for _ in range(rows)]
    chosen = [sampler.launch(logits, states).wait() for _ in range(3)]
    assert sampler.plain_steps == 2
    assert chosen[0] == chosen[1] == chosen[2]
    for state, own in zip(states, logits, strict=True):
        assert state.first_logprobs is not None
        assert torch.equal(state.first_logprobs, own.log_softmax(dim=-1).cpu())


@pytest.mark.parametrize("sampling", MIXED[:3])
@pytest.mark.parametrize("trouble", [torch.nan, torch.inf, None])
@pytest.mark.parametrize("kernels", BOTH)
def test_unusable_row_leaves_other_rows_unchanged(
    sampling: SamplingParams, trouble: float | None, kernels: bool
) -> None:
    logits = random_logits(3)
    fine = logits[[0, 2]].clone()
    if trouble is not None:
        logits[1, 9] = trouble
    banned = [(), () if trouble else range(V), ()]
    states = [start(sampling, index=i) for i in range(3)]
    first, failed, last = Sampler(DEVICE, kernels=kernels).launch(logits, states, banned).wait()
    assert isinstance(failed, UnusableLogits)
    assert [s.drawn for s in states] == [1, 0, 1]
    assert first == one(fine[0], start(sampling, index=0))
    assert last == one(fine[1], start(sampling, index=2))


SHARE = st.sampled_from([0, 0, 1, 2, 3, 7, 2**23, 2**30 - 64, 2**38, SHARES // 3])


def drawn(shares: Tensor, samplings: Sequence[SamplingParams], uniforms: list[float]) -> list[int]:
    """Tokens that the kernel draws."""
    from ragcache.engine.sampling_kernels import draw_kernel

    tokens = torch.full((len(shares),), -1)
    keys = shares.float().view(torch.int32)
    draw_kernel[(len(shares),)](
        keys,
        torch.tensor([s.top_k for s in samplings]),
        torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        torch.tensor([s.min_p for s in samplings], dtype=torch.float64),
        torch.tensor(uniforms, dtype=torch.float64),
        tokens,
        shares.shape[-1],
        BLOCK=16,
    )
    return tokens.tolist()


@interpreted
@pytest.mark.slow
@settings(max_examples=scaled(100))
@given(
    shares=st.lists(SHARE, min_size=1, max_size=40).filter(any),
    sampling=SAMPLINGS,
    uniforms=st.lists(st.integers(0, 2**48 - 1), min_size=2, max_size=2),
)
def test_the_kernel_draws_what_the_definition_draws(
    shares: list[int], sampling: SamplingParams, uniforms: list[int]
) -> None:
    rows = torch.tensor([shares] * 2).float().long()  # as float32 holds them
    numbers = [uniform / 2**48 for uniform in uniforms]
    expected = draw(keep_likeliest(rows, [sampling] * 2), numbers)
    assert drawn(rows, [sampling] * 2, numbers) == expected.tolist()


@interpreted
def test_the_ends_of_the_distribution_are_drawn() -> None:
    shares = torch.tensor([[0, 5, 0, 2**39, 1, 0]] * 2)
    assert drawn(shares, [SamplingParams()] * 2, [0.0, 1 - 2**-48]) == [1, 4]


SETTINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)


def draw_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


def kept(shares: Tensor) -> set[int]:
    return set(shares.nonzero().squeeze(-1).tolist())


def test_shares_are_the_probabilities() -> None:
    logits = draw_logits(3, 500)
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
    samplings: list[SamplingParams], seed: int, head: int
) -> None:
    logits = draw_logits(len(samplings), 50, seed).round()  # many equal ones
    shares = shares_of(logits, [s.temperature for s in samplings])
    filtered = keep_likeliest(shares, samplings, head)
    for row, sampling in enumerate(samplings):
        assert kept(filtered[row]) == kept_by_definition(shares[row], sampling)
        assert kept(filtered[row] - shares[row]).isdisjoint(kept(filtered[row]))


def test_draws_invert_the_distribution_function() -> None:
    shares = torch.tensor([[0, 1, 0, 3, 0]]).expand(5, -1)
    uniforms = [0.0, 0.2499, 0.25, 0.9, 1 - 2**-48]
    assert draw(shares, uniforms).tolist() == [1, 1, 3, 3, 3]


def test_draws_are_distributed_as_the_shares() -> None:
    logits = draw_logits(1, 6)
    shares = shares_of(logits, [1.0])
    count = 4000
    drawn = draw(shares.expand(count, -1), [(n + 0.5) / count for n in range(count)])
    frequencies = torch.bincount(drawn, minlength=6) / count
    assert torch.allclose(frequencies, logits.softmax(-1)[0], atol=1 / count)


@pytest.mark.parametrize("vocabulary", [37, 8192, 50257])
def test_draws_do_not_depend_on_other_rows(vocabulary: int) -> None:
    logits = draw_logits(5, vocabulary)
    logits = torch.cat([logits, logits.bfloat16().float()])  # with equal ones
    samplings = [SamplingParams(1, k, p) for k in (0, 40) for p in (0.5, 0.8, 0.9, 0.95, 0.999)]
    together = keep_likeliest(shares_of(logits, [1.0] * 10), samplings)
    for row, sampling in enumerate(samplings):
        alone = keep_likeliest(shares_of(logits[row : row + 1], [1.0]), [sampling])
        assert torch.equal(alone[0], together[row])


ALLOWED: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2],
    "top_k": [0, 1, 10**6],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 0.05, 1],
    "repetition_penalty": [0.01, 1, 1.3, 100],
    "frequency_penalty": [-2, 0.0, 2],
    "presence_penalty": [-2.0, 2],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "logprobs": [None, 0, 20],
}
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.001, math.nan, math.inf, True, "1", None, 10**400, "x" * 10_000],
    "top_k": [-1, 1.0, True, 2**31],
    "top_p": [0, 1.01, math.nan, False],
    "min_p": [-1e-9, 1.5, math.nan],
    "repetition_penalty": [0, -1, math.inf, True],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [3, -math.inf],
    "seed": [2**63, 0.5, True, "7"],
    "logprobs": [-1, 21, True, 1.0],
}


def pairs(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, each in values.items() for value in each]


@pytest.mark.parametrize(("name", "value"), pairs(ALLOWED))
def test_values_within_the_range_are_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED))
def test_values_outside_the_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is ") as raised:
        SamplingParams(**{name: value})
    assert repr(value)[:20] in str(raised.value)
    assert len(str(raised.value)) < 200, "a long value is cut"
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)


def test_a_message_names_the_range() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p is 0; .* number above 0 and at most 1$"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidRequest, match=r"logprobs is 21; .* integer from 0 to 20$"):
        SamplingParams(logprobs=21)


def test_the_default_is_greedy_and_changes_no_logits() -> None:
    plain = SamplingParams()
    assert (plain.greedy, plain.penalized, plain.filtered) == (True, False, False)
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


class Letters:
    """Gives each token a letter; token 0 is a part of a character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("\ufffdabc"[token] for token in token_ids)


CHOSEN = [SampledToken(1, -0.5, ((1, -0.5), (2, -inf))), SampledToken(0, None, ())]


def test_chat_logprobs_have_whole_characters_and_finite_numbers() -> None:
    told = LogprobFormat(Letters()).chat(CHOSEN)
    first, second = told["content"]
    assert first["token"] == "a"
    assert first["bytes"] == [97]
    assert [each["logprob"] for each in first["top_logprobs"]] == [-0.5, -9999.0]
    assert second == {"token": "\ufffd", "logprob": 0.0, "bytes": None, "top_logprobs": []}
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_text_logprobs_have_the_offset_of_each_token() -> None:
    assert LogprobFormat(Letters()).text(CHOSEN, offset=3) == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, None],
        "text_offset": [3, 4],
    }


class Computing:
    """An event of a device: whether it has computed what it was given."""

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.mark.parametrize("done", [False, True])
def test_garbage_is_collected_while_the_device_computes(
    done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = list[bool]()
    event: Any = Computing(done=done)
    monkeypatch.setattr(
        "ragcache.engine.sampler.collect_while_waiting", lambda: collected.append(event.done)
    )
    tokens = _PendingTokens([], [torch.empty(0, dtype=torch.int64)], event)
    assert tokens.wait() == []
    assert collected == ([] if done else [False])
