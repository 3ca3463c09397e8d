"""Documents and modules as the catalogue takes and gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ragcache.states import KVKey


@dataclass(frozen=True, slots=True)
class NewModule:
    """A nested module to store. key: the states that it was encoded to."""

    name: str
    text: str
    token_ids: Sequence[int]
    key: KVKey
    vector: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to store in place of an earlier one of the same `source_id`. text: the whole, to
    give it back; modules may repeat headings and leave out space."""

    source_id: str
    uri: str
    digest: str
    modules: Sequence[NewModule]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A stored document. attributes: its metadata; modules: how many it has."""

    id: int
    source_id: str
    uri: str
    digest: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    modules: int = 0


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A stored module, with its document's name, address and metadata (`attributes`)."""

    id: int
    name: str
    document: str
    uri: str
    text: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
