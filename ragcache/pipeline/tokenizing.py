"""Tokenising in many threads at once."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ragcache.models import LoadedModel


@dataclass(frozen=True)
class SharedModel(LoadedModel):
    """A model whose texts any number of threads tokenise.

    Whether control tokens are recognized is a state of a Hugging Face tokenizer, which every call
    sets. With one tokenizer for both, a question that is spelled in one thread could be read as
    the template of another, and its `<|end|>` as the end of a turn. So text from outside has a
    tokenizer of its own, and the state of neither ever changes.
    """

    outside: Any

    @classmethod
    def of(cls, model: LoadedModel) -> SharedModel:
        shared = cls(model.name, model.causal, model.tokenizer, copy.deepcopy(model.tokenizer))
        shared.encode("")
        shared.encode_untrusted("")
        return shared

    def encode_untrusted(self, text: str) -> list[int]:
        ids: list[int] = self.outside.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids
