"""Shared by all tests: the embedded reader, an empty ledger, documents to ask. The heavy libraries
are imported where they are used: the process that hands tests to others needs none."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from inspect import signature
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from _pytest import runner
from hypothesis import settings

if TYPE_CHECKING:
    from ragcache.db import Database
    from ragcache.models import LoadedModel

# One thread a process: several would wait for each other in busy loops on the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process compiles by itself: starting processes for it takes longer than what tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# No test is timed: what an example takes says more of the machine. `make test-all` runs every
# example (`--hypothesis-profile full`) and the tests with the mark `nightly`, `.ci/run` a quarter
# of the examples (`quick`), `make test` a tenth.
FULL = 100  # examples of a property in the profile `full`, Hypothesis's own number
for _name, _examples in (("full", FULL), ("quick", 25), ("brief", 10)):
    settings.register_profile(_name, deadline=None, max_examples=_examples)
settings.load_profile("brief")


def scaled(examples: int, quick: float = 0.25) -> int:
    """The share of a test's own number of examples that the profile runs.

    Args:
        examples: The number under the profile `full`.
        quick: The share under `quick`. `brief` runs two fifths of it.
    """
    number = settings().max_examples
    return ceil(examples * (1 if number >= FULL else quick * number / 25))


REPOSITORY = Path(__file__).parent.parent

# Kernels run in Triton's interpreter, which must be chosen before anything imports triton. Where
# there is a GPU they are compiled, and `tests/gpu` runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Collecting tests makes no garbage worth looking for, nor does handing them out. What is
    registered first runs last: pytest-xdist has sent all results by then."""
    gc.disable()
    if hasattr(config, "workerinput"):
        atexit.register(_end_at_once)


def _end_at_once() -> None:
    """Ends a process of tests when all else has ended, without taking its modules apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_test(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return runner.pytest_runtest_protocol(item, nextitem)


# Python keeps the frames of calls in chunks of 16 KiB. A loop at the end of a chunk maps and unmaps
# the next one with each call. A frame this large gets a chunk of its own size, whose other half
# holds the frames of a test.
_run_test.__code__ = _run_test.__code__.replace(co_stacksize=2**17)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, in a frame that has room for all others."""
    return _run_test(item, nextitem)


WAITING = ("cluster", "page")
"""Folders of tests that mostly wait, for other machines and for a browser."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that mostly wait come first, while others use the processors. Those of the night need
    the profile `full`."""
    if settings().max_examples < FULL:
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]

    def place(item: pytest.Item) -> int:
        folders = item.nodeid.split("/")
        return next((n for n, name in enumerate(WAITING) if name in folders), len(WAITING))

    items.sort(key=place)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders whose tests are all slow, and whose libraries `make test` need not import; and the
    clients, which are installed from package registries."""
    slow = (REPOSITORY / "tests/cluster", REPOSITORY / "tests/api/page")
    expression, clients = config.option.markexpr, REPOSITORY / "tests/clients"
    if collection_path == clients and expression not in ("clients", "official"):
        return True
    return True if expression == "not slow" and collection_path in slow else None


def pytest_collectstart() -> None:
    """Sets the threads of torch, where tests are collected rather than handed out."""
    import_module("tests.tiny_models")


def write_notes(folder: Path) -> Path:
    """Makes a folder of three small documents."""
    folder.mkdir()
    texts = {
        "boats.md": "# Boats\n\nThe survey boat Pipit is moored at the north quay. Its engine was "
        "serviced by Marta Quill in March.",
        "keys.md": "# Keys\n\nThe spare key of the boathouse hangs in the red cupboard. Ask Tom "
        "Hartley before you borrow it.",
        "leave.md": "# Leave\n\nEverybody has 26 days of leave a year. Requests go to Ines Marlow "
        "two weeks ahead.",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return write_notes(tmp_path / "notes")


@pytest.fixture(scope="session")
def float_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded reader's folder with float32 weights: processors without AVX-512 multiply
    bfloat16 at a fraction of the speed."""
    import torch
    from safetensors.torch import load_file, save_file

    from ragcache.models.loader import READER
    from ragcache.models.reader import dequantize_rows

    folder = tmp_path_factory.mktemp("model") / "reader"
    shutil.copytree(READER, folder)
    weights = dequantize_rows(load_file(READER / "model.safetensors"), torch.float32)
    floats = {name: weight.float() for name, weight in weights.items()}
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"int8_rows": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _default_model(float_reader: Path) -> Iterator[None]:
    """Make folders that are opened without a model share one reader in float32."""
    from ragcache import opening
    from ragcache.models import load_model, loader

    default = cache(load_model)
    usual = {each.name: each.default for each in signature(load_model).parameters.values()}

    def load(name: str | Path | None = None, *, recall: Any, **options: Any) -> LoadedModel:
        if usual | {"name": name} | options == usual:
            return default()
        return load_model(name, recall=recall, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "READER", float_reader)
        patch.setattr(opening, "load_model", load)
        yield


