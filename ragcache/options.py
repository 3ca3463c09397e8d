"""Keyword options of the methods of `RagCache`, with their defaults."""

# No `from __future__ import annotations`: `Required` is read when the classes are made.
from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

from ragcache.modes import ReuseMode
from ragcache.params import GenerationParams, SearchKind
from ragcache.pipeline.ingest import Preparing, Progress
from ragcache.retrieval import Filters, Selection


class IngestOptions(TypedDict, total=False):
    """Options of `ingest` and `sync`."""

    include: Sequence[str]
    """Patterns as in a `.gitignore`, such as `*.pdf` or `guide/`. Only matching files of folders
    are ingested, whatever their suffix. By default, all files of known types."""
    exclude: Sequence[str]
    """Patterns of files and folders to leave out. Empty by default."""
    strict: bool
    """Fail if a file cannot be read. By default, the file is skipped."""
    progress: Progress | None
    """Called as `progress(done, total)` with numbers of encoded modules."""
    preparing: Preparing | None
    """Called as `preparing(stage, done, total)` before any module is encoded: `reading` in bytes of
    files, `splitting` in characters."""


class SearchFields(TypedDict, total=False):
    """The fields of `SearchParams`."""

    k: int
    search: SearchKind
    filters: Filters | None
    threshold: float | None
    relative_threshold: float
    rerank: int
    mmr: float | None
    candidates: int


class SearchOptions(SearchFields, total=False):
    """Options of `retrieve`: the collection, and the fields of `SearchParams`."""

    collection: Required[str]
    """The collection to search."""


class AskOptions(SearchOptions, total=False):
    """Options of `ask`, `ask_batch` and `stream`: the options of `retrieve`, and more."""

    mode: str | ReuseMode
    """How stored states are read.

    `rooted` (default) reads states that were encoded after the preamble. `linked:N` also
    computes the first N tokens of each module in context, `blend:R` the R percent of the
    modules' tokens that context changes most. `primed` reads modules after the first from
    states that were encoded behind other text; `primed:N` also computes the first N tokens of
    these. `isolated` reads states that were encoded without the preamble. `exact` reads no
    states and computes everything."""
    generation: GenerationParams
    """How the answer is generated. Defaults to one greedy answer, which the embedded reader quotes
    from the documents (`GenerationParams.extractive`)."""
    selection: Selection | None
    """Modules to answer from, as `retrieve` returned them for the same collection. Skips the
    search, and ignores its options. For a single question."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the model's chat template, such as `{"enable_thinking": False}`. They override
    the variables of `RagCache.open`. Variables that change the text before the documents give
    states keys of their own."""


class ChatOptions(SearchFields, total=False):
    """Options of `chat`, `chat_batch`, `stream_chat` and `stream_chat_batch`.

    The fields of `SearchParams` need a `collection`."""

    collection: str | None
    """A collection to answer from. The modules that it finds for the user's last message are put
    before that message; all messages and `tools` stay. By default nothing is retrieved."""
    selection: Selection | None
    """Modules to answer from, as `retrieve` returned them for `collection`. Skips the search. For a
    single conversation."""

    mode: str | ReuseMode
    """How stored states of recognized modules are read, as in `AskOptions`. Defaults to `rooted`.
    In a chat, modules follow another beginning than the preamble, so that answers may differ from
    answers in mode `exact`."""
    recognize: bool
    """Read texts of ingested modules, of any collection, from their stored states. On by default.
    A text may lack the module's outer whitespace but must be equal otherwise. Texts under 32
    characters are not recognized."""
    recognize_recurring: bool
    """Read texts that recur in the namespace's prompts from states (`OpenConfig`). On by default.
    Needs `recognize`."""
    tools: Sequence[Mapping[str, Any]] | None
    """JSON descriptions of functions that the model may call, as Hugging Face's chat templates take
    them. A template without a place for tools leaves them out: the model answers in text."""
    generation: GenerationParams
    """How the answer is generated. Defaults to one greedy answer."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the model's chat template, as in `AskOptions`."""


class PromptOptions(TypedDict, total=False):
    """Options of `prompt` and `stream_prompt`."""

    mode: str | ReuseMode
    """`isolated` (default) reads the states of the schema. `exact` computes everything."""
    source: str
    """A file name for error messages. Defaults to `<string>`."""
    generation: GenerationParams
    """How the answer is generated. Defaults to one greedy answer."""
