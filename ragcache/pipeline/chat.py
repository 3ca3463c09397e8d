"""Conversations: render, recognize modules in the text, and build the prompt that reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ragcache.db import Catalog
from ragcache.errors import InvalidRequest
from ragcache.modes import ROOTED, ReuseMode
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.chat_template import ChatTemplate, Message, find_mark
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens
from ragcache.pipeline.prompt import (
    AskedQuestion,
    ModuleGroup,
    ModuleStates,
    PromptLayout,
    Retrieved,
    TokenPrompt,
)
from ragcache.recognition import RecognizedModule, Recognizer

Conversation = Sequence[Message] | str
"""Messages, or a text that is continued as it is, without a template."""

MIN_READ_TOKENS = 8  # of a module; fewer are computed

FitsAt = Callable[[int, int], bool]
"""Whether a module's states can be read at a position: `fits_at(start, length)`."""

_SHORT = 64  # characters
_EDGE = 3  # tokens at the front of a text that its surroundings may change


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Options that the conversations of one call share."""

    mode: ReuseMode = ROOTED
    recognize: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as one text with marks for control tokens, and the modules found in it."""

    question: str
    """The user's last message."""
    text: str
    found: Sequence[RecognizedModule] = ()
    lead: Sequence[int] = ()
    """Tokens before the text."""


@dataclass(frozen=True, slots=True)
class ChatPipeline:
    """Builds prompts of conversations.

    Texts of ingested modules that occur in them are read from the modules' kept states. Those were
    encoded after the preamble of a collection's prompts, or isolated, and follow another beginning
    here.
    """

    template: ChatTemplate
    tokenizer: InContextTokenizer
    recognizer: Recognizer
    catalog: Catalog
    encoder: ModuleEncoder
    tokens: ModuleTokens

    def prepare_prompts(
        self, conversations: Sequence[Conversation], options: ChatCall
    ) -> list[TokenPrompt]:
        """Renders each conversation, finds modules in it, and builds its prompt. Raises
        `InvalidRequest` or `UnsupportedModel`."""
        called = time.perf_counter()
        chats = [self._render(each, options) for each in conversations]
        times = Timestamps(called, time.perf_counter())
        return [
            self.build(chat, AskedQuestion(chat.question, options.mode, "chat", times=times))
            for chat in chats
        ]

    def build(self, chat: RenderedChat, question: AskedQuestion) -> TokenPrompt:
        """Build the prompt of one conversation. Leases and computes nothing."""
        mode, encoding = question.mode, question.mode.encoding
        read = [] if encoding is None else chat.found
        layout = PromptLayout(self.encoder.preamble_ids)
        groups = lay_out_chat(
            layout, replace(chat, found=read), self.tokens.of([each.module for each in read]),
            self.tokenizer, mode,
            lambda start, length: self.encoder.fits_at(start, length, encoding),
        )  # fmt: skip
        found = [each.module for each in chat.found]
        cited = [Citation.of(module, 1.0) for module in found]
        states = None
        if layout.spans and encoding is not None:
            states = ModuleStates(self.encoder, self.catalog, tuple(layout.groups), encoding)
        citations = zip(cited, groups or [None] * len(cited), strict=True)
        return replace(
            layout.prompt(), states=states, question=question,
            retrieved=Retrieved(tuple(found), tuple(citations)),
            without_documents=lambda: tuple(self._without_modules(chat)),
        )  # fmt: skip

    def _without_modules(self, chat: RenderedChat) -> Iterator[int]:
        """Yield the tokens of a conversation without the modules in it."""
        done = 0
        yield from chat.lead
        for begin, end in (*((each.begin, each.end) for each in chat.found), (None, None)):
            yield from self.tokenizer.encode(chat.text[done:begin], first=done == 0)
            done = end or 0

    def _render(self, conversation: Conversation, options: ChatCall) -> RenderedChat:
        """Raises `InvalidRequest` or `UnsupportedModel`."""
        if isinstance(conversation, str):
            if options.tools:
                raise InvalidRequest("a plain text has no place for tools; give messages")
            if options.template_kwargs:
                raise InvalidRequest("a plain text has no chat template; give messages")
            text, lead = self.template.plain(conversation), self.template.lead
            return RenderedChat(conversation, text, self._find(text, options), lead)
        text = self.template.render_chat(conversation, options.tools, options.template_kwargs)
        users = (str(m["content"]) for m in reversed(conversation) if m["role"] == "user")
        return RenderedChat(next(users, ""), text, self._find(text, options))

    def _find(self, text: str, options: ChatCall) -> list[RecognizedModule]:
        """A module that holds private characters is left out: one could be a mark."""
        found = self.recognizer.find(text) if options.recognize else []
        return [each for each in found if not find_mark(each.module.text)]


