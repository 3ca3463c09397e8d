"""Questions to a collection: retrieve modules, and build the prompt that reads them.

A message of small talk (`is_small_talk`) reads none, although a search finds modules for it, too:
every text that says "hello" shares a word with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from ragcache.answers.confidence import reader_calibration
from ragcache.db import Catalog
from ragcache.errors import EmptyQuestion
from ragcache.models import LoadedModel, PromptFrame
from ragcache.modes import ReuseMode
from ragcache.params import SearchParams
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.chat_template import ChatTemplate, template_kwargs
from ragcache.pipeline.companions import Companions
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, Scaffolds
from ragcache.pipeline.prompt import (
    AskedQuestion,
    ModuleGroup,
    ModuleStates,
    PromptLayout,
    Retrieved,
    TokenPrompt,
)
from ragcache.retrieval import Retriever, Selection
from ragcache.retrieval.bm25 import STOP_WORDS


@dataclass(frozen=True, slots=True)
class AskPipeline:
    """Builds the prompts of questions: preamble, retrieved modules, question."""

    catalog: Catalog
    encoder: ModuleEncoder
    template: ChatTemplate
    tokens: ModuleTokens
    retriever: Retriever
    scaffolds: Scaffolds
    companions: Companions
    today: Callable[[], date] = date.today

    def prepare_prompts(
        self,
        questions: Sequence[str],
        collection: str,
        params: SearchParams,
        mode: ReuseMode,
        template_kwargs: Mapping[str, Any] | None = None,
        selection: Selection | None = None,
    ) -> list[TokenPrompt]:
        """Retrieve modules for each question, and build its prompt.

        Small talk reads no modules, and the embedded reader no more than it was trained on.

        Args:
            questions: The questions.
            collection: The collection to search.
            params: Options of the search.
            mode: The mode of reuse.
            template_kwargs: Variables of the chat template for this call.
            selection: Modules that were retrieved already. Skips the search.

        Raises:
            EmptyQuestion: A question is blank.
            InvalidRequest: An option cannot be used.
            UnknownCollection: There is no such collection.
        """
        called = time.perf_counter()
        kwargs = self._kwargs(template_kwargs)
        for question in questions:
            if not question.strip():
                raise EmptyQuestion("the question is empty; write what you want to know")
        if selection is not None:
            selections = [replace(selection, query=question) for question in questions]
        else:
            selections = [self.retriever.retrieve(q, collection, params) for q in questions]
        selections = [
            replace(each, hits=())
            if is_small_talk(each.query)
            else readable(each, self.encoder.model)
            for each in selections
        ]
        reranking = sum(selection.rerank_seconds for selection in selections)
        times = Timestamps(called, time.perf_counter(), rerank=reranking)
        prompts = []
        for selection in selections:
            self.scaffolds.follow(collection, selection.version)
            encoder = self.encoder.with_texts(selection.version.texts)
            if kwargs is not None:
                encoder = encoder.with_template(kwargs)
            asked = AskedQuestion(selection.query, mode, "question", collection, times)
            prompts.append(self.build(asked, selection, encoder))
        return prompts

    def build(
        self, question: AskedQuestion, selection: Selection, encoder: ModuleEncoder | None = None
    ) -> TokenPrompt:
        """Build the prompt of one question over its selection. Leases and computes nothing.

        encoder: Encoder for this call's template. Defaults to the namespace's encoder.
        """
        mode, encoder = question.mode, encoder or self.encoder
        groups = self._groups(selection, question.collection, encoder)
        layout = PromptLayout(encoder.preamble_ids)
        asked = question_ids(encoder.model, encoder.frame, question.text, self.today)
        lay_out(layout, groups, asked, mode)
        states = None
        if selection.hits and mode.reads_states:
            kept = tuple(layout.groups)
            if selection.version.similar:
                kept = self.companions.place(question.collection, selection.version, kept)
            states = ModuleStates(
                encoder,
                self.catalog,
                kept,
                self.scaffolds,
                question.collection,
            )
        citations = _citations(selection, groups, read=mode.reads_states)
        retrieved = Retrieved(tuple(hit.module for hit in selection.hits), citations, selection)
        return replace(
            layout.prompt(),
            states=states,
            question=question,
            retrieved=retrieved,
            without_documents=lambda: (*encoder.preamble_ids, *asked),
        )

    def _kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return all template variables of a call that sets some."""
        given = template_kwargs(self.encoder.model.tokenizer, kwargs) if kwargs else None
        return self.template.kwargs | given if given else None

    def _groups(
        self, selection: Selection, collection: str, encoder: ModuleEncoder
    ) -> list[ModuleGroup]:
        """Return the selected modules in order, with the modules of a scaffold in one group."""
        tokens = self.tokens.of([hit.module for hit in selection.hits])
        ids = [hit.module.id for hit in selection.hits]
        groups: list[ModuleGroup] = []
        start = len(encoder.preamble_ids)
        for begin, end in self.scaffolds.runs(collection, ids):
            token_ids = tuple(token for each in tokens[begin:end] for token in each)
            groups.append(ModuleGroup(tuple(ids[begin:end]), token_ids, start))
            start += len(token_ids)
        return groups


