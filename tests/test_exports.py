"""Exports and imports of the packages, the configuration, the OpenMP workers, and doctests."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

import pytest

import ragcache
import ragcache_schemas
from ragcache import errors
from ragcache.config import parse_bytes
from ragcache.errors import ConfigurationError
from ragcache.openmp import _pause
from ragcache_schemas import layout, parser, text

PACKAGES = (
    "attention documents engine models pipeline recognition retrieval states store structured"
).split()
PUBLIC = (
    "Answer AnswerSpan AnswerStream AsyncAnswerStream AsyncRagCache Citation GenerationParams "
    "Ingestion RagCache Reuse ReuseMode SourceDocument Timings"
).split()


PRINTING = set(
    "annotated_doc attr click markdown_it mdurl pygments rich shellingham typer "
    "typing_extensions".split()
)
"""Libraries that read a command line and print its help."""


def loaded_by(*programs: str) -> list[set[str]]:
    """Return the imports of a fresh process after each of the programs, one after another."""
    show = "print(*sys.modules)"
    lines = "\n".join(f"{program}\n{show}" for program in programs)
    command = [sys.executable, "-c", f"import sys\n{lines}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [set(line.split()) for line in out.splitlines()]


def foreign(loaded: set[str]) -> set[str]:
    """Imports that belong neither to ragcache nor to Python."""
    tops = {name.partition(".")[0] for name in loaded}
    ours = {name for name in tops if name.startswith(("ragcache", "_", "__editable__"))}
    return tops - ours - sys.stdlib_module_names


def test_importing_ragcache_loads_no_library() -> None:
    [loaded] = loaded_by("import ragcache")
    assert "ragcache" in loaded
    assert foreign(loaded) == set()
    assert not loaded & {"asyncio", "multiprocessing", "sqlite3", "ssl", "unittest"}


def test_help_loads_only_what_prints_it() -> None:
    [loaded] = loaded_by(
        "import contextlib, io\n"
        "from ragcache_api.cli.main import main\n"
        "sys.argv = ['ragcache', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "assert 'ingest' in out.getvalue()"
    )
    assert "ragcache_api.cli.main" in loaded
    assert foreign(loaded) <= PRINTING
    assert not loaded & {"asyncio", "multiprocessing", "sqlite3", "ssl", "unittest"}


def test_the_public_names_are_these() -> None:
    assert ragcache.__all__ == [*PUBLIC, *errors.__all__]
    assert set(errors.__all__) == {
        name for name, each in vars(errors).items() if inspect.isclass(each)
    }
    for name in ragcache.__all__:
        assert getattr(ragcache, name).__name__ == name
        assert name in dir(ragcache)


def test_the_version_is_that_of_the_distribution() -> None:
    assert ragcache.__version__ == version("ragcache")


def test_errors_are_public_names_of_the_package() -> None:
    assert ragcache.PromptTooLong is errors.PromptTooLong
    assert not {"torch", "sqlalchemy"} & loaded_by("from ragcache import PromptTooLong")[0]


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ragcache' has no attribute 'RagCash'"):
        _ = ragcache.RagCash


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_what_it_exports(package: str) -> None:
    module = import_module(f"ragcache.{package}")
    constants_first = sorted(module.__all__, key=lambda name: (not name.isupper(), name))
    assert module.__all__ == constants_first
    for name in module.__all__:
        assert hasattr(module, name), name


def test_every_error_is_drawn_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    classes = [v for v in vars(errors).values() if isinstance(v, type)]
    assert len(classes) > 10
    for error in classes:
        assert issubclass(error, errors.RagCacheError)
        assert error.__doc__
        assert f" {error.__name__}" in tree


@pytest.mark.slow
def test_a_package_loads_no_library_that_it_does_not_use() -> None:
    """Each line is imported after those before it: what is missing then, none of them loads."""
    engine, pipeline, whole = loaded_by(
        "import ragcache.attention, ragcache.models, ragcache.engine",
        "import ragcache.structured, ragcache.pipeline",
        "from ragcache import RagCache",
    )
    stores = set(
        "sqlalchemy faiss tantivy langchain_core langchain_text_splitters lxml typer rich".split()
    )
    assert engine & (stores | {"torch"}) == {"torch"}
    assert pipeline & {"llguidance", "torch"} == {"torch"}
    assert "torch" in whole


OF_TYPER = {
    *(
        "annotated_doc attr attrs click colorama markdown_it mdurl pygments rich shellingham"
    ).split(),
    *("typer typing_extensions").split(),
}
PRINT_HELP = """
from ragcache_api.cli.main import main
sys.argv, out, sys.stdout = ["ragcache", "--help"], sys.stdout, __import__("io").StringIO()
try:
    main()
