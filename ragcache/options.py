"""Keyword options of the methods of `RagCache`, with their defaults."""

# No `from __future__ import annotations`: `Required` is read when the classes are made.
from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

from ragcache.modes import ReuseMode
from ragcache.params import GenerationParams, SearchKind
from ragcache.pipeline.ingest import Preparing, Progress
from ragcache.retrieval import Filters, Selection


class IngestOptions(TypedDict, total=False):
    """Options of `ingest` and `sync`.

    Attributes:
        include: Patterns as in a `.gitignore`, such as `*.pdf` or `guide/`: only files of folders
            that match one are ingested, whatever their suffix. All of a known type by default.
        exclude: Patterns of files and folders that are left out. None by default.
        strict: Whether a file that cannot be read is an error; otherwise, the default, it is
            skipped.
        progress: Called as `progress(done, total)` with numbers of modules that are encoded.
        preparing: Called as `preparing(stage, done, total)` before: `reading` in bytes of files,
            `splitting` in characters.
    """

    include: Sequence[str]
    exclude: Sequence[str]
    strict: bool
    progress: Progress | None
    preparing: Preparing | None


class SearchOptions(TypedDict, total=False):
    """Options of `retrieve` and `aretrieve`: the collection, and those of `SearchParams`."""

    collection: Required[str]
    k: int
    search: SearchKind
    filters: Filters | None
    threshold: float | None
    relative_threshold: float
    rerank: int
    mmr: float | None
    candidates: int


class AskOptions(SearchOptions, total=False):
    """Options of `ask` and its variants: those of `SearchParams`, and these.

    Attributes:
        collection: The collection to retrieve from. Required.
        mode: How the modules' states were encoded. `rooted` (default): after the preamble;
            `linked:N`: likewise, but the first N tokens of each module are computed in context;
            `blend:R`: likewise, but the R percent of their tokens that it changes most;
            `isolated`: without the preamble; `exact`: no states are reused.
        generation: How the answer is generated; one greedy answer by default, which the embedded
            reader quotes from the documents (`GenerationParams.extractive`).
        chat_template_kwargs: Variables of the model's chat template, such as
            `{"enable_thinking": False}`, before those of `RagCache.open`. Where they change what
            comes before the documents, states are encoded under keys of their own.
        selection: What to answer from, as `retrieve` returned it for this collection, in place of
            searching again; options of the search are then ignored. For one question.
    """

    mode: str | ReuseMode
    generation: GenerationParams
    selection: Selection | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(TypedDict, total=False):
    """Options of `chat` and its variants.

    Attributes:
        mode: How recognized modules' states were encoded: `rooted` (default), `linked:N`,
            `blend:R` or `isolated`, as in `AskOptions`. In a chat the modules follow another
            beginning, so the answer may differ from that of `exact`, which computes everything.
        recognize: Whether texts of ingested modules in the prompt are read from their kept states,
            from any collection; True by default. A text may lack the module's outer whitespace but
            must otherwise be equal; texts under 32 characters are not searched for.
        tools: JSON descriptions of functions, as Hugging Face's chat templates take them; None by
            default.
        generation: How the answer is generated; one greedy answer by default.
        chat_template_kwargs: Variables of the model's chat template, as in `AskOptions`.
    """

    mode: str | ReuseMode
    recognize: bool
    tools: Sequence[Mapping[str, Any]] | None
    generation: GenerationParams
    chat_template_kwargs: Mapping[str, Any] | None


class PromptOptions(TypedDict, total=False):
    """Options of `prompt` and its variants.

    Attributes:
        mode: `isolated` (default): the schema's states are read; `exact`: everything is computed.
        source: A file name, for errors; `<string>` by default.
        generation: How the answer is generated; one greedy answer by default.
    """

    mode: str | ReuseMode
    source: str
    generation: GenerationParams
