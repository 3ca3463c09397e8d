"""Text and source code, in any encoding."""

from __future__ import annotations

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile
from ragcache.documents.source import DocumentPart

TEXT_SUFFIXES = frozenset(
    ".md .markdown .mdx .txt .text .rst .adoc .org .tex .log .srt .vtt".split()
)
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".js": "js",
    ".jsx": "js",
    ".mjs": "js",
    ".ts": "ts",
    ".tsx": "ts",
    ".java": "java",
    ".kt": "kotlin",
    ".scala": "scala",
    ".go": "go",
    ".rs": "rust",
    ".rb": "ruby",
    ".php": "php",
    ".swift": "swift",
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".hpp": "cpp",
    ".cs": "csharp",
    ".lua": "lua",
    ".hs": "haskell",
    ".ex": "elixir",
    ".exs": "elixir",
    ".ps1": "powershell",
    ".proto": "proto",
    ".sol": "sol",
}
"""Languages of source code, by suffix, as LangChain's splitters name them."""
_PLAIN_CODE = frozenset(
    ".sh .bash .zsh .fish .sql .r .jl .m .dart .vue .svelte .css .scss .yaml .yml .toml .ini .cfg "
    ".conf .properties .xml .xsd .gradle .cmake .tf .graphql .bat .diff .patch .pl".split()
)
CODE = "code"  # language of code without a splitter of its own


def read_text(file: RawFile) -> Content:
    """Read text or code. Files without a format of their own are read as text."""
    text = decode_text(file.raw)
    if file.suffix in LANGUAGES or file.suffix in _PLAIN_CODE:
        return Content([DocumentPart(text, language=LANGUAGES.get(file.suffix, CODE))])
    return Content([DocumentPart(text)])


FORMATS = (Format(TEXT_SUFFIXES | LANGUAGES.keys() | _PLAIN_CODE, read_text, is_plain=True),)
