"""States and their keys, and states in eight bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import ConfigurationError
from ragcache.states import FORMAT_VERSION, KVKey, KVStates, state_key
from ragcache.states import kv as key_module
from ragcache.states.quantization import (
    QuantizedStates,
    check_kv_dtype,
    kv_dtype_of,
    quantize,
    quantized_nbytes,
    tensors_of,
)

INPUTS: dict[str, Any] = {
    "model": "m" * 64,
    "tokenizer": "t" * 64,
    "scheme": "rotary",
    "mode": "rooted",
    "token_ids": (5, 6, 7),
    "start": 12,
    "root": KVKey("0" * 64),
}
CHANGES: list[dict[str, Any]] = [
    {"model": "n" * 64},
    {"tokenizer": "u" * 64},
    {"scheme": "alibi"},
    {"mode": "isolated"},
    {"token_ids": (5, 7, 6)},
    {"token_ids": (5, 6)},
    {"token_ids": (5, 6, 7, 0)},
    {"start": 13},
    {"root": None},
    {"root": KVKey("1" * 64)},
    {"offsets": (0, 1, 3)},
    {"offsets": (2, 1, 0)},
    {"salt": "a"},
    {"salt": "1:2,"},
]
ids = st.lists(st.integers(0, 200_000), max_size=6)


def test_every_dependency_changes_the_key() -> None:
    assert len({state_key(**{**INPUTS, **change}) for change in [{}, *CHANGES]}) == len(CHANGES) + 1


def test_the_format_version_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_key(**INPUTS)
    monkeypatch.setattr(key_module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert state_key(**INPUTS) != before


@pytest.mark.parametrize("same", [{"token_ids": [5, 6, 7]}, {"offsets": [0, 1, 2]}], ids=str)
def test_equal_inputs_have_equal_keys(same: dict[str, Any]) -> None:
    assert state_key(**{**INPUTS, **same}) == state_key(**INPUTS)


def test_text_that_moves_to_the_next_name_changes_the_key() -> None:
    one = state_key(**{**INPUTS, "scheme": "a", "mode": "b,1:c"})
    other = state_key(**{**INPUTS, "scheme": "a,5:b", "mode": "c"})
    assert one != other


@given(first=ids, second=ids)
def test_two_runs_of_tokens_share_a_key_only_if_they_are_equal(
    first: list[int], second: list[int]
) -> None:
    keys = [state_key(**{**INPUTS, "token_ids": run}) for run in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


def test_digest_is_stable() -> None:
    """Fails on an accidental change; raise FORMAT_VERSION with an intended one."""
    pinned = "ecce37706198004381723bbc2e3094c707fd6436b7efc6418fb2d5fea3a84723"
    assert state_key(**INPUTS) == KVKey(pinned)


ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
DTYPES = list(ROUNDING)


def draw(dtype: torch.dtype, seed: int = 0, tokens: int = 7, spread: float = 3.0) -> KVStates:
    """Channels of very different sizes, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(1, 1, 1, 6, generator=generator).mul(spread).exp()
    drawn = torch.randn(2, 2, 3, tokens, 6, generator=generator) * sizes
    keys, values = drawn.clamp(-6e4, 6e4)  # which float16 holds
    return KVStates(keys.to(dtype), values.to(dtype), 5)


def quantized(states: KVStates) -> QuantizedStates:
    kept = quantize(states, "int8")
    assert isinstance(kept, QuantizedStates)
    return kept


@given(seed=st.integers(0, 2**32), spread=st.floats(0, 4), tokens=st.integers(1, 40))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_element_is_wrong_by_more_than_is_stated(
    dtype: torch.dtype, seed: int, spread: float, tokens: int
) -> None:
    states = draw(dtype, seed, tokens, spread)
    kept = quantized(states)
    back = kept.restore()
    sides = (
        (states.keys, back.keys, kept.key_scales),
        (states.values, back.values, kept.value_scales),
    )
    for exact, found, scales in sides:
        size = exact.float().abs()
        slack = ROUNDING[dtype] * (size + scales) + torch.finfo(dtype).tiny
        assert ((exact.float() - found.float()).abs() <= scales / 2 + slack).all()


def test_scales_stand_for_channels_of_keys_and_tokens_of_values() -> None:
    kept = quantized(draw(torch.bfloat16, tokens=7))
    assert kept.key_scales.shape == (2, 3, 1, 6)
    assert kept.value_scales.shape == (2, 3, 7, 1)
    assert kept.length == 7


def test_model_is_the_same_object_and_so_exact_to_the_bit() -> None:
    states = draw(torch.bfloat16)
    assert quantize(states, "model") is states
    assert states.restore() is states


def test_quantized_states_are_not_quantized_again() -> None:
    kept = quantized(draw(torch.bfloat16))
    assert quantize(kept, "int8") is kept
    assert kv_dtype_of(kept) == "int8"
    plain = quantize(kept, "model")
    assert torch.equal(plain.keys, kept.restore().keys)
    assert plain.keys.dtype == plain.values.dtype == torch.bfloat16
    assert kept.restore(torch.float32).keys.dtype == torch.float32


def test_bytes_are_those_of_all_tensors_and_about_half() -> None:
    states = KVStates(*torch.randn(2, 8, 2, 300, 64).bfloat16(), 0)
    kept = quantize(states, "int8")
    assert kept.nbytes == sum(t.untyped_storage().nbytes() for t in tensors_of(kept).values())
    assert kept.nbytes < 0.54 * states.nbytes


def test_zeros_and_runs_without_tokens_survive() -> None:
    zeros = KVStates(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    assert not quantize(zeros, "int8").restore().keys.any()
    empty = KVStates(torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 0, 4), 0)
    assert quantize(empty, "int8").restore().length == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_not_quantized(value: float) -> None:
    states = draw(torch.float32)
    states.values[0, 0, 2, 1] = value
    assert quantize(states, "int8") is states


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'int4'; kinds: model, int8"):
        check_kv_dtype("int4")


@given(
    tokens=st.integers(0, 20),
    layers=st.integers(1, 3),
    size=st.integers(1, 9),
    latent=st.booleans(),
)
def test_quantized_bytes_are_known_from_shapes(
    tokens: int, layers: int, size: int, latent: bool
) -> None:
    keys, values = torch.randn(2, layers, 2, tokens, size).bfloat16()
    states = KVStates(keys, values[..., :0] if latent else values, 0)
    forms = [quantize(states, "int8"), states]
    for form in forms:
        for kind in ("int8", "model"):
            assert quantized_nbytes(form, kind) == quantize(form, kind).nbytes
