"""Loading documents: ids, refused files and metadata, control characters."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from ragcache.documents.source import (
    DEPTH,
    TEXT_SUFFIXES,
    SourceDocument,
    check_metadata,
    load_sources,
)
from ragcache.errors import DocumentError, NoDocuments, UnreadableDocument, UnstorableMetadata


def write(folder: Path, **files: str) -> Path:
    """Files by name; two underscores stand for a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def names(*sources: object) -> list[str]:
    return [document.id for document in load_sources(sources).documents]


class TestFolders:
    @pytest.mark.parametrize("suffix", sorted(TEXT_SUFFIXES))
    def test_text_is_told_by_its_suffix_in_any_case(self, suffix: str, tmp_path: Path) -> None:
        for name in (f"a{suffix}", f"B{suffix.upper()}"):
            (tmp_path / name).write_text("text")
        assert names(tmp_path) == [f"B{suffix.upper()}", f"a{suffix}"]

    def test_files_of_other_suffixes_are_passed_over_and_named(self, tmp_path: Path) -> None:
        write(tmp_path, a="text")
        for name in ("plan.pdf", "Makefile", "photo.JPG"):
            (tmp_path / name).write_bytes(b"\0")
        loaded = load_sources(tmp_path)
        assert [document.id for document in loaded.documents] == ["a.md"]
        assert {path.name for path in loaded.ignored} == {"plan.pdf", "Makefile", "photo.JPG"}

    def test_hidden_files_and_folders_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "readme.md").write_text("hidden")
        (tmp_path / ".draft.md").write_text("hidden")
        (tmp_path / ".photo.jpg").write_text("hidden")
        loaded = load_sources(write(tmp_path, a="text"))
        assert [document.id for document in loaded.documents] == ["a.md"]
        assert loaded.ignored == ()

    def test_a_folder_below_a_hidden_one_may_be_named_itself(self, tmp_path: Path) -> None:
        assert names(write(tmp_path / ".notes", a="text")) == ["a.md"]

    def test_files_are_called_by_their_paths_in_the_folder(self, tmp_path: Path) -> None:
        write(tmp_path, b="text", a__deep__c="text", a__b="text")
        assert names(tmp_path) == ["a/b.md", "a/deep/c.md", "b.md"]

    def test_a_folder_may_be_given_as_text_and_alone(self, tmp_path: Path) -> None:
        write(tmp_path, a="text")
        assert load_sources(str(tmp_path)) == load_sources([tmp_path])

    def test_a_folder_without_text_names_the_suffixes(self, tmp_path: Path) -> None:
        (tmp_path / "plan.pdf").write_bytes(b"\0")
        with pytest.raises(NoDocuments, match=r"holds no text files; looked for \.adoc .* \.txt"):
            load_sources(tmp_path)


class TestFiles:
    @pytest.mark.parametrize("name", ["Makefile", "code.py", ".hidden", "notes.pdf"])
    def test_a_file_named_itself_may_have_any_suffix(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text("text")
        assert names(tmp_path / name) == [name]

    def test_a_document_tells_its_address_and_a_digest_of_its_text(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", b="text", c="other")
        a, b, c = load_sources(tmp_path).documents
        assert a.uri == (tmp_path / "a.md").as_uri()
        assert a.digest == b.digest != c.digest

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf# Title")
        assert load_sources(tmp_path).documents[0].text == "# Title"

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("ol\xe9".encode("latin-1"), "not UTF-8 at byte 2"),
            ("text".encode("utf-16"), "a binary file"),
            (b"PK\x03\x04\0\0", "a binary file"),
            (b" \n\t", "an empty file"),
            (b"", "an empty file"),
            (b"\xef\xbb\xbf", "an empty file"),
        ],
    )
    def test_a_file_that_is_no_text_is_refused(
        self, content: bytes, problem: str, tmp_path: Path
    ) -> None:
        (tmp_path / "a.md").write_bytes(content)
        with pytest.raises(UnreadableDocument, match=f"a.md: {problem}"):
            load_sources(tmp_path)

    def test_all_unreadable_files_are_named_at_once(self, tmp_path: Path) -> None:
        write(tmp_path, a="", b="good", c=" ")
        with pytest.raises(UnreadableDocument) as caught:
            load_sources([tmp_path, tmp_path / "missing.md"])
        for fact in ("a.md: an empty", "c.md: an empty", "missing.md: No such file", "Nothing was"):
            assert fact in str(caught.value)
        assert "b.md" not in str(caught.value)


