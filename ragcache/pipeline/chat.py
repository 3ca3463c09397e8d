"""Chats: render the conversation, recognize modules in its text, and build a prompt.

With a collection, retrieved modules are put before the user's last message, and recognized there.
So are all modules of documents that the caller gives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import product
from typing import Any, TypeGuard, cast

from ragcache.db import Catalog, CollectionVersion, ModuleRow
from ragcache.documents import SourceDocument, split_document
from ragcache.engine.request import check_tokens
from ragcache.errors import EmptyQuestion, InvalidRequest
from ragcache.models import LoadedModel
from ragcache.modes import AFTER_PREAMBLE, ROOTED, ReuseMode
from ragcache.params import SearchParams
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.ask import is_small_talk, readable
from ragcache.pipeline.chat_template import (
    MARK,
    ChatTemplate,
    Message,
    check_messages,
    find_mark,
)
from ragcache.pipeline.companions import Companions
from ragcache.pipeline.history import HistoryReads
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens
from ragcache.pipeline.observed import ObservedModules
from ragcache.pipeline.prompt import (
    AskedQuestion,
    ModuleGroup,
    ModuleStates,
    PromptLayout,
    Retrieved,
    TokenPrompt,
)
from ragcache.recognition import NO_DOCUMENT, RecognizedModule, Recognizer
from ragcache.retrieval import Hit, Retriever, Selection
from ragcache.retrieval.follow_ups import search_query, without_notes

Conversation = Sequence[Message] | str | Sequence[int]
"""Messages, or a plain text or token ids to continue, which take no chat template."""

TURN_SECONDS = 0.05
"""Longest wait of a thread for its turn to prepare prompts."""

MIN_READ_TOKENS = 8
"""Fewest tokens of a module that are read. Fewer are computed."""

FitsAt = Callable[[int, int], bool]
"""Tells whether a module's states can be read at a position: `fits_at(start, length)`."""

_SHORT = 1024
"""Most characters of a text whose tokens are remembered."""
_EDGE = 3
"""Tokens at the front of a text that may differ with the text before it."""


@dataclass(frozen=True, slots=True)
class DocumentSearch:
    """The search for the documents that a conversation is answered from."""

    collection: str
    params: SearchParams = SearchParams()
    selection: Selection | None = None
    """Modules that were retrieved already. Skips the search."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Options that the conversations of one call share."""

    mode: ReuseMode = ROOTED
    recognize: bool = True
    recognize_recurring: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    search: DocumentSearch | None = None
    """Without a search, a conversation is answered as it is."""
    keep: Mapping[str, float] = field(default_factory=dict)
    """Texts that are modules at once, and the seconds for which they are kept."""
    keeper: Keeper = Keeper()
    """The caller that keeps them, and its conversation."""
    resumable: bool = True
    """Whether the prompts may start from kept states of earlier turns."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as one text, and the modules found in it."""

    question: str
    """The user's last message."""
    text: str
    """The text, with marks for control tokens (`ChatTemplate`)."""
    found: Sequence[RecognizedModule] = ()
    """Modules in the text, in order."""
    lead: Sequence[int] = ()
    """Tokens before the text."""
    selection: Selection | None = None
    """The documents that were put before the user's last message."""
    history: int = 0
    """End of the model's last message in the text."""


class PreparationTurns:
    """Turns of threads that prepare prompts, one at a time.

    The engine's thread waits for the interpreter until a thread that runs gives it up, for 5 ms if
    it computes. Threads that prepare prompts at once would let it wait for each of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a turn, but no longer than `TURN_SECONDS`: another thread may wait for I/O."""
        taken = self._lock.acquire(timeout=TURN_SECONDS)
        try:
            yield
        finally:
            if taken:
                self._lock.release()


