"""Log-probabilities of tokens in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ragcache.engine.sampler import SampledToken

_LEAST = -9999.0  # OpenAI's value for what cannot be: JSON has no infinity


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """Writes sampled tokens with the texts that a tokenizer gives them."""

    tokenizer: Any

    def chat(self, chosen: Sequence[SampledToken]) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        content = []
        for each in chosen:
            top = [self._entry(*pair) for pair in each.alternatives]
            content.append({**self._entry(each.token, each.logprob or 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def text(self, chosen: Sequence[SampledToken], offset: int = 0) -> dict[str, Any]:
        """`logprobs` of a text completion's choice. offset: of its first token, in characters."""
        tokens = [self._token(each.token) for each in chosen]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else []
        top = [
            {self._token(token): _finite(value) for token, value in each.alternatives}
            for each in chosen
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(each.logprob or 0.0) for each in chosen],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token(token_id)
        # a part of a character has bytes that its text does not show
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
