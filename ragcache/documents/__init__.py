"""Documents: reading files of all types, and splitting them into the texts of modules."""

from ragcache.documents.loading import FileFilter, LoadedSources, SkippedFile, load_sources
from ragcache.documents.reading import ReadOptions, read_file
from ragcache.documents.source import DocumentPart, SourceDocument
from ragcache.documents.split import SplitModule, split_document, split_text

__all__ = [
    "DocumentPart",
    "FileFilter",
    "LoadedSources",
    "ReadOptions",
    "SkippedFile",
    "SourceDocument",
    "SplitModule",
    "load_sources",
    "read_file",
    "split_document",
    "split_text",
]