@dataclass(frozen=True, slots=True)
class ChatPipeline:
    """Builds the prompts of chats.

    Texts of ingested modules that occur in a conversation are read from the modules' kept states.
    The states were encoded after another beginning: a collection's preamble, or none.
    """

    template: ChatTemplate
    tokenizer: InContextTokenizer
    recognizer: Recognizer
    catalog: Catalog
    encoder: ModuleEncoder
    tokens: ModuleTokens
    retriever: Retriever
    observed: ObservedModules
    companions: Companions
    history: HistoryReads | None = None
    """Places at which chats have read observed modules. Without it every module is read."""
    turns: PreparationTurns = field(default_factory=PreparationTurns)
    """Turns of the threads that prepare prompts."""

    def prepare_prompts(
        self, conversations: Sequence[Conversation], options: ChatCall
    ) -> list[TokenPrompt]:
        """Build the prompt of each conversation.

        Raises:
            InvalidRequest: A conversation is malformed, or an option does not suit it.
            EmptyQuestion: Documents are searched for, and the user's last message is blank.
            UnknownCollection: There is no such collection.
        """
        called = time.perf_counter()
        with self.turns.take() if options.search is None else nullcontext():
            return self._prepare(conversations, options, called)

    def _prepare(
        self, conversations: Sequence[Conversation], options: ChatCall, called: float
    ) -> list[TokenPrompt]:
        search = options.search
        for text, seconds in options.keep.items():
            self.observed.keep(text, seconds, self._mode([], options), options.keeper)
        if search is None:
            chats = [self._render(each, options) for each in conversations]
        else:
            chats = [self._render_with_documents(each, options, search) for each in conversations]
        reranking = sum(each.selection.rerank_seconds for each in chats if each.selection)
        times = Timestamps(called, time.perf_counter(), rerank=reranking)
        collection = "" if search is None else search.collection
        asked = [(each.question, self._mode(each.found, options)) for each in chats]
        questions = [
            AskedQuestion(text, mode, "chat", collection, times, keeper=options.keeper)
            for text, mode in asked
        ]
        choose = self._build_least if options.resumable else self.build
        return [choose(*each) for each in zip(chats, questions, strict=True)]

    def _build_least(self, chat: RenderedChat, question: AskedQuestion) -> TokenPrompt:
        """Build the prompt that computes the fewest tokens, with the kept states of its history."""
        if self.history is None or all(each.ingested for each in chat.found):
            return self.build(chat, question)
        return self.history.choose(
            chat.text,
            chat.history,
            chat.found,
            lambda found: self.build(replace(chat, found=found), question),
        )

    def build(self, chat: RenderedChat, question: AskedQuestion) -> TokenPrompt:
        """Build the prompt of one conversation. Leases and computes nothing."""
        mode, encoding = question.mode, question.mode.encoding
        read = [] if encoding is None else chat.found
        encoder = self.encoder
        if chat.selection is not None:  # the states that questions to the collection read
            encoder = encoder.with_texts(chat.selection.version.texts)
        layout = PromptLayout(encoder.preamble_ids, divides=encoder.model.causal.divides)
        groups = lay_out_chat(
            layout,
            chat if encoding else replace(chat, found=read),
            self._tokens_of([each.module for each in read]),
            self.tokenizer,
            mode,
            lambda start, length: encoder.fits_at(start, length, encoding),
        )
        placed = zip(chat.found, groups or [None] * len(chat.found), strict=True)
        read_as = [(Hit(each.module, 1.0), group) for each, group in placed if each.ingested]
        if chat.selection is not None:
            read_as = _searched_first(chat.selection.hits, read_as)
        states = None
        if layout.spans:
            kept = tuple(layout.groups)
            if chat.selection is not None and chat.selection.version.similar:
                kept = self.companions.place(question.collection, chat.selection.version, kept)
            states = ModuleStates(encoder, self.catalog, kept)
        citations = tuple((Citation.of(hit), group) for hit, group in read_as)
        return replace(
            layout.prompt(),
            states=states,
            question=question,
            retrieved=Retrieved(tuple(hit.module for hit, _ in read_as), citations, chat.selection),
            without_documents=lambda: tuple(self._without_modules(chat)),
        )

    def _without_modules(self, chat: RenderedChat) -> Iterator[int]:
        """Yield the tokens of a conversation without the modules in it."""
        done = 0
        yield from chat.lead
        ingested = ((each.begin, each.end) for each in chat.found if each.ingested)
        for begin, end in (*ingested, (None, None)):
            yield from self.tokenizer.encode(chat.text[done:begin], first=done == 0)
            done = end or 0

    def _render(self, conversation: Conversation, options: ChatCall) -> RenderedChat:
        if isinstance(conversation, str) or _are_tokens(conversation):
            if options.tools:
                raise InvalidRequest("a plain text has no place for tools; give messages")
            if options.template_kwargs:
                raise InvalidRequest("a plain text has no chat template; give messages")
            if not isinstance(conversation, str):
                tokens, causal = [*conversation], self.template.model.causal
                places = range(len(tokens))
                check_tokens(tokens, places, vocabulary=causal.vocabulary, window=causal.window)
                return RenderedChat(self.template.model.decode(tokens), "", lead=tokens)
            text, lead = self.template.plain(conversation), self.template.lead
            return RenderedChat(conversation, text, self._find(text, options), lead)
        conversation = cast("Sequence[Message]", conversation)
        text = self.template.render_chat(conversation, options.tools, options.template_kwargs)
        users = (str(m["content"]) for m in reversed(conversation) if m["role"] == "user")
        history = _history_end(conversation, text)
        return RenderedChat(next(users, ""), text, self._find(text, options), history=history)

    def _render_with_documents(
        self, conversation: Conversation, options: ChatCall, search: DocumentSearch
    ) -> RenderedChat:
        """Render a conversation with the instruction and documents in the user's last message.

        The documents do not move while the model calls tools, so that their states stay where they
        are. The embedded reader was trained on single questions: without tools, it gets the last
        question alone.

        Without documents, a conversation has no `selection` if the model may answer it anyway:
        with tools, and small talk with a model that can chat.
        """
        if isinstance(conversation, str) or _are_tokens(conversation):
            raise InvalidRequest("a plain text has no place for documents; give messages")
        messages = check_messages(cast("Sequence[Message]", conversation))
        place, question = _last_question(messages)
        selection = self._select(messages, question, search)
        tools, extractive = _has_tools(messages, options), self.encoder.model.extractive
        if extractive and not tools:
            messages, place = [{**messages[place], "content": question}], 0
        chats = is_small_talk(question) and not extractive
        if not selection.hits and (chats or tools):
            return self._render(messages, options)
        if selection.hits:
            content = self._over_documents(selection, str(messages[place]["content"]))
            messages[place] = {**messages[place], "content": content}
        chat = self._render(messages, options)
        return replace(chat, question=question, selection=replace(selection, query=question))

    def _select(
        self, messages: Sequence[Message], question: str, search: DocumentSearch
    ) -> Selection:
        """Return the documents for a question. Small talk has none."""
        selection = search.selection
        if selection is None:
            query = search_query(messages)
            selection = self.retriever.retrieve(query, search.collection, search.params)
        selection = readable(selection, self.encoder.model)
        return replace(selection, hits=()) if is_small_talk(question) else selection

    def _over_documents(self, selection: Selection, content: str) -> str:
        """Return a message with the instruction and the documents before it."""
        frame = self.encoder.frame
        instruction = selection.version.instruction or frame.instruction
        documents = "".join(hit.module.text for hit in selection.hits)
        return f"{instruction}\n\n{documents}{frame.question}{content}"

    def _find(self, text: str, options: ChatCall) -> list[RecognizedModule]:
        """Find the modules in a text.

        Skips modules with private characters: the text may hold a control token's mark there.
        """
        if not options.recognize:
            return []
        found = self.recognizer.find(text)
        found = [each for each in found if not find_mark(each.module.text)]
        if not options.recognize_recurring:
            return found
        return self.observed.find(text, found, self._mode(found, options))

    def _mode(self, found: Sequence[RecognizedModule], options: ChatCall) -> ReuseMode:
        """Return the mode in which a chat reads the modules in it."""
        ingested = any(each.ingested for each in found)
        return options.mode if ingested else self.observed.mode_for(options.mode)

    def _tokens_of(self, modules: Sequence[ModuleRow]) -> list[tuple[int, ...]]:
        """Return the tokens of ingested and observed modules."""
        ingested = iter(self.tokens.of([each for each in modules if each.id != NO_DOCUMENT]))
        return [
            self.observed.tokens_of(each) if each.id == NO_DOCUMENT else next(ingested)
            for each in modules
        ]


