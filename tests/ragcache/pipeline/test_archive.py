"""Collections that travel: what an archive holds, hostile archives, interruptions."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from ragcache import RagCache, SourceDocument
from ragcache.db.tables import JobOriginalTable, OriginalTable
from ragcache.documents import load_sources
from ragcache.documents.originals import digest_original
from ragcache.errors import (
    ArchiveDamaged,
    ArchiveMismatch,
    CollectionExists,
    ConfigurationError,
    DocumentsChanged,
    OriginalMissing,
    StoreUnwritable,
    UnknownCollection,
    UnreadableDocument,
)
from ragcache.models import LoadedModel, wrap_causal
from ragcache.pipeline import collection_import
from ragcache.pipeline.archive import VERSION, ArchiveIndex, checksum_of
from ragcache.pipeline.collection_export import CollectionExporter
from ragcache.store.verify import verify
from tests.ragcache.pipeline.conftest import DOCUMENTS
from tests.ragcache.store.test_processes import run_and_kill
from tests.tiny_models import tiny_model

QUESTION = "Which boat is at the quay, where is the key, and who takes requests for leave?"
ORIGINAL = b"%PDF, of which nobody but people reads anything: \x00\xff"
Files = dict[str, bytes]


def open_folder(path: Path, model: LoadedModel, **options: object) -> RagCache:
    return RagCache.open(path, model, max_tokens=8, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, tiny_reader: LoadedModel) -> Path:
    """An archive with an instruction, a scaffold, states of two encodings and an original."""
    folder = tmp_path_factory.mktemp("export")
    with open_folder(folder / "state", tiny_reader) as rag:
        rag.collections.create("notes", "Boats, keys and leave.")
        rag.collections.set_instruction("notes", "Answer in one word.")
        loaded = load_sources(DOCUMENTS)
        boats, *rest = loaded.documents
        digest = digest_original(ORIGINAL)
        documents = (replace(boats, original=digest), *rest)
        uploaded = replace(loaded, documents=documents, originals={digest: ORIGINAL})
        assert rag.jobs.wait(rag.jobs.submit("notes", uploaded).id).status == "done"
        rag.modules.warm("notes", ["boats", "keys"], mode="isolated")
        rag.collections.add_scaffold("notes", ["boats", "keys"])
        done = rag.collections.export_archive("notes", folder / "notes.tar")
        assert (done.documents, done.modules, done.states, done.missing) == (3, 3, 6, 0)
        assert done.nbytes == (folder / "notes.tar").stat().st_size
    assert not list(folder.glob("*.part"))
    return folder / "notes.tar"


@pytest.fixture
def other(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    """An empty folder."""
    with open_folder(tmp_path / "other", model) as rag:
        yield rag


def read_files(path: Path) -> Files:
    with tarfile.open(path) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def write_files(path: Path, files: Files) -> Path:
    """Writes files as an archive, with an index of their own."""
    index = ArchiveIndex()
    files = {name: content for name, content in files.items() if name != "index.json"}
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            checksum = checksum_of([memoryview(content)])
            index.add(name, len(content), "" if name.startswith("states/") else checksum)
        for name, content in (files | {"index.json": index.to_bytes()}).items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    raw = path.read_bytes()
    path.write_bytes(raw.rstrip(b"\0") + bytes(-len(raw.rstrip(b"\0")) % 512) + bytes(1024))
    return path


def changed(archive: Path, path: Path, change: Callable[[Files], object]) -> Path:
    files = read_files(archive)
    change(files)
    return write_files(path, files)


def edited(name: str, change: Callable[[dict], object]) -> Callable[[Files], None]:  # type: ignore[type-arg]
    """A change of the JSON of one file."""

    def edit(files: Files) -> None:
        content = json.loads(files[name])
        change(content)
        files[name] = json.dumps(content, separators=(",", ":")).encode()

    return edit


def count_originals(rag: RagCache) -> int:
    """Return how many files the ledger keeps, of documents and of jobs."""
    with rag.internals.shared.database.reading() as session:
        tables = OriginalTable, JobOriginalTable
        return sum(session.scalar(select(func.count()).select_from(t)) or 0 for t in tables)


def assert_empty(rag: RagCache) -> None:
    """Nothing of a refused import is left, neither rows nor blobs."""
    store = rag.internals.shared.store
    assert rag.collections.page().items == ()
    assert count_originals(rag) == 0
    assert list(store.disk.keys()) == []
    assert not any(job.states for job in store.jobs.listed())


def test_an_import_computes_nothing(archive: Path, other: RagCache) -> None:
    reports: list[tuple[str, int, int]] = []
    done = other.collections.import_archive(archive, report=lambda *each: reports.append(each))
    assert (done.collection, done.documents, done.modules) == ("notes", 3, 3)
    assert (done.states, done.known, done.encoded, done.missing) == (6, 0, 0, 0)
    assert [each[0] for each in reports] == ["verifying"] * 6 + ["storing"] * 6
    assert other.collections.instruction("notes") == "Answer in one word."
    assert other.collections.description("notes") == "Boats, keys and leave."
    assert other.stats().encoded == 0
    assert verify(other.internals.shared.store).found == ()
    answer = other.ask(QUESTION, collection="notes", k=3)
    assert other.stats().encoded == 1  # the preamble
    assert {source.document for source in answer.sources} >= {"boats", "leave"}


def test_blobs_travel_byte_for_byte(archive: Path, other: RagCache) -> None:
    other.collections.import_archive(archive)
    disk = other.internals.shared.store.disk
    blobs = {f"states/{key}.safetensors": disk.path(key).read_bytes() for key in list(disk.keys())}
    files = read_files(archive)
    assert len(blobs) == 6
    assert blobs == {name: files[name] for name in files if name.startswith("states/")}


def test_documents_travel_whole(tmp_path: Path, model: LoadedModel, other: RagCache) -> None:
    document = SourceDocument(
        "a/é.md",
        "# Boats\n\nPipit is moored.",
        "https://x.example/é",
        {"year": 2024, "tags": ["x"]},
    )
    with open_folder(tmp_path / "state", model) as rag:
        rag.ingest("notes", [document])
        before = rag.internals.catalog.modules("notes")
        rows, texts = rag.documents.get("notes"), rag.documents.texts("notes", ["a/é.md"])
        rag.collections.export_archive("notes", tmp_path / "notes.tar")
    other.collections.import_archive(tmp_path / "notes.tar", "copy")
    after = other.internals.catalog.modules("copy")
    assert [replace(row, id=0) for row in after] == [replace(row, id=0) for row in before]
    assert other.documents.get("copy") == rows
    assert other.documents.texts("copy", ["a/é.md"]) == texts
    assert other.ingest("copy", [document]).unchanged == 1


def test_originals_travel_as_far_as_they_fit(
    archive: Path, other: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    other.collections.import_archive(archive)
    with other.documents.original("notes", "boats") as file:
        assert file.read() == ORIGINAL
    again = tmp_path / "again.tar"
    other.collections.export_archive("notes", again)
    other.collections.import_archive(again, replace=True)
    assert count_originals(other) == 1
    with open_folder(tmp_path / "small", model, originals_bytes=3) as small:
        small.collections.import_archive(again)
        assert count_originals(small) == 0
        with pytest.raises(OriginalMissing, match="originals_bytes"):
            small.documents.original("notes", "boats")


def test_an_archive_goes_to_another_namespace(archive: Path, other: RagCache) -> None:
    tenant = other.within("tenant")
    assert tenant.collections.import_archive(archive).states == 6
    assert other.collections.page().items == ()
    tenant.ask(QUESTION, collection="notes", k=3)
    assert other.stats().encoded == 1  # the preamble
    assert verify(other.internals.shared.store).found == ()


def test_scaffolds_travel(archive: Path, other: RagCache) -> None:
    other.collections.import_archive(archive)
    namespace = other.internals
    namespace.ask.scaffolds.follow("notes", namespace.catalog.version("notes"))
    ids = [module.id for module in namespace.catalog.modules("notes", ["boats#1", "keys#1"])]
    assert namespace.ask.scaffolds.runs("notes", ids) == [(0, 2)]


@pytest.mark.slow
def test_states_in_eight_bits_travel(tmp_path: Path, model: LoadedModel) -> None:
    with open_folder(tmp_path / "state", model, kv_dtype="int8") as rag:
        rag.ingest("notes", DOCUMENTS)
        rag.collections.export_archive("notes", tmp_path / "notes.tar")
    with open_folder(tmp_path / "other", model, kv_dtype="int8") as rag:
        assert rag.collections.import_archive(tmp_path / "notes.tar").states == 3
        assert verify(rag.internals.shared.store).found == ()


@pytest.mark.slow
def test_a_collection_with_documents_is_kept(archive: Path, other: RagCache) -> None:
    other.ingest("notes", [DOCUMENTS[0], SourceDocument("mine", "The tide is out.")])
    with pytest.raises(CollectionExists, match="'notes' has 2 documents"):
        other.collections.import_archive(archive)
    assert [row.source_id for row in other.documents.get("notes")] == ["boats", "mine"]
    done = other.collections.import_archive(archive, replace=True)
    assert [row.source_id for row in other.documents.get("notes")] == ["boats", "keys", "leave"]
    assert done.known == 0  # states under another instruction
    again = other.collections.import_archive(archive, replace=True)
    assert (again.states, again.known) == (0, 6)
    assert verify(other.internals.shared.store).found == ()


@pytest.mark.slow
def test_another_model_is_refused_or_encodes(
    archive: Path, tmp_path: Path, reader: LoadedModel
) -> None:
    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer), seed=1))
    with open_folder(tmp_path / "else", LoadedModel("else", causal, reader.tokenizer)) as rag:
        with pytest.raises(ArchiveMismatch, match=r"made with the model tiny .* open with else"):
            rag.collections.import_archive(archive)
        assert_empty(rag)
        done = rag.collections.import_archive(archive, encode=True)
        assert (done.documents, done.states, done.encoded, done.missing) == (3, 0, 3, 0)
        assert rag.collections.instruction("notes") == "Answer in one word."
        assert rag.ask(QUESTION, collection="notes").reuse.cached_tokens > 0
        assert verify(rag.internals.shared.store).found == ()


@pytest.mark.parametrize("name", ["states_format", "model", "tokenizer", "scheme", "preamble"])
def test_every_fingerprint_is_compared(
    name: str, archive: Path, tmp_path: Path, other: RagCache
) -> None:
    value = 1 if name == "states_format" else "other"
    edit = edited("manifest.json", lambda manifest: manifest["fingerprints"].update({name: value}))
    with pytest.raises(ArchiveMismatch, match="cannot be used here: "):
        other.collections.import_archive(changed(archive, tmp_path / "a.tar", edit))
    assert_empty(other)


def test_another_format_is_refused(archive: Path, tmp_path: Path, other: RagCache) -> None:
    edit = edited("manifest.json", lambda manifest: manifest.update(version=VERSION + 1, more=1))
    with pytest.raises(ArchiveMismatch, match=f"has version {VERSION + 1} of the archive's"):
        other.collections.import_archive(changed(archive, tmp_path / "a.tar", edit), encode=True)


@pytest.mark.slow
def test_missing_states_are_counted_or_encoded(
    tmp_path: Path, model: LoadedModel, other: RagCache
) -> None:
    with open_folder(tmp_path / "state", model) as rag:
        rag.ingest("notes", DOCUMENTS)
        rag.modules.evict("notes", ["boats"])
        done = rag.collections.export_archive("notes", tmp_path / "notes.tar")
        assert (done.states, done.missing) == (2, 1)
    assert other.collections.import_archive(tmp_path / "notes.tar").missing == 1
    encoded = other.collections.import_archive(tmp_path / "notes.tar", replace=True, encode=True)
    assert (encoded.encoded, encoded.missing, encoded.known) == (1, 0, 2)


def test_an_export_refuses_by_name(
    rag: RagCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownCollection, match="no collection 'else'"):
        rag.collections.export_archive("else", tmp_path / "a.tar")
    with pytest.raises(StoreUnwritable, match=r"cannot write under .*nowhere/a.tar"):
        rag.collections.export_archive("notes", tmp_path / "nowhere" / "a.tar")
    entries = CollectionExporter(rag.internals, "notes").entries()
    next(entries)
    rag.delete("notes", ["boats"])
    with pytest.raises(DocumentsChanged, match="'notes' was changed while it was exported"):
        list(entries)


def test_an_import_refuses_by_name(archive: Path, other: RagCache, tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match=r"cannot read the archive .*none.tar: No such"):
        other.collections.import_archive(tmp_path / "none.tar")
    with pytest.raises(ConfigurationError, match="a collection needs a name"):
        other.collections.import_archive(archive, " ")
    with pytest.raises(ArchiveDamaged, match="is no complete archive"):
        other.collections.import_archive(Path(__file__))


# Hostile and damaged archives.


def test_files_of_other_names_are_refused(archive: Path, tmp_path: Path, other: RagCache) -> None:
    for name in ("../escape", "/etc/passwd", "states/../../x.safetensors", "documents/x.json", ""):
        hostile = changed(
            archive, tmp_path / "a.tar", lambda files, n=name: files.update({n: b"x"})
        )
        with pytest.raises(ArchiveDamaged, match="which is no file of a collection"):
            other.collections.import_archive(hostile)
    assert_empty(other)


def test_links_and_sparse_files_are_refused(archive: Path, tmp_path: Path, other: RagCache) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE, tarfile.CHRTYPE)
    for kind in kinds:
        raw = bytearray(archive.read_bytes())
        info = tarfile.TarInfo("manifest.json")
        info.type, info.mode, info.linkname = kind, 0o600, "/etc/passwd"
        raw[:512] = info.tobuf(tarfile.GNU_FORMAT)
        (tmp_path / "a.tar").write_bytes(raw)
        with pytest.raises(ArchiveDamaged, match=r"no plain file|header is damaged"):
            other.collections.import_archive(tmp_path / "a.tar")


def test_packed_archives_are_refused(archive: Path, tmp_path: Path, other: RagCache) -> None:
    """A compressed file, which could unpack to any size, is read as it is."""
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        tar.add(archive, "manifest.json")
    with pytest.raises(ArchiveDamaged, match="header is damaged"):
        other.collections.import_archive(tmp_path / "a.tar")


def test_sizes_are_not_believed(archive: Path, tmp_path: Path, other: RagCache) -> None:
    raw = bytearray(archive.read_bytes())
    info = tarfile.TarInfo("manifest.json")
    info.size, info.mode = 1 << 50, 0o600
    raw[:512] = info.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(raw)
    with pytest.raises(ArchiveDamaged, match=r"cut off within manifest.json"):
        other.collections.import_archive(tmp_path / "a.tar")
    big = tmp_path / "big.tar"
    with big.open("wb") as file:  # a file with holes, which take no room
        info.size = 1 << 30
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + (1 << 30) + 1024)
    with pytest.raises(
        ArchiveDamaged, match="does not begin with a manifest and end with an index"
    ):
        other.collections.import_archive(big)


def _first_states(files: Files) -> str:
    return next(name for name in files if name.startswith("states/"))


def _original(files: Files) -> str:
    return next(name for name in files if name.startswith("originals/"))


def _swap_states(files: Files) -> None:
    first, second, *_ = [name for name in files if name.startswith("states/")]
    files[first], files[second] = files[second], files[first]


def _flip_states(files: Files) -> None:
    content = bytearray(files[_first_states(files)])
    content[-1] ^= 1
    files[_first_states(files)] = bytes(content)


def _two_dimensions(files: Files) -> None:
    for number, vector in enumerate(("AAAAAA==", "AAAAAAAAAAA=")):
        with_vector = partial(_set_vector, vector=vector)
        edited(f"documents/0000000{number}.json", with_vector)(files)


def _set_vector(document: dict[str, Any], vector: str) -> None:
    document["modules"][0]["vector"] = vector


DOCUMENT = "documents/00000000.json"
DAMAGES: dict[str, tuple[str, Callable[[Files], object]]] = {
    "no document": ("it holds 1 of 3 documents", lambda f: f.pop("documents/00000001.json")),
    "nonsense": ("is not as an export writes it", lambda f: f.update({DOCUMENT: b"{}"})),
    "deep JSON": ("is not as an export writes it", lambda f: f.update({DOCUMENT: b"[" * 100_000})),
    "a flipped byte": ("fails its checksum", _flip_states),
    "swapped states": ("of another key", _swap_states),
    "no states": ("it lacks the states", lambda f: f.pop(_first_states(f))),
    "no original": ("other originals than", lambda f: f.pop(_original(f))),
    "more originals": (
        "other originals than",
        lambda f: f.update({f"originals/{'0' * 64}": b""}),
    ),
    "another original": ("than its name says", lambda f: f.update({_original(f): b"<script>"})),
    "more states": (
        "belong to none of its modules",
        lambda f: f.update({f"states/{'0' * 64}.safetensors": f[_first_states(f)]}),
    ),
    "another text": (
        "it lacks the states",
        edited(DOCUMENT, lambda d: d["modules"][0].update(text="The boat is gone.")),
    ),
    "control characters": (
        "has control characters or no text",
        edited(DOCUMENT, lambda d: d["modules"][0].update(text="\x1bboat")),
    ),
    "no modules": ("at least 1 item", edited(DOCUMENT, lambda d: d.update(modules=[]))),
    "one id twice": ("both called 'keys'", edited(DOCUMENT, lambda d: d.update(id="keys"))),
    "a bad id": ("not UTF-8 text", edited(DOCUMENT, lambda d: d.update(id="a\0b"))),
    "a bad place": (
        "places that are no pairs",
        edited(DOCUMENT, lambda d: d["modules"][0].update(places=[[1]])),
    ),
    "a bad vector": (
        "'boats' has a vector that cannot be read",
        edited(DOCUMENT, lambda d: d["modules"][0].update(vector="AADAfw==")),
    ),
    "two dimensions": ("different dimensions", _two_dimensions),
    "a bad scaffold": (
        "a scaffold names modules that it does not hold",
        edited("manifest.json", lambda m: m.update(scaffolds=[["boats#1", "none#1"]])),
    ),
    "bad calibrations": (
        "its calibrations are not readable",
        edited("manifest.json", lambda m: m.update(calibrations='{"a": 1}')),
    ),
    "a long description": (
        "the description of a collection has 2,001 characters",
        edited("manifest.json", lambda m: m.update(description="x" * 2001)),
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damages_are_named_and_store_nothing(
    damage: str, archive: Path, tmp_path: Path, other: RagCache
) -> None:
    told, change = DAMAGES[damage]
    with pytest.raises(ArchiveDamaged, match=told):
        other.collections.import_archive(changed(archive, tmp_path / "a.tar", change))
    assert_empty(other)


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, tiny_reader: LoadedModel
) -> Iterator[RagCache]:
    """A folder for imports that are refused."""
    with open_folder(tmp_path_factory.mktemp("target") / "state", tiny_reader) as rag:
        yield rag


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(place: float, bit: int, archive: Path, target: RagCache) -> None:
    raw = bytearray(archive.read_bytes())
    raw[int(place * len(raw))] ^= 1 << bit
    path = archive.with_name("flipped.tar")
    path.write_bytes(raw)
    with pytest.raises((ArchiveDamaged, ArchiveMismatch)):
        target.collections.import_archive(path)
    assert_empty(target)


@given(place=st.floats(0, 1, exclude_max=True))
def test_no_cut_passes(place: float, archive: Path, target: RagCache) -> None:
    raw = archive.read_bytes()
    path = archive.with_name("cut.tar")
    path.write_bytes(raw[: int(place * len(raw))])
    with pytest.raises(ArchiveDamaged):
        target.collections.import_archive(path)
    path.write_bytes(raw + bytes(512))
    with pytest.raises(ArchiveDamaged, match="does not end where an archive ends"):
        target.collections.import_archive(path)
    assert_empty(target)


# Interruptions.


@pytest.mark.slow
def test_an_export_goes_on(rag: RagCache, tmp_path: Path) -> None:
    path, part = tmp_path / "notes.tar", tmp_path / "notes.tar.part"
    rag.collections.export_archive("notes", path)
    whole = path.read_bytes()
    path.unlink()
    for cut in range(0, len(whole), 1000):
        part.write_bytes(whole[:cut])
        rag.collections.export_archive("notes", path)
        assert path.read_bytes() == whole
    part.write_bytes(whole[:5000] + bytes(len(whole) - 5000))  # not written before the power failed
    rag.collections.export_archive("notes", path)
    assert path.read_bytes() == whole


def test_a_resumed_export_reads_what_is_left(
    rag: RagCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, peeked = rag.internals.shared.store, []
    peek = store.peek
    monkeypatch.setattr(store, "peek", lambda key: peeked.append(key) or peek(key))
    rag.collections.export_archive("notes", tmp_path / "a.tar")
    assert len(peeked) == 3
    whole = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        last = [each for each in tar if each.name.startswith("states/")][-1]
    (tmp_path / "a.tar.part").write_bytes(whole[: last.offset_data])
    del peeked[:]
    rag.collections.export_archive("notes", tmp_path / "a.tar")
    assert len(peeked) == 1
    assert (tmp_path / "a.tar").read_bytes() == whole


def test_a_stream_is_the_file(rag: RagCache, tmp_path: Path) -> None:
    rag.collections.export_archive("notes", tmp_path / "notes.tar")
    streamed = b"".join(rag.collections.stream_archive("notes"))
    assert streamed == (tmp_path / "notes.tar").read_bytes()


def test_an_interrupted_import_goes_on(
    archive: Path, other: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = other.internals.shared.store
    add, calls = store.add_states, count()

    def fail_late(found: dict[str, object], request: object) -> None:
        if next(calls) >= 4:
            raise OSError("no power")
        add(found, request)  # type: ignore[arg-type]

    monkeypatch.setattr(collection_import, "_PORTION", 1)
    monkeypatch.setattr(store, "add_states", fail_late)
    with pytest.raises(OSError, match="no power"):
        other.collections.import_archive(archive)
    assert other.collections.page().items == ()
    assert verify(store).interrupted == {"collection notes": 6}
    monkeypatch.setattr(store, "add_states", add)
    done = other.collections.import_archive(archive)
    assert (done.states, done.known) == (2, 4)
    assert verify(store).interrupted == {}
    assert verify(store).found == ()


@pytest.mark.slow
def test_a_killed_import_leaves_nothing_half_visible(
    archive: Path, tmp_path: Path, model: LoadedModel
) -> None:
    """Killed at each report and some moments later, as often as an import ends before."""
    rng, states, ends = random.Random(3), tmp_path / "state", 0

    def work(tell: Callable[[str], None]) -> None:
        with open_folder(states, model) as rag:
            rag.collections.import_archive(archive, report=lambda *each: tell(f"{each}"))
        tell("done")

    for turn in range(24):
        told = run_and_kill(work, rng.uniform(0, 0.03), turn % 12)
        assert not [line for line in told if line.startswith("failed")], told
        with open_folder(states, model) as rag:
            store = rag.internals.shared.store
            visible = {row.name: row.documents for row in rag.collections.page().items}
            assert visible == ({"notes": 3} if visible else {})
            assert "done" not in told or visible
            assert verify(store).found == ()
            assert not list(states.glob("states/??/*.part"))
            if visible:
                ends += 1
                assert rag.stats().tiers["disk"]["states"] >= 6
                assert count_originals(rag) == 1
                rag.collections.delete("notes")
            assert count_originals(rag) == 0
    with open_folder(states, model) as rag:
        done = rag.collections.import_archive(archive)
        assert done.states + done.known == 6
        assert verify(rag.internals.shared.store).interrupted == {}
    assert ends


@pytest.mark.slow
def test_a_canceled_import_stores_no_document(
    archive: Path, other: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache.errors import JobCanceled

    store = other.internals.shared.store
    add = store.add_states

    def cancel(*each: object) -> None:
        add(*each)  # type: ignore[arg-type]
        for job in store.jobs.listed():
            store.jobs.cancel(job.id)

    monkeypatch.setattr(store, "add_states", cancel)
    with pytest.raises(JobCanceled):
        other.collections.import_archive(archive)
    assert other.collections.page().items == ()
