"""Loading sources: files of folders, what is skipped and why, ids, control characters."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from langchain_core.documents import Document

from ragcache.config import LEDGER_FILE
from ragcache.documents import (
    DocumentPart,
    FileFilter,
    SkippedFile,
    SourceDocument,
    load_sources,
)
from ragcache.documents.formats.text import TEXT_SUFFIXES
from ragcache.errors import DocumentError, NoDocuments, UnreadableDocument


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

    def test_skipped_files_have_a_reason(self, tmp_path: Path) -> None:
        write(tmp_path, a="text")
        for name in ("Makefile", "photo.JPG"):
            (tmp_path / name).write_bytes(b"\0")
        loaded = load_sources(tmp_path)
        assert [document.id for document in loaded.documents] == ["a.md"]
        reasons = {Path(file.name).name: file.reason for file in loaded.skipped}
        assert reasons == {
            "Makefile": "no suffix tells its type", "photo.JPG": ".jpg is no type that is read",
        }  # fmt: skip
        assert not any(file.failed for file in loaded.skipped)

    def test_one_bad_file_keeps_no_other_away(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", c=" ")
        (tmp_path / "b.md").write_bytes(b"a\0b")
        loaded = load_sources(tmp_path)
        assert [document.id for document in loaded.documents] == ["a.md"]
        failed = {Path(file.name).name: file.reason for file in loaded.skipped if file.failed}
        assert failed == {"b.md": "a binary file", "c.md": "an empty file"}
        with pytest.raises(UnreadableDocument, match=r"b\.md: a binary file; .*c\.md: an empty"):
            load_sources(tmp_path, FileFilter(strict=True))

    def test_pipes_sockets_and_lost_links_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path, a="text")
        os.mkfifo(tmp_path / "pipe.md")
        (tmp_path / "lost.md").symlink_to(tmp_path / "gone.md")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "s.md"))
            failed = [file for file in load_sources(tmp_path).skipped if file.failed]
        assert [Path(file.name).name for file in failed] == ["lost.md", "pipe.md", "s.md"]
        assert failed[0].reason == "No such file or directory"
        assert failed[1].reason == "no file, but a pipe, a socket or a device"
        with pytest.raises(UnreadableDocument, match="a pipe, a socket or a device"):
            load_sources(tmp_path / "pipe.md")

    def test_globs_choose_files(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", drafts__b="text", drafts__deep__c="text", guide__d="text")
        (tmp_path / "events.dat").write_text("The gate opened.")

        def ids(**patterns: list[str]) -> list[str]:
            return [d.id for d in load_sources(tmp_path, FileFilter(**patterns)).documents]

        assert ids(exclude=["drafts/"]) == ["a.md", "guide/d.md"]
        assert ids(include=["drafts/**/*.md"], exclude=["deep"]) == ["drafts/b.md"]
        assert ids(include=["*.dat"]) == ["events.dat"], "of any suffix"
        with pytest.raises(NoDocuments):
            ids(include=["*.none"])

    def test_installed_packages_are_left_out_and_said(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", node_modules__left_pad__readme="text")
        loaded = load_sources(tmp_path)
        assert [document.id for document in loaded.documents] == ["a.md"]
        [skipped] = loaded.skipped
        assert skipped.reason.startswith("installed packages")

    def test_a_state_folder_among_documents_is_left_out(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", state__blobs__b="text")
        (tmp_path / "state" / LEDGER_FILE).write_bytes(b"")
        loaded = load_sources(tmp_path)
        assert [document.id for document in loaded.documents] == ["a.md"]
        [skipped] = loaded.skipped
        assert skipped == SkippedFile(f"{tmp_path / 'state'}{os.sep}", "a state folder of ragcache")

    def test_a_state_folder_itself_is_named(self, tmp_path: Path) -> None:
        (write(tmp_path, a="text") / LEDGER_FILE).write_bytes(b"")
        with pytest.raises(UnreadableDocument, match="is a state folder of ragcache"):
            load_sources(tmp_path)

    def test_reading_is_reported_in_bytes(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        write(tmp_path, a="text", b="more text")
        load_sources(tmp_path, progress=lambda *at: seen.append(at))
        assert seen[-1] == (13, 13)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def test_hidden_files_and_folders_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "readme.md").write_text("hidden")
        (tmp_path / ".draft.md").write_text("hidden")
        (tmp_path / ".photo.jpg").write_text("hidden")
        loaded = load_sources(write(tmp_path, a="text"))
        assert [document.id for document in loaded.documents] == ["a.md"]
        assert loaded.skipped == ()
        assert names(tmp_path / ".git") == ["readme.md"], "named itself"

    def test_files_are_called_by_their_paths_in_the_folder(self, tmp_path: Path) -> None:
        write(tmp_path, b="text", a__deep__c="text", a__b="text")
        assert names(tmp_path) == ["a/b.md", "a/deep/c.md", "b.md"]
        assert load_sources(str(tmp_path)) == load_sources([tmp_path])

    def test_a_folder_without_text_names_the_suffixes(self, tmp_path: Path) -> None:
        (tmp_path / "photo.jpg").write_bytes(b"\0")
        said = (
            r"holds no documents that can be read; skipped: \.jpg is .*looked for \.adoc .* \.txt"
        )
        with pytest.raises(NoDocuments, match=said):
            load_sources(tmp_path)


class TestFiles:
    @pytest.mark.parametrize("name", ["Makefile", "code.py", ".hidden", "notes.dat"])
    def test_a_file_named_itself_may_have_any_suffix(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path(name).write_text("text")
        assert names(name) == names(tmp_path / name) == [name]

    def test_files_given_by_their_paths_keep_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, one__a="text", two__a="text")
        monkeypatch.chdir(tmp_path)
        assert names("one/a.md", "two/../two/a.md") == ["one/a.md", "two/a.md"]
        monkeypatch.chdir(tmp_path / "one")
        outside = (tmp_path / "two" / "a.md").relative_to(tmp_path.anchor).as_posix()
        assert names("a.md", "../two/a.md") == ["a.md", outside]

    def test_a_document_tells_its_address_and_a_digest_of_its_text(self, tmp_path: Path) -> None:
        write(tmp_path, a="text", b="text", c="other")
        a, b, c = load_sources(tmp_path).documents
        assert a.uri == (tmp_path / "a.md").as_uri()
        assert a.digest == b.digest != c.digest

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"\xff\xfea", "it begins as UTF-16, but is not at byte"),
            (b"te\0xt", "a binary file"),
            (b"PK\x03\x04\0\0", "a binary file: a ZIP archive or an office document"),
            (b"%PDF-1.7 without a NUL byte", "it is damaged, or no PDF"),
            (b"\x89PNG\r\n", "a binary file: a picture"),
            (bytes(range(1, 256)) * 9, "a binary file: no encoding"),
            (b" \n\t", "an empty file"),
            (b"", "an empty file"),
            (b"\xef\xbb\xbf", "it holds no text"),
        ],
    )
    def test_a_file_that_is_no_text_is_refused(
        self, content: bytes, problem: str, tmp_path: Path
    ) -> None:
        (tmp_path / "a.md").write_bytes(content)
        with pytest.raises(UnreadableDocument, match=f"a.md: {problem}"):
            load_sources(tmp_path)

    @pytest.mark.parametrize(
        "encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252", "cp1251", "shift_jis"]
    )
    def test_encodings_are_detected(self, encoding: str, tmp_path: Path) -> None:
        text = {
            "cp1251": "Ключ от лодочного сарая висит в красном шкафу. Спросите Тома.",
            "shift_jis": "艇庫の鍵は赤い戸棚に掛かっています。借りる前に聞いてください。",
        }.get(encoding, "Der Schlüssel hängt im roten Schrank, fragt vorher Tom Größer.")
        (tmp_path / "a.md").write_bytes(text.encode(encoding))
        assert load_sources(tmp_path).documents[0].text == text

    def test_all_paths_that_do_not_exist_are_named_at_once(self, tmp_path: Path) -> None:
        write(tmp_path, b="good")
        with pytest.raises(UnreadableDocument) as caught:
            load_sources([tmp_path, tmp_path / "missing.md", tmp_path / "lost.md"])
        for fact in ("missing.md: No such file", "lost.md: No such file", "Nothing was"):
            assert fact in str(caught.value)


class TestDocuments:
    def test_a_langchain_document_keeps_metadata_and_needs_a_name(self) -> None:
        metadata = {"source": "kiln.txt", "page": 3}
        (document,) = load_sources([Document("text", metadata=metadata)]).documents
        assert (document.id, document.uri, document.metadata) == ("kiln.txt", "kiln.txt", metadata)
        (document,) = load_sources([Document("t", id="7", metadata=metadata)]).documents
        assert (document.id, document.uri) == ("7", "kiln.txt")
        with pytest.raises(DocumentError, match=r"neither an id nor metadata\['source'\]"):
            load_sources([Document("text", metadata={"page": 1})])

    def test_documents_of_one_source_are_parts_of_one(self) -> None:
        chunks = [
            Document(text, metadata={"source": "a.pdf", "page": page, "team": "quay"})
            for text, page in (("One.", 1), ("  ", 2), ("Two.", 2), ("Two.", 3))
        ]
        (document,) = load_sources(chunks).documents
        assert (document.id, document.text) == ("a.pdf", "One.\n\nTwo.\n\nTwo.")
        assert document.metadata == {"source": "a.pdf", "team": "quay"}
        assert document.parts == tuple(
            DocumentPart(text, {"page": page})
            for text, page in (("One.", 1), ("Two.", 2), ("Two.", 3))
        )  # fmt: skip

    def test_a_blank_document_is_refused_by_its_name(self) -> None:
        for blank in (SourceDocument("b", " \n"), Document("", id="b")):
            with pytest.raises(UnreadableDocument, match="b: an empty document"):
                load_sources([blank])
        with pytest.raises(UnreadableDocument, match="b: control characters and nothing else"):
            load_sources([SourceDocument("b", "\x00\x01")])

    def test_nothing_given_is_an_error(self) -> None:
        with pytest.raises(NoDocuments, match="no documents were given"):
            load_sources([])


def test_two_documents_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, one__a="text", two__a="text")
    with pytest.raises(DocumentError, match=r"two documents are both called 'a\.md'"):
        load_sources([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(DocumentError, match="both called"):
        load_sources([tmp_path, tmp_path / "one" / "a.md"])
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


@pytest.mark.parametrize(
    ("name", "uri", "problem"),
    [
        ("a\0b", "", "which is not UTF-8 text; rename it"),
        ("\udc80.md", "", "which is not UTF-8 text; rename it"),
        ("a", "\0", "its address"),
        ("a", "\ud800", "its address"),
    ],
)
def test_names_that_are_not_text_are_refused(name: str, uri: str, problem: str) -> None:
    with pytest.raises(DocumentError, match=problem):
        load_sources([SourceDocument(name, "Words.", uri)])


def test_control_characters_are_removed_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ftwo\x07", encoding="utf-8")
    sources = [tmp_path, SourceDocument("b", "b\x00"), Document("c\x1b[0m", id="c")]
    loaded = load_sources(sources)
    assert [d.text for d in loaded.documents] == ["one\ntwo", "b", "c[0m"]
    clean = SourceDocument("b", "b")
    assert load_sources([clean]).documents[0] is clean