def select_given(
    documents: Sequence[SourceDocument], model: LoadedModel, module_tokens: int | str
) -> Selection:
    """Return all modules of documents that come with a conversation, in their order.

    The modules have no rows. Their ids are negative digests, so that equal modules have equal ids.

    Args:
        documents: The documents. Blank ones have no module.
        model: The model, whose tokens are counted.
        module_tokens: Most tokens of a module. See `OpenConfig.module_tokens`.
    """
    hits, limit = [], model.causal.module_limit(module_tokens)
    for document in documents:
        for number, each in enumerate(
            split_document(document, limit, model.encode_untrusted), start=1
        ):
            name = f"{document.id}#{number}"
            digest = sha256(repr((name, document.uri, each.text, each.places)).encode("utf-8"))
            row = ModuleRow(
                NO_DOCUMENT - 1 - int.from_bytes(digest.digest()[:7]),
                name,
                document.id,
                document.uri,
                each.text,
                document.metadata,
                each.metadata,
                each.places,
            )
            hits.append(Hit(row, 1.0))
    return Selection("", tuple(hits), CollectionVersion(0, 0))


def kept_modules(
    keep: Mapping[str, float], documents: Sequence[SourceDocument], selection: Selection
) -> dict[str, float]:
    """Return the texts to keep, with the modules of documents in place of whole documents.

    Args:
        keep: Texts, and the seconds for which they are kept.
        documents: Documents that come with the conversation.
        selection: Their modules.
    """
    whole = {each.id: keep[each.text] for each in documents if each.text in keep}
    texts = {each.text for each in documents}
    modules = [hit.module for hit in selection.hits if hit.module.document in whole]
    kept = {text: seconds for text, seconds in keep.items() if text not in texts}
    return kept | {each.text: whole[each.document] for each in modules}