except SystemExit:
    sys.stdout = out
"""


def test_the_help_is_printed_by_typer_and_no_other_library() -> None:
    [loaded] = loaded_by(PRINT_HELP)
    assert "typer" in loaded
    assert foreign(loaded) <= OF_TYPER


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1048576, 1048576),
        ("1048576", 1048576),
        ("12B", 12),
        ("8GiB", 8 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5kib", 1536),
        ("0.5 TiB", 2**39),
        (" 3 kb ", 3000),
        ("2gb", 2_000_000_000),
        ("1TB", 10**12),
        ("7MiB", 7 * 2**20),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GiB", "8 Gib s", "-1GiB", "1,5GiB", "8 gigs", "1e9", "."])
def test_other_sizes_are_refused_with_an_example(size: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(size)
    assert str(caught.value) == f"cannot read the size {size!r}; write it like 8GiB or 512MB"


SETTLED = """
import os, time, torch
def tasks(): return len(os.listdir("/proc/self/task"))
def settled(most):
    until = time.monotonic() + 30
    while tasks() > most and time.monotonic() < until:
        time.sleep(0.01)
    return tasks()
"""
"""Threads of a process; those above `most` are waited for, which end when they get to run."""
SCRIPT = f"""{SETTLED}
from ragcache.openmp import _pause, give_workers_back
torch.set_num_threads(3)
give_workers_back()
before = tasks()
product = torch.ones(512, 512) @ torch.ones(512, 512)
torch.ones(10**6).exp_()
working = tasks()
give_workers_back()
print(_pause() is not None, working > before, settled(before) <= before, float(product[0, 0]))
torch.ones(10**6).exp_()
print("again")
"""


@pytest.mark.slow
def test_workers_are_given_back_and_come_again() -> None:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    here, worked, gone, product = out[0].split()
    assert product == "512.0"
    if here == "True":
        assert worked == "True"
        assert gone == "True"
    assert out[1] == "again"


IMPORTING = """
import os, sys
import ragcache
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_importing_bounds_spinning_before_torch_is_there(given: dict[str, str], spins: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    out = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True, timeout=120,
        env={**environment, **given},
    ).stdout.split()  # fmt: skip
    assert out == ["False", spins]


STORING = f"""{SETTLED}
from ragcache.openmp import give_workers_back
from ragcache.states import KVKey, KVStates
from ragcache.states.serialization import blob_parts
from ragcache.states.quantization import quantize
from ragcache.store.tiers.host import HostTier
torch.set_num_threads(3)
alone = tasks()
plain = torch.ones(8, 4, 64, 512).transpose(2, 3)
states = KVStates(plain, plain, 0)
key = KVKey("ab" * 16)
torch.ones(10**6).exp_()
print(tasks() - alone)
give_workers_back()
settled(alone)
for step in (
    lambda: HostTier(2**30).put(key, states), lambda: blob_parts(key, states),
    lambda: quantize(states, "int8"), lambda: quantize(states, "int8").restore(),
):
    step()
    print(settled(alone) - alone)
"""


@pytest.mark.slow
def test_threads_that_copy_states_keep_no_workers() -> None:
    out = subprocess.run(
        [sys.executable, "-c", STORING], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    if _pause() is not None:
        assert int(out[0]) > 0, "workers can be counted"
        assert out[1:] == ["0"] * 4


def test_exported_names_of_the_language_exist() -> None:
    assert sorted(ragcache_schemas.__all__) == ragcache_schemas.__all__
    assert all(hasattr(ragcache_schemas, name) for name in ragcache_schemas.__all__)


def test_functions_and_classes_of_the_language_have_docstrings() -> None:
    for name in ragcache_schemas.__all__:
        thing = getattr(ragcache_schemas, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name


def test_the_language_loads_no_torch_database_or_network() -> None:
    [loaded] = loaded_by("import ragcache_schemas")
    assert "ragcache_schemas" in loaded
    assert not loaded & {"torch", "transformers", "sqlalchemy", "numpy", "urllib.request"}


@pytest.mark.parametrize("module", [layout, parser, text])
def test_docstring_examples_of_the_language(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
