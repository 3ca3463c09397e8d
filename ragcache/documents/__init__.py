"""From files to module texts: loading and splitting."""

from ragcache.documents.source import Loaded, SourceDocument, load_sources
from ragcache.documents.split import split_document, split_text

__all__ = ["Loaded", "SourceDocument", "load_sources", "split_document", "split_text"]