def _searched_first(
    hits: Sequence[Hit], found: Sequence[tuple[Hit, int | None]]
) -> list[tuple[Hit, int | None]]:
    """Return the hits of a search with their groups, then the other modules of a conversation."""
    groups = {hit.module.text: group for hit, group in found}
    searched = {hit.module.text for hit in hits}
    first = [(hit, groups.get(hit.module.text)) for hit in hits]
    return first + [each for each in found if each[0].module.text not in searched]


def _last_question(messages: Sequence[Message]) -> tuple[int, str]:
    """Return the place of the user's last message, and its text without notes of a client.

    Raises `EmptyQuestion` if there is none.
    """
    asked = [place for place, each in enumerate(messages) if each["role"] == "user"]
    content = str(messages[asked[-1]]["content"]) if asked else ""
    question = without_notes(content) or content
    if not question.strip():
        raise EmptyQuestion(
            "no message of the user asks a question that documents could answer; write one"
        )
    return asked[-1], question


def _has_tools(messages: Sequence[Message], options: ChatCall) -> bool:
    """Tell whether the model may call tools, or has called them."""
    return bool(options.tools) or any(
        each["role"] == "tool" or each.get("tool_calls") for each in messages
    )


def _history_end(messages: Sequence[Message], text: str) -> int:
    """Return the end of the history of a chat in its text: the last message of the model.

    A message without a text, such as a call of a tool, ends with the message before it.
    """
    answered = False
    for each in reversed(messages):
        answered = answered or each["role"] == "assistant"
        content = str(each.get("content") or "").strip()
        if answered and content:
            at = text.rfind(content)
            return at + len(content) if at >= 0 else 0
    return 0


def _are_tokens(conversation: Sequence[Message] | Sequence[int]) -> TypeGuard[Sequence[int]]:
    return bool(conversation) and all(type(each) is int for each in conversation)