def question_ids(
    model: LoadedModel, frame: PromptFrame, query: str, today: Callable[[], date] = date.today
) -> list[int]:
    """Return the tokens of a question with the template's text around it.

    The text is tokenized as a whole, so that the tokens are the same as in the whole prompt.
    """
    tokenizer, lead = model.prompt_tokenizer, frame.question
    if frame.dated:  # the preamble names a fixed day, so that its states can be kept
        lead = f"Today's date is {today().isoformat()}.\n{lead}"
    spelled = tokenizer.spell(lead), query.strip(), tokenizer.spell(frame.epilogue)
    return tokenizer.encode("".join(spelled))


def lay_out(
    layout: PromptLayout, groups: Sequence[ModuleGroup], question: Sequence[int], mode: ReuseMode
) -> None:
    """Lay out a prompt in a mode: the preamble, the groups, the tokens of the question."""
    preamble = layout.groups[0].token_ids
    if mode.reads_states:
        layout.read(0, 0, len(preamble))
    else:
        layout.compute(preamble)
    for number, group in enumerate(groups):
        size = len(group.token_ids)
        count = mode.leading_tokens(size, follows_preamble=number == 0)
        layout.compute(group.token_ids[:count])
        if encoding := mode.encoding_at(number):
            layout.read(layout.add(replace(group, encoding=encoding)), count, size)
    layout.recomputed = len(layout.own)
    layout.compute(question)


def _citations(
    selection: Selection, groups: Sequence[ModuleGroup], *, read: bool
) -> tuple[tuple[Citation, int | None], ...]:
    hits = iter(selection.hits)
    sources: list[tuple[Citation, int | None]] = []
    for number, group in enumerate(groups, start=1):
        members = [next(hits) for _ in group.modules]
        single = not read or len(members) == 1
        scaffold = "" if single else " ".join(hit.module.name for hit in members)
        for hit in members:
            sources.append((Citation.of(hit, scaffold), number if read else None))
    return tuple(sources)


_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LONGEST = 80
"""Most characters of small talk. Longer messages are not looked at."""

_COURTESIES = frozenset(
    # English
    "hello hi hey hiya howdy greetings thanks thank thx cheers bye goodbye welcome "
    # German, French, Spanish, Portuguese, Italian, Dutch
    "hallo servus moin danke tschüss bonjour salut bonsoir merci revoir hola gracias adiós adios "
    "olá ola obrigado obrigada tchau ciao buongiorno buonasera salve grazie arrivederci bedankt "
    # Russian, Turkish, Arabic, Chinese, Japanese, Korean
    "привет здравствуйте спасибо пока merhaba selam teşekkürler مرحبا شكرا "
    "你好 您好 你们好 嗨 谢谢 多谢 再见 "
    "こんにちは こんばんは おはよう ありがとう ありがとうございます "
    "안녕 안녕하세요 감사합니다".split()
)
"""Words that greet, thank or part."""
_FILLERS = STOP_WORDS | frozenset(
    "again all day dear everyone everybody folks friend friends good great lot much night nice ok "
    "okay please really see so team there very well world "
    "beaucoup buenas buenos bom boa dia dias días noches tardes tarde muchas muito vielen dank "
    "guten gute morgen tag abend nacht auf wiedersehen au le la à tout le monde et mille".split()
)
"""Words that stand beside courtesies, and ask nothing by themselves."""
_PHRASES = re.compile(
    r"(?:good|guten?|buenos|buenas|bom|boa) (?:morning|afternoon|evening|day|night|morgen|tag|"
    r"abend|nacht|d[ií]as?|tardes?|noches|noite)|"
    r"how are (?:you|things)(?: doing)?(?: today)?|how's it going|what's up|"
    r"how do you do|nice to meet you|vielen dank|auf wiedersehen|wie geht's|"
    r"wie geht es (?:dir|ihnen)|comment ça va|ça va|qué tal|cómo estás|come stai|"
    r"see you(?: later| soon)?"
)
_COURTEOUS = "courteous"


def readable(selection: Selection, model: LoadedModel) -> Selection:
    """Return a search result without the modules that are too many for the embedded reader."""
    return replace(selection, hits=selection.hits[: most_modules(model)])


def most_modules(model: LoadedModel) -> int | None:
    """Return the number of modules that a model reads at most, or None without a limit."""
    calibration = reader_calibration() if model.extractive else None
    return None if calibration is None else calibration.most_modules


def is_small_talk(message: str) -> bool:
    """Tell whether a message greets, thanks or parts, and says nothing else.

    Args:
        message: The user's message or question.

    Example:
        >>> is_small_talk("Good morning! How are you?")
        True
        >>> is_small_talk("Hello, where does the key hang?")
        False
    """
    if len(message) > _LONGEST:
        return False
    words = _WORD.findall(message.casefold().replace("’", "'"))
    rest = _PHRASES.sub(_COURTEOUS, " ".join(words)).split()
    courteous = [each == _COURTEOUS or each in _COURTESIES for each in rest]
    known = all(polite or each in _FILLERS for polite, each in zip(courteous, rest, strict=True))
    return any(courteous) and known
