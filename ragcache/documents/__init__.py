"""Documents: loading them, and splitting them into the texts of modules."""

from ragcache.documents.source import LoadedSources, SourceDocument, load_sources
from ragcache.documents.split import split_document, split_text

__all__ = ["LoadedSources", "SourceDocument", "load_sources", "split_document", "split_text"]