def lay_out_chat(
    layout: PromptLayout, chat: RenderedChat, tokens: Sequence[tuple[int, ...]],
    tokenizer: InContextTokenizer, mode: ReuseMode, fits_at: FitsAt,
) -> list[int | None]:  # fmt: skip
    """Lays a conversation out; returns the group of each module, None where all is computed.

    tokens: of each module. The text between modules is tokenized on its own.
    """
    groups: list[int | None] = []
    done = 0
    layout.compute(chat.lead)
    for each, ids in zip(chat.found, tokens, strict=True):
        layout.compute(tokenizer.encode(chat.text[done : each.begin], first=done == 0))
        here = chat.text[each.begin : each.end]
        agreed = tokenizer.agreement(here, ids, whole=each.whole, first=each.begin == 0)
        groups.append(_place(layout, each.module.id, ids, agreed, mode, fits_at))
        done = each.end
    layout.compute(tokenizer.encode(chat.text[done:], first=done == 0))
    layout.close()
    return groups


def _place(
    layout: PromptLayout, module: int, token_ids: tuple[int, ...], agreed: Agreement,
    mode: ReuseMode, fits_at: FitsAt,
) -> int | None:  # fmt: skip
    """Continues with a module. One whose states cannot be read from here on is computed whole."""
    layout.compute(agreed.before)
    start = layout.length - agreed.begin
    begin = agreed.begin + mode.leading_tokens(agreed.end - agreed.begin)
    if agreed.end - begin < MIN_READ_TOKENS or not fits_at(start, len(token_ids)):
        begin = agreed.end
    layout.compute(token_ids[agreed.begin : begin])
    group = None
    if begin < agreed.end:
        group = layout.add(ModuleGroup((module,), token_ids, start))
        layout.read(group, begin, agreed.end)
    layout.compute(agreed.after)
    return group


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens begin:end of a module, which are tokens of a text too."""

    before: tuple[int, ...]
    """Tokens of the text before the shared run."""
    begin: int
    end: int
    after: tuple[int, ...]
    """Tokens of the text after the shared run."""


class InContextTokenizer:
    """Tokenizes parts of a prompt so that their tokens, one after the other, are the prompt's."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._model = template, template.model
        self._encode_short = lru_cache(1024)(template.encode)

    def encode(self, text: str, *, first: bool) -> Sequence[int]:
        """Tokens of a text with marks (see `ChatTemplate`). first: it begins the prompt. Short ones
        are remembered: what stands between modules is mostly the same."""
        encode = self._encode_short if len(text) <= _SHORT else self._template.encode
        return encode(text, first=first)

    def agreement(
        self, text: str, token_ids: Sequence[int], *, whole: bool, first: bool
    ) -> Agreement:
        """The longest run of a module's tokens that its text has here too.

        whole: the text is the module's own; else it lacks outer whitespace. States of a run that
        is cut off at the end are what they would be without the rest: no token sees those after it.
        """
        if whole and not (first and self._model.prompt_tokenizer.prefixes):
            return Agreement((), 0, len(token_ids), ())
        here = self._model.encode_untrusted(text, first=first)
        best = (0, 0, 0)  # length, and where it begins in the module and here
        for begin, at in sorted(product(range(_EDGE), repeat=2), key=sum):
            best = max(best, (_common(token_ids[begin:], here[at:]), begin, at), key=lambda b: b[0])
            if best[0] >= min(len(token_ids), len(here)) - sum(best[1:]):
                break
        length, begin, at = best
        return Agreement(tuple(here[:at]), begin, begin + length, tuple(here[at + length :]))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two runs begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
