"""Keyword options of the methods of `RagCache`, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import InstanceOf, SkipValidation, ValidationInfo, field_validator, model_validator

from ragcache.config import check_texts
from ragcache.documents import FileFilter, SourceDocument
from ragcache.errors import ConfigurationError, RagCacheError
from ragcache.modes import ISOLATED, ReuseMode
from ragcache.params import GenerationParams, Params, SearchParams
from ragcache.pipeline import ChatCall, DocumentSearch
from ragcache.pipeline.ingest import Preparing, Progress
from ragcache.pipeline.keeper import Keeper
from ragcache.retrieval import Selection


class IngestOptions(Params):
    """Options of `ingest` and `sync`.

    Raises:
        ConfigurationError: An option is unknown or has a value that cannot be used.
    """

    error: ClassVar[type[RagCacheError]] = ConfigurationError

    include: Sequence[str] = ()
    """Patterns as in a `.gitignore`, such as `*.pdf` or `guide/`. Only matching files of folders
    are ingested, whatever their suffix. By default, all files of known types."""
    exclude: Sequence[str] = ()
    """Patterns of files and folders to leave out. Empty by default."""
    strict: bool = False
    """Fail if a file cannot be read. By default, the file is skipped."""
    progress: Progress | None = None
    """Called as `progress(done, total)` with numbers of encoded modules. A bar by default in
    notebooks, and nothing elsewhere."""
    preparing: Preparing | None = None
    """Called as `preparing(stage, done, total)` before any module is encoded: `reading` in bytes of
    files, `splitting` in characters."""

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _check_patterns(cls, patterns: Any, info: ValidationInfo) -> Any:
        check_texts(str(info.field_name), patterns)
        return patterns

    @property
    def files(self) -> FileFilter:
        """Selection of the files in folders."""
        return FileFilter(self.include, self.exclude, self.strict)

    def reading(self, done: int, total: int) -> None:
        """Report the bytes of files that are read."""
        if self.preparing is not None:
            self.preparing("reading", done, total)


class SearchOptions(SearchParams):
    """Options of `retrieve`: the collection, and the fields of `SearchParams`."""

    collection: str
    """The collection to search."""


class AskOptions(SearchOptions):
    """Options of `ask`, `ask_batch` and `stream`: the options of `retrieve`, and more."""

    mode: str | ReuseMode | None = None
    """How stored states are read. Defaults to the folder's mode (`OpenConfig.default_mode`).

    `rooted` reads states that were encoded after the preamble. `primed` reads modules after the
    first from states that were encoded behind other text. `rooted:N` and `primed:N` also compute
    the first N tokens of modules after the first in context. `isolated` reads states that were
    encoded without the preamble. `exact` reads no states and computes everything."""
    generation: GenerationParams = GenerationParams()
    """How the answer is generated. Defaults to one greedy answer, which the embedded reader quotes
    from the documents (`GenerationParams.extractive`)."""
    selection: InstanceOf[Selection] | None = None
    """Modules to answer from, as `retrieve` returned them for the same collection. Skips the
    search, and ignores its options. For a single question."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the model's chat template, such as `{"enable_thinking": False}`. They override
    the variables of `RagCache.open`. Variables that change the text before the documents give
    states keys of their own."""


class ChatOptions(SearchParams):
    """Options of `chat`, `chat_batch`, `stream_chat` and `stream_chat_batch`.

    The fields of `SearchParams` need a `collection`."""

    collection: str | None = None
    """A collection to answer from. The modules that it finds for the user's last message, joined
    with what earlier messages asked, are put before that message; all messages and `tools` stay.
    Without tools, the embedded reader gets that message alone. By default nothing is retrieved."""
    selection: InstanceOf[Selection] | None = None
    """Modules to answer from, as `retrieve` returned them for `collection`. Skips the search. For a
    single conversation."""
    documents: Sequence[InstanceOf[SourceDocument]] = ()
    """Documents to answer from, in place of a collection. They are put before the user's last
    message as a whole and cited, but not stored."""
    keep: Mapping[str, float] = {}
    """Texts of the conversation or `documents` that are read from states from now on, each with the
    seconds for which its states are kept. Texts of fewer than 96 tokens are not kept."""
    keeper: InstanceOf[Keeper] = Keeper()
    """The caller that keeps the texts, with its budget. Unlimited by default."""

    mode: str | ReuseMode | None = None
    """How stored states of recognized modules are read, as in `AskOptions`. In a chat, modules
    follow another beginning than the preamble, so that answers may differ from answers in mode
    `exact`."""
    recognize: bool = True
    """Read texts of ingested modules, of any collection, from their stored states. On by default.
    A text may lack the module's outer whitespace but must be equal otherwise. Texts under 32
    characters are not recognized."""
    recognize_recurring: bool = True
    """Read texts that recur in the namespace's prompts from states (`OpenConfig`). On by default.
    Needs `recognize`."""
    tools: Annotated[Sequence[Mapping[str, Any]] | None, SkipValidation] = None
    """JSON descriptions of functions that the model may call, as Hugging Face's chat templates take
    them. A template without a place for tools leaves them out: the model answers in text."""
    generation: GenerationParams = GenerationParams()
    """How the answer is generated. Defaults to one greedy answer."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the model's chat template, as in `AskOptions`."""

    @model_validator(mode="after")
    def _check_collection(self) -> Self:
        if self.collection is not None and self.documents:
            raise ValueError("give either `collection` or `documents` to answer from")
        if self.collection is None and (
            given := sorted(self.model_fields_set & {"selection", *SearchParams.model_fields})
        ):
            raise ValueError(f"{', '.join(given)} search documents; give `collection`, too")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tools and self.generation.extractive:
            raise ValueError(
                "an extractive answer is a quotation and calls no tools; leave out either"
            )
        if self.tools and self.generation.min_confidence:
            raise ValueError(
                "a call of a tool is no answer whose confidence is known; leave out either "
                "min_confidence or tools"
            )
        return self

    def call(self, search: DocumentSearch | None, keep: Mapping[str, float]) -> ChatCall:
        """Return the call of the chat pipeline with these options, in its default mode.

        Args:
            search: The search for the documents to answer from.
            keep: Texts to keep. See `ChatCall.keep`.
        """
        return ChatCall(
            recognize=self.recognize,
            recognize_recurring=self.recognize_recurring,
            tools=self.tools,
            template_kwargs=self.chat_template_kwargs,
            search=search,
            keep=keep if self.recognize and self.recognize_recurring else {},
            keeper=self.keeper,
            resumable=self.generation.share and not self.generation.prompt_logprobs,
        )


class PromptOptions(Params):
    """Options of `prompt` and `stream_prompt`."""

    mode: str | ReuseMode = ISOLATED
    """`isolated` (default) reads the states of the schema. `exact` computes everything."""
    source: str = "<string>"
    """A file name for error messages. Defaults to `<string>`."""
    generation: GenerationParams = GenerationParams()
    """How the answer is generated. Defaults to one greedy answer."""