class TestDocuments:
    def test_a_langchain_document_keeps_its_metadata(self) -> None:
        metadata = {"source": "kiln.txt", "page": 3}
        (document,) = load_sources([Document("text", metadata=metadata)]).documents
        assert (document.id, document.uri, document.metadata) == ("kiln.txt", "kiln.txt", metadata)

    def test_the_id_of_a_langchain_document_goes_before_its_source(self) -> None:
        (document,) = load_sources([Document("t", id="7", metadata={"source": "s"})]).documents
        assert (document.id, document.uri) == ("7", "s")

    def test_a_langchain_document_without_a_name_is_refused(self) -> None:
        with pytest.raises(DocumentError, match=r"neither an id nor metadata\['source'\]"):
            load_sources([Document("text", metadata={"page": 1})])

    def test_a_blank_document_is_refused_by_its_name(self) -> None:
        for blank in (SourceDocument("b", " \n"), Document("", id="b")):
            with pytest.raises(UnreadableDocument, match="b: an empty document"):
                load_sources([blank])

    def test_a_source_document_is_taken_as_it_is(self) -> None:
        document = SourceDocument("a", "text", "x://a", {"k": 1})
        assert load_sources(iter([document])).documents == (document,)

    def test_nothing_given_is_an_error(self) -> None:
        with pytest.raises(NoDocuments, match="no documents were given"):
            load_sources([])


class TestDuplicates:
    def test_two_files_of_one_name_in_two_folders(self, tmp_path: Path) -> None:
        write(tmp_path, one__a="text", two__a="text")
        with pytest.raises(DocumentError, match=r"two documents are both called 'a\.md'"):
            load_sources([tmp_path / "one", tmp_path / "two"])
        assert names(tmp_path) == ["one/a.md", "two/a.md"], "what the message advises"

    def test_a_file_given_twice(self, tmp_path: Path) -> None:
        write(tmp_path, a="text")
        with pytest.raises(DocumentError, match="both called"):
            load_sources([tmp_path, tmp_path / "a.md"])

    def test_documents_of_different_kinds(self) -> None:
        with pytest.raises(DocumentError, match="both called '1'"):
            load_sources([SourceDocument("1", "text"), Document("text", id="1")])


def test_parts_are_kept_and_change_the_digest() -> None:
    whole = SourceDocument("a", "one\n\ntwo")
    cut = SourceDocument("a", "one\n\ntwo", parts=("one", "two"))
    assert load_sources([cut]).documents == (cut,)
    digests = {
        d.digest for d in (whole, cut, SourceDocument("a", whole.text, parts=("one\n", "two")))
    }
    assert len(digests) == 3
    dirty = SourceDocument("a", "one\0\n\ntwo", parts=("one\0", "\0", "two"))
    assert load_sources([dirty]).documents == (cut,)


@pytest.mark.parametrize("name", ["a\0b", "\udc80.md"])
def test_ids_that_are_not_text_are_refused(name: str) -> None:
    with pytest.raises(DocumentError, match="which is not UTF-8 text; rename it"):
        load_sources([SourceDocument(name, "text")])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v) | st.dictionaries(TEXTS, v), max_leaves=8)


@given(st.dictionaries(TEXTS, VALUES))
def test_accepted_metadata_survives_json(metadata: dict[str, Any]) -> None:
    check_metadata(metadata, "a")
    assert json.loads(json.dumps(metadata, allow_nan=False).encode()) == metadata


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"metadata\['x'\] is nan"), (-float("inf"), "is -inf"),
        ("\ud800", r"metadata\['x'\] is no text: '\\ud800'"), ({"\udfff": 1}, "the key"),
        ({(1, 2): 3}, r"the key \(1, 2\)"), (Path("\ud800"), "is no text"),
        ({"deep": [0.0, float("nan")]}, r"\['x'\]\['deep'\]\[1\] is nan"),
        (10**3000, "too many digits"),
    ],
)  # fmt: skip
def test_other_metadata_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UnstorableMetadata, match=f"document 'a': .*{said}"):
        load_sources([SourceDocument("a", "Words.", metadata={"x": value})])


def test_values_unknown_to_json_become_text() -> None:
    check_metadata({"on": date(2026, 3, 1), "path": Path("a"), "some": {1}, 7: None}, "a")


def test_nesting_is_limited() -> None:
    deep: Any = 1
    for _ in range(DEPTH):
        deep = {"x": deep}
    check_metadata(deep, "a")
    with pytest.raises(UnstorableMetadata, match=f"more than {DEPTH} deep"):
        check_metadata({"x": deep}, "a")
    ring: dict[str, Any] = {}
    ring["x"] = ring
    with pytest.raises(UnstorableMetadata, match="deep"):
        check_metadata(ring, "a")


def test_addresses_that_are_not_text_are_refused() -> None:
    for uri in ("\0", "\ud800"):
        with pytest.raises(DocumentError, match="its address"):
            load_sources([SourceDocument("a", "Words.", uri)])


def test_control_characters_are_removed_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ftwo\x07", encoding="utf-8")
    sources = [tmp_path, SourceDocument("b", "b\x00"), Document("c\x1b[0m", id="c")]
    loaded = load_sources(sources)
    assert [d.text for d in loaded.documents] == ["one\ntwo", "b", "c[0m"]
    clean = SourceDocument("b", "b")
    assert load_sources([clean]).documents[0] is clean


def test_a_document_of_control_characters_alone_is_unreadable() -> None:
    with pytest.raises(UnreadableDocument, match="control characters and nothing else"):
        load_sources([SourceDocument("b", "\x00\x01")])
