"""Counting tokens for commands that need no model: its tokenizer alone is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from ragcache.errors import ModelNotFound
from ragcache.models import LoadedModel
from ragcache.models.loader import READER
from ragcache.pipeline import ChatTemplate

_MARK = re.compile("[\U00100000-\U0010fffd]")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenizer and its chat template."""

    model: LoadedModel
    template: ChatTemplate

    @classmethod
    def load(cls, model: str | None) -> Tokens:
        """Those of a model folder or hub name; None is the embedded reader."""
        from transformers import AutoTokenizer

        source = model or str(READER)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ModelNotFound(
                f"cannot load the tokenizer of {source!r}: {error}. Give a folder with a "
                "tokenizer, or the name of a hub model that this machine can reach"
            ) from error
        loaded = LoadedModel(source, cast("Any", None), tokenizer)  # text needs no weights
        return cls(loaded, ChatTemplate(loaded))

    def count_trusted(self, text: str) -> int:
        """Tokens of a text in which control tokens are recognized, as in a generated schema."""
        return len(self.model.encode(text))

    def shown(self, text: str) -> str:
        """`text` with the template's control tokens spelled out."""

        def spelled(mark: re.Match[str]) -> str:
            found: str = self.model.tokenizer.decode(self.template.encode(mark[0]))
            return found

        return _MARK.sub(spelled, text)
