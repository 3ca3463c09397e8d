"""Log-probabilities in OpenAI's forms."""

from __future__ import annotations

import json
from math import inf

from ragcache.engine import LogprobFormat, SampledToken


class Letters:
    """Gives each token a letter; token 0 is a part of a character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("\ufffdabc"[token] for token in token_ids)


CHOSEN = [SampledToken(1, -0.5, ((1, -0.5), (2, -inf))), SampledToken(0, None, ())]


def test_chat_logprobs_have_bytes_of_whole_characters_and_finite_numbers() -> None:
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
        "token_logprobs": [-0.5, 0.0],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {}],
        "text_offset": [3, 4],
    }
