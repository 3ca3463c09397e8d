"""Tokenizes prompts in which untrusted text stands among a template's control tokens.

A Hugging Face tokenizer takes every added token, such as `<|im_end|>` or `<think>`, for a control
token wherever a text spells it, and can leave out only the ones marked as special. Texts therefore
go to a copy in which each control token has a random name that no text can spell. `spell` writes
these names for the control tokens of a template. A template's text with the users' texts in it is
then tokenized at once, as Hugging Face tokenizes rendered chats.

Tokenizers of the sentencepiece kind put a space before every text. Within a prompt there is none: a
text that does not begin one is tokenized behind an anchor, whose tokens are dropped. The tokens of
a prompt's parts, one after the other, are thus the tokens of the whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

_ANCHOR = "\ue000"  # a private character, with which no letter makes a token
_BLANKS = "\u2581"  # sentencepiece's sign for a space
TOKENIZING = 2  # higher when `PromptTokenizer` gives other tokens for a text


class PromptTokenizer:
    """Tokens of parts of prompts. Any number of threads may use it: its state never changes.

    Args:
        tokenizer: A tokenizer of Hugging Face; it is left as it is.
        keep_words: Whether BPE keeps up to 10,000 words for each thread that tokenizes: 5 MiB.
            4,000 characters take 0.2 to 0.4 ms more without them.

    Attributes:
        control: The control tokens with their ids, the longest first.
        prefixes: Whether a text has other tokens at the beginning of a prompt than within.
        parts: Whether control tokens separate texts, each of which has its own tokens.
    """

    def __init__(self, tokenizer: Any, *, keep_words: bool = True) -> None:
        self.control = control_tokens(tokenizer)
        secret = secrets.token_hex(8)
        self._names = control_names(self.control, secret)
        self._written = _any_of(self.control)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        self._backend = None
        if backend is not None:
            kept = getattr(tokenizer, "read_renamed", None)
            spec = None if kept is None else kept(secret)
            self._backend = Tokenizer.from_str(spec or renamed_spec(backend, self._names))
            if not keep_words and isinstance(self._backend.model, BPE):
                self._backend.model._resize_cache(0)
        self._ids = dict(zip(self._names.values(), self.control.values(), strict=True))
        self._spelled = _any_of(self._names.values())
        self._lead = self._encode(_ANCHOR)
        self.prefixes = self._anchored("a") not in (None, self._encode("a"))
        strips = any(
            token.lstrip or token.rstrip
            for token in tokenizer.added_tokens_decoder.values()
            if token.content in self.control
        )
        self.parts = self._backend is not None and not (self.prefixes or strips)

    def spell(self, text: str) -> str:
        """A template's text in which its control tokens have the names that `encode` reads."""
        return self._written.sub(lambda found: self._names[found[0]], text)

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids of a text. Only the names written by `spell` become control tokens.

        `first`: the text begins the prompt.
        """
        if first or not self.prefixes:
            return self._encode(text)
        ids = self._anchored(text)
        return self._encode(text) if ids is None else ids

    def _anchored(self, text: str) -> list[int] | None:
        """Token ids of a text within a prompt, unless the anchor's tokens merge with the text's."""
        whole, size = _ANCHOR + text, len(self._lead)
        if self._backend is None:
            ids, end = self._encode(whole), 1
        else:
            found = self._backend.encode(whole, add_special_tokens=False)
            ids, end = found.ids, found.offsets[size - 1][1]  # unknown letters are one token
        apart = ids[:size] == self._lead and end <= 1 and (len(ids) > size or not text)
        return ids[size:] if apart else None

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        ids, done = [], 0  # a tokenizer without a backend passes over all added tokens
        for found in self._spelled.finditer(text):
            ids += self._plain(text[done : found.start()])
            ids.append(self._ids[found[0]])
            done = found.end()
        return ids + self._plain(text[done:])

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that a template writes and no text from outside may become, with their ids: those
    with a role (end of text, padding) and all that were added to the vocabulary, but for runs of
    spaces and line breaks. The longest first."""
    added = tokenizer.added_tokens_decoder.items()
    tokens = {
        token.content: int(number)
        for number, token in added
        if token.special or token.content.strip().strip(_BLANKS)
    }
    for token in tokenizer.all_special_tokens:
        if token not in tokens:
            tokens[token] = tokenizer.convert_tokens_to_ids(token)
    return dict(sorted(tokens.items(), key=lambda each: -len(each[0])))


def control_names(control: Mapping[str, int], secret: str) -> dict[str, str]:
    """Names of control tokens that no text can spell without knowing `secret`.

    Args:
        control: The control tokens with their ids.
        secret: Random letters and digits.
    """
    return {token: f"<|{secret}{number:x}|>" for token, number in control.items()}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of vocabulary and merges: the serialized tokenizer without the padding and
    truncation that its last caller set, and how texts are put to it. A tokenizer may have kept
    it."""
    kept: str | None = getattr(tokenizer, "kept_fingerprint", None)
    if kept is not None:
        return kept
    backend = getattr(tokenizer, "backend_tokenizer", None)
    entries = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        entries = {**entries, "padding": None, "truncation": None}
    entries = {"how": TOKENIZING, "tokenizer": entries}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of some texts, the first that fits; nothing where there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def renamed_spec(backend: Tokenizer, names: Mapping[str, str]) -> str:
    """The JSON of a tokenizer in which some tokens have other names, and are never made of parts.

    Args:
        backend: The tokenizer.
        names: The other names.
    """
    spec = json.loads(backend.to_str())
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    for token in spec["added_tokens"]:
        if token["content"] in names:  # where it is written, it is meant
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = spec["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif vocabulary is not None:  # Unigram: tokens and their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if not _makes(each, names)]
    return json.dumps(spec)


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    """Whether a merge of byte-pair encoding is about one of these tokens."""
    one, other = merge.split(" ") if isinstance(merge, str) else merge
    return one in names or other in names or one + other in names
