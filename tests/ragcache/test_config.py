"""Configuration: sizes as people write them, and values that cannot be used."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ragcache.config import MODES, RagCacheConfig, check_mode, linked_tokens, parse_bytes
from ragcache.errors import ConfigurationError


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1048576, 1048576),
        ("1048576", 1048576),
        ("12B", 12),
        ("8GiB", 8 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5kib", 1536),
        ("0.5 TiB", 2**39),
        (" 3 kb ", 3000),
        ("2gb", 2_000_000_000),
        ("1TB", 10**12),
        ("7MiB", 7 * 2**20),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GiB", "8 Gib s", "-1GiB", "1,5GiB", "8 gigs", "1e9", "."])
def test_other_sizes_are_refused_with_an_example(size: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(size)
    assert str(caught.value) == f"cannot read the size {size!r}; write it like 8GiB or 512MB"


@pytest.mark.parametrize("name", [field.name for field in fields(RagCacheConfig)])
def test_options_are_positive(name: str) -> None:
    assert getattr(RagCacheConfig(**{name: 1}), name) == 1
    for value in (0, -5):
        with pytest.raises(ConfigurationError, match=f"{name} is {value}; it must be positive"):
            RagCacheConfig(**{name: value})


def test_defaults_are_documented() -> None:
    config = RagCacheConfig()
    assert (config.module_tokens, config.max_new_tokens) == (384, 64)
    assert config.host_bytes == parse_bytes("2GiB")


def test_every_mode_is_known() -> None:
    assert MODES == ("rooted", "linked:N", "isolated", "exact")
    modes = [mode.replace("N", "16") for mode in MODES]
    assert [check_mode(mode) for mode in modes] == modes
    assert [linked_tokens(mode) for mode in modes] == [0, 16, 0, 0]


@pytest.mark.parametrize(
    "mode", ["Rooted", "", "fast", "linked", "linked:", "linked:0", "linked:-1", "linked:1.5"]
)
def test_an_unknown_mode_is_refused_with_the_known_ones(mode: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_mode(mode)
    assert str(caught.value) == (
        f"unknown mode {mode!r}; modes: rooted, linked:N, isolated, exact, where N is a number "
        "such as 16"
    )
