"""Conversations: render, recognize, lease, place, submit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ragcache.config import linked_tokens
from ragcache.engine import Context, Request
from ragcache.errors import InvalidRequest
from ragcache.pipeline.answer import Marks, Ready, Source
from ragcache.pipeline.asked import Asked, give_up
from ragcache.pipeline.chat_text import ChatText, Message
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.inside import InsideText
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens
from ragcache.pipeline.script import Script, write_script
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import MARK
from ragcache.recognition import Found, Recognizer
from ragcache.store import Catalogue, Lease

Conversation = Sequence[Message] | str
"""Messages, or a text that is continued as it stands, without a template."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What the conversations of a call have in common."""

    mode: str = "rooted"
    recognize: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def encoded(self) -> str:
        """How the modules that are read were encoded."""
        return "isolated" if self.mode == "isolated" else "rooted"


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A conversation in tokens, which fit the window. found: the modules in it; those of the script
    are read or, `exact`, none."""

    question: str
    found: list[Found]
    script: Script
    draft: Request
    recognized_at: float


@dataclass(frozen=True, slots=True)
class ChatRunner:
    """Submits conversations.

    Module texts of the catalogue that stand in them become segments of the modules' kept states,
    which were encoded after the preamble of the collections' prompts, or alone, and stand here
    after another beginning.
    """

    text: ChatText
    inside: InsideText
    recognizer: Recognizer
    catalogue: Catalogue
    encoder: ModuleEncoder
    tokens: ModuleTokens
    submitter: Submitter

    def start(
        self, conversations: Sequence[Conversation], options: ChatCall, generation: Generation
    ) -> list[Asked]:
        """Renders, leases and submits each conversation, in order. Raises `InvalidRequest`,
        `UnsupportedModel` or `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        spelled = [self._spell(each, options, generation) for each in conversations]
        asked: list[Asked] = []
        try:
            for each in spelled:
                asked.append(self._submit(each, options, called))
        except BaseException:
            give_up(asked)
            raise
        return asked

    def _spell(
        self, conversation: Conversation, options: ChatCall, generation: Generation
    ) -> _Spelled:
        """Raises `InvalidRequest`, `UnsupportedModel` or `PromptTooLong`."""
        plain = isinstance(conversation, str)
        if plain and options.tools:
            raise InvalidRequest("a plain text has no place for tools; give messages")
        text = (
            self.text.plain(conversation)
            if isinstance(conversation, str)
            else self.text.render(conversation, options.tools)
        )
        found = self._found(text) if options.recognize else []
        recognized = time.perf_counter()
        exact = options.mode == "exact"
        read = [] if exact else found
        script = write_script(
            text,
            read,
            self.tokens.of([each.module for each in read]),
            self.inside,
            lead=self.text.lead if plain else (),
            linked=linked_tokens(options.mode),
            may_stand=lambda at, n: self.encoder.may_stand(at, n, options.encoded),
        )
        own = len(script.own)
        draft = self.submitter.draft(own, script.length - own, generation, reuse=not exact)
        if script.read:
            self._announce(script, options)
        return _Spelled(_question(conversation), found, script, draft, recognized)

    def _found(self, text: str) -> list[Found]:
        """A module that holds private characters is left out: one could be a mark."""
        found = self.recognizer.find(text)
        return [each for each in found if not MARK.search(text, each.begin, each.end)]

    def _announce(self, script: Script, options: ChatCall) -> None:
        """Begins to bring the states of these modules."""
        starts = [reading.first for reading in script.read]
        self.encoder.prefetch([r.token_ids for r in script.read], options.encoded, starts)

    def _submit(self, spelled: _Spelled, options: ChatCall, called: float) -> Asked:
        script = spelled.script
        if not script.read:
            context = script.context((), ())
            ready = _ready(spelled, "exact", called, context)
            return self.submitter.submit(spelled.draft, context, ready, None)
        with ExitStack() as undo:
            lease = self.encoder.lease(
                [reading.token_ids for reading in script.read],
                options.encoded,
                starts=[reading.first for reading in script.read],
            )
            undo.callback(lease.release)
            for reading, key in zip(script.read, lease.keys[1:], strict=True):
                if lease.source[key] == "encoded":
                    self.catalogue.claim(reading.module.id, key)
            context = script.context(lease.keys[1:], lease.states[1:])
            ready = _ready(spelled, f"recognized:{options.mode}", called, context, lease)
            asked = self.submitter.submit(spelled.draft, context, ready, lease)
            undo.pop_all()
        return asked


def _question(conversation: Conversation) -> str:
    """What the user said last."""
    if isinstance(conversation, str):
        return conversation
    asked = (str(m["content"]) for m in reversed(conversation) if m["role"] == "user")
    return next(asked, "")


def _ready(
    spelled: _Spelled, mode: str, called: float, context: Context, lease: Lease | None = None
) -> Ready:
    tiers = _tiers(spelled, lease)
    lengths = [reading.length for reading in spelled.script.readings] or [0] * len(tiers)
    tokens: Counter[str] = Counter()
    for length, tier in zip(lengths, tiers, strict=True):
        if length:
            tokens[tier] += length
    return Ready(
        question=spelled.question,
        sources=tuple(
            Source(each.module.document, each.module.name, each.module.uri, 1.0, tier)
            for each, tier in zip(spelled.found, tiers, strict=True)
        ),
        mode=mode,
        prompt_tokens=context.prompt_tokens,
        cached_tokens=tokens.total() - tokens["encoded"],
        bytes_moved=dict(lease.moved) if lease is not None else {},
        marks=Marks(called, spelled.recognized_at, time.perf_counter()),
        created_tokens=tokens["encoded"],
        kind="chat",
        tokens=tokens,
    )


def _tiers(spelled: _Spelled, lease: Lease | None) -> list[str]:
    """Where the states of each module that was found came from."""
    if lease is None:
        return ["computed"] * len(spelled.found)
    keys = iter(lease.keys[1:])
    return [
        lease.source[next(keys)] if reading.length else "computed"
        for reading in spelled.script.readings
    ]