@pytest.fixture(scope="session", autouse=True)
def _checkpoints_are_kept_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files that are kept of the checkpoints of tests are not kept beyond the session."""
    from ragcache.models import plain_checkpoint

    kept = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_checkpoint, "kept_folder", lambda: kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def _modes_are_forced() -> Iterator[None]:
    """No folder of a test measures modes before it answers, nor do the programs that tests start;
    those of the gate say `force_modes=False`."""
    from ragcache import rag

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rag, "OpenConfig", partial(rag.OpenConfig, force_modes=True))
        patch.setenv("RAGCACHE_FORCE_MODES", "1")
        yield


@pytest.fixture(scope="session")
def reader(_default_model: None) -> LoadedModel:
    """The embedded reader, loaded once. Tests may not depend on what it answers."""
    from ragcache.models import load_model

    return load_model()


@pytest.fixture(scope="session")
def tiny_reader(reader: LoadedModel) -> LoadedModel:
    """A tiny random model behind the embedded reader's tokenizer, made once."""
    from ragcache.models import LoadedModel, wrap_causal
    from tests.tiny_models import tiny_model

    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer)))
    return LoadedModel("tiny", causal, reader.tokenizer)


@pytest.fixture(scope="session")
def quick_reader(reader: LoadedModel) -> LoadedModel:
    """The reader with a tiny random model, for services whose answers do not matter."""
    from ragcache.models import wrap_causal
    from tests.tiny_models import tiny_model

    size = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": reader.causal.window}
    return replace(reader, causal=wrap_causal(tiny_model("llama", **size)))


@pytest.fixture(scope="session", autouse=True)
def _statements_are_compiled_once() -> Iterator[None]:
    """All SQLite ledgers share the dialect of the first, and the statements compiled for it."""
    from sqlalchemy import create_engine

    from ragcache.db import database

    shared: list[tuple[Any, Any]] = []

    def create(url: str, **options: Any) -> Any:
        engine = create_engine(url, **options)
        if engine.dialect.name == "sqlite":
            shared.append((engine.dialect, engine._compiled_cache))
            engine.dialect, engine._compiled_cache = shared[0]
            del shared[1:]
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "create_engine", create)
        yield


@pytest.fixture(scope="session")
def empty_ledger(
    _statements_are_compiled_once: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A SQLite ledger as migrations leave it."""
    from ragcache.db import Database

    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    Database.open(path).close()
    return path


@pytest.fixture(autouse=True)
def _new_ledgers_are_copies(empty_ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new SQLite ledger is copied rather than migrated; tests of migrations override this."""
    from ragcache.db import Database

    really_open = Database.open

    def open_copy(where: Path | str, **options: Any) -> Database:
        if isinstance(where, Path) and where.parent.is_dir() and not where.exists():
            copy = Path(shutil.copy(empty_ledger, where.with_name(f"{where.name}-{uuid4().hex}")))
            with suppress(FileExistsError):  # another thread was first
                os.link(copy, where)
            copy.unlink()
        return really_open(where, **options)

    monkeypatch.setattr(Database, "open", open_copy)


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """For tests that often collect garbage: what other tests left is looked through once."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Exempt the objects that collecting made from garbage collection, until the interpreter ends.

    Later collections are a tenth as many: tests make many objects that live as long as a fixture.
    """
    gc.freeze()
    atexit.register(_unfreeze)
    gc.set_threshold(7_000, 10, 20)
    gc.enable()


_unfreeze, _were_unfrozen = gc.unfreeze, threading.Event()


def _note_and_unfreeze() -> None:
    _were_unfrozen.set()
    _unfreeze()


gc.unfreeze = _note_and_unfreeze


def pytest_runtest_logfinish() -> None:
    """Exempt all objects again after an engine has ended, which includes them in collections.

    Each full collection takes a second otherwise, in all later tests of the process.
    """
    if _were_unfrozen.is_set():
        _were_unfrozen.clear()
        gc.freeze()


def pytest_sessionfinish() -> None:
    if forks := sys.modules.get("tests.forks"):
        forks.end_forks()
