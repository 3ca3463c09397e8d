"""Sources of answers in responses: without paths of the server, in the shape that pages show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from ragcache import Answer, Citation
from ragcache.retrieval import Hit

FILE_PREFIX = "file-"
"""Begin of the ids of uploaded files, which are the ids of their documents in vector stores."""
_MARK = re.compile(r"\[(\d+)\]")
_WEB = ("http://", "https://")


class SourceOrigin(BaseModel):
    """The document of a source."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    id: str
    name: str
    """Id of the document. The path of a file below the folder that was ingested."""
    url: str | None = None
    """Address of the document, if it has one on the web."""


class CompletionSource(BaseModel):
    """A module that an answer was read from, in the shape that Open WebUI shows.

    The lists have one element.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    source: SourceOrigin
    document: list[str]
    """Text of the module."""
    metadata: list[dict[str, Any]]
    """Module, page, headings, tier and scores, as in `sources` of `/v1/answers`."""
    distances: list[float] | None = None
    """Similarity to the question, 0 to 1: the reranker's score, or else the cosine."""


def public_uri(uri: str, document: str) -> str:
    """Return the address of a document, or its id where the address tells a path of the server.

    The id of a file is its path below the folder that was ingested.
    """
    return document if uri.startswith(("file:", "/")) else uri


def without_path(citation: Citation) -> Citation:
    """Return a source whose address tells no path of the server."""
    return replace(citation, uri=public_uri(citation.uri, citation.document))


def source_of(citation: Citation) -> dict[str, Any]:
    """Write a source as `CompletionSource`."""
    details = asdict(without_path(citation))
    name, text, url = details.pop("document"), details.pop("text"), _url_of(citation)
    origin = {"id": name, "name": name} | ({} if url is None else {"url": url})
    source = {
        "source": origin,
        "document": [text],
        "metadata": [{"source": url or name, "name": name, **details}],
    }
    similarity = citation.cosine if citation.rerank is None else citation.rerank
    return source if similarity is None else source | {"distances": [max(0.0, similarity)]}


def annotations_of(
    answer: Answer, choice: int, text: str, marked: bool = False
) -> list[dict[str, Any]]:
    """Write the documents of a choice as OpenAI's `url_citation`s.

    The range of a citation is its source mark in the text, or the whole text in an answer without
    marks. A document without an address on the web has its id for the URL, since OpenAI's clients
    accept no other type of annotation in chats.

    Args:
        answer: The answer.
        choice: Index of the choice.
        text: Text of the choice, as the response has it.
        marked: Whether the request asked for source marks (`citations`).
    """
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": each.begin,
                "end_index": each.end,
                "title": each.source.document,
                "url": _url_of(each.source) or each.source.document,
            },
        }
        for each in _mentions(answer, choice, text, marked)
    ]


def search_citations(answer: Answer) -> list[dict[str, Any]]:
    """Write the modules of the first choice as Anthropic's citations of search results.

    The text that is cited is the module's. Each module counts as a search result of one block.
    """
    places = {each: number for number, each in enumerate(answer.sources)}
    return [
        {
            "type": "search_result_location",
            "cited_text": each.text,
            "source": _url_of(each) or each.document,
            "title": each.document,
            "search_result_index": places[each],
            "start_block_index": 0,
            "end_block_index": 1,
        }
        for each in cited_sources(answer, 0)
    ]


def file_citations(answer: Answer, text: str, marked: bool = False) -> list[dict[str, Any]]:
    """Write the documents of the first choice as OpenAI's `file_citation`s.

    The index of a citation is the first character of its source mark, or the end of the text in an
    answer without marks.

    Args:
        answer: The answer.
        text: Text of the choice, as the response has it.
        marked: Whether the request asked for source marks (`citations`).
    """
    return [
        {
            "type": "file_citation",
            "file_id": each.source.document,
            "filename": filename_of(each.source),
            "index": each.begin if marked else each.end,
        }
        for each in _mentions(answer, 0, text, marked)
    ]


def found_files(sources: Sequence[Citation]) -> list[dict[str, Any]]:
    """Write the modules of a search as OpenAI's results of `file_search`."""
    return [
        {
            "file_id": each.document,
            "filename": filename_of(each),
            "score": score,
            "text": each.text,
            "attributes": {},
        }
        for each, score in zip(sources, similarities(sources), strict=True)
    ]


def similarities(found: Sequence[Citation | Hit]) -> list[float]:
    """Return the similarity of each text to the query, 0 to 1.

    The reranker's score, or else the cosine, or else the BM25 score as a share of the best one.
    """
    best = max((each.bm25 or 0.0 for each in found), default=0.0) or 1.0
    known = ((each.rerank, each.cosine, (each.bm25 or 0.0) / best) for each in found)
    return [max(0.0, next(value for value in three if value is not None)) for three in known]


def filename_of(citation: Citation) -> str:
    """Return the name of a document's file: its own for an uploaded file, or else its id."""
    uploaded = citation.document.startswith(FILE_PREFIX) and citation.uri
    return citation.uri if uploaded else citation.document


def cited_sources(answer: Answer, choice: int) -> list[Citation]:
    """Return the sources of a choice. A quotation has the documents that it occurs in.

    A refusal has none.
    """
    if answer.choices[choice].finish_reason in ("no_answer", "no_documents"):
        return []
    quoted = {span.document for span in answer.spans if span.choice == choice}
    return [each for each in answer.sources if not quoted or each.document in quoted]


@dataclass(frozen=True, slots=True)
class _Mention:
    """A place of an answer's text that cites a document."""

    source: Citation
    begin: int
    end: int


def _mentions(answer: Answer, choice: int, text: str, marked: bool) -> list[_Mention]:
    """Return the marks of a text in their order, or each document for the whole text."""
    sources = cited_sources(answer, choice)
    if not marked:
        cited = {each.document: each for each in sources} if text else {}
        return [_Mention(each, 0, len(text)) for each in cited.values()]
    modules = {each.module: each for each in sources}
    named = {
        span.mark: modules[span.module]
        for span in answer.spans
        if span.choice == choice and span.module in modules
    }
    return [
        _Mention(named[number], *mark.span())
        for mark in _MARK.finditer(text)
        if (number := int(mark[1])) in named
    ]


def _url_of(citation: Citation) -> str | None:
    return citation.uri if citation.uri.startswith(_WEB) else None
