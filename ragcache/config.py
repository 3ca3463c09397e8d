"""Settings of an open ragcache."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ragcache.errors import ConfigurationError

Mode = Literal["rooted", "isolated", "exact"]
"""How modules were encoded: after the preamble, alone, or not ahead of time at all."""

DEFAULT_K = 4
"""How many modules a question retrieves."""

MODES: tuple[str, ...] = get_args(Mode)
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class Settings:
    """module_tokens: the most tokens of a module. host_bytes: the budget of the host tier.
    max_new_tokens: the most tokens of an answer, unless a request says otherwise. private_bytes:
    room for the states of questions and answers. queue: the most requests that wait."""

    module_tokens: int = 384
    host_bytes: int = 2 * 2**30
    max_new_tokens: int = 64
    private_bytes: int = 2**29
    queue: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigurationError(
                    f"{field.name} is {getattr(self, field.name)}; it must be positive"
                )


def check_mode(mode: str) -> Mode:
    """Raises `ConfigurationError` for an unknown mode."""
    for known in get_args(Mode):
        if mode == known:
            checked: Mode = known
            return checked
    raise ConfigurationError(f"unknown mode {mode!r}; modes: {', '.join(MODES)}")


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as `8GiB`, `512 MB` or 1048576."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(f"cannot read the size {size!r}; write it like 8GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