def lay_out_chat(
    layout: PromptLayout,
    chat: RenderedChat,
    tokens: Sequence[tuple[int, ...]],
    tokenizer: InContextTokenizer,
    mode: ReuseMode,
    fits_at: FitsAt,
) -> list[int | None]:
    """Lay out a conversation. The text between modules is tokenized on its own.

    Args:
        layout: The layout to fill.
        chat: The conversation.
        tokens: Tokens of each module that was found.
        tokenizer: Tokenizer of the text between modules.
        mode: The mode of reuse.
        fits_at: Tells whether states can be read at a position.

    Returns:
        The group of each module, without one for a module that is computed as a whole.
    """
    groups: list[int | None] = []
    done = 0
    layout.compute(chat.lead)
    for number, (each, ids) in enumerate(zip(chat.found, tokens, strict=True)):
        layout.compute(tokenizer.encode(chat.text[done : each.begin], first=done == 0))
        here = chat.text[each.begin : each.end]
        agreed = tokenizer.agreement(here, ids, whole=each.whole, first=each.begin == 0)
        modules = () if each.module.id == NO_DOCUMENT else (each.module.id,)
        start = layout.length + len(agreed.before) - agreed.begin
        group = ModuleGroup(modules, ids, start, mode.encoding_at(number) or AFTER_PREAMBLE)
        groups.append(_place(layout, group, agreed, mode, fits_at))
        done = each.end
    layout.compute(tokenizer.encode(chat.text[done:], first=done == 0))
    layout.close()
    return groups


def _place(
    layout: PromptLayout, module: ModuleGroup, agreed: Agreement, mode: ReuseMode, fits_at: FitsAt
) -> int | None:
    """Continue with a module, and return its group. Without usable states it is computed."""
    token_ids = module.token_ids
    layout.compute(agreed.before)
    begin = agreed.begin + mode.leading_tokens(agreed.end - agreed.begin)
    size = len(token_ids)
    whole = layout.divides or (begin, agreed.end) == (0, size)
    if agreed.end - begin < MIN_READ_TOKENS or not (whole and fits_at(module.start, size)):
        begin = agreed.end
    layout.compute(token_ids[agreed.begin : begin])
    group = None
    if begin < agreed.end:
        group = layout.add(module)
        layout.read(group, begin, agreed.end)
    layout.compute(agreed.after)
    return group


@dataclass(frozen=True, slots=True)
class Agreement:
    """The run begin:end of a module's tokens that occurs in the tokens of a text, too."""

    before: tuple[int, ...]
    """Tokens of the text before the shared run."""
    begin: int
    end: int
    after: tuple[int, ...]
    """Tokens of the text after the shared run."""


class InContextTokenizer:
    """Tokenizes the parts of a prompt so that their tokens join to the tokens of the prompt."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._model = template, template.model
        self._encode_short = lru_cache(2048)(template.encode)

    def encode(self, text: str, *, first: bool) -> Sequence[int]:
        """Return the tokens of a text with marks (see `ChatTemplate`).

        Args:
            text: The text.
            first: Whether the text begins the prompt.
        """
        tokens, parts = list[int](), [text]
        if self._model.prompt_tokenizer.parts:
            parts, first = [*filter(None, MARK.split(text))], False
        for part in parts:  # the earlier turns of a chat are known
            encode = self._encode_short if len(part) <= _SHORT else self._template.encode
            tokens += encode(part, first=first)
        return tokens

    def agreement(
        self, text: str, token_ids: Sequence[int], *, whole: bool, first: bool
    ) -> Agreement:
        """Return the longest run of a module's tokens that its text has in a prompt, too.

        Tokens at the end of the module may be left out: a token does not see later tokens, so the
        states of the others stay the same.

        Args:
            text: The module's text in the prompt.
            token_ids: Tokens of the module.
            whole: Whether the text is exactly the module's. Otherwise it lacks outer whitespace.
            first: Whether the text begins the prompt.
        """
        if whole and not (first and self._model.prompt_tokenizer.prefixes):
            return Agreement((), 0, len(token_ids), ())
        here = self._model.encode_untrusted(text, first=first)
        best = (0, 0, 0)  # length of the run, and its begin in the module and in the text
        for begin, at in sorted(product(range(_EDGE), repeat=2), key=sum):
            best = max(best, (_common(token_ids[begin:], here[at:]), begin, at), key=lambda b: b[0])
            if best[0] >= min(len(token_ids), len(here)) - sum(best[1:]):
                break
        length, begin, at = best
        return Agreement(tuple(here[:at]), begin, begin + length, tuple(here[at + length :]))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two runs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
