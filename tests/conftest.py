"""Shared by all tests: tiny random models of every family, and documents to ask."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ragcache import rag
from ragcache.db import Database
from ragcache.models import CausalLM, LoadedModel, load_model, loader, wrap_causal
from ragcache.models.loader import READER

# Models this small gain nothing from threads, which lose much time waiting on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test is timed: what an example takes says more of the machine. `make test-all` runs every
# example (`--hypothesis-profile full`).
settings.register_profile("full", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("quick")


def scaled(examples: int) -> int:
    """The share of a test's own number of examples that the profile runs: a quarter, or all."""
    return ceil(examples * settings().max_examples / 100)


# RAGCACHE_TEST_DEVICE=cuda runs the tests of attention, models and engine on a GPU.
DEVICE = os.environ.get("RAGCACHE_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

REPOSITORY = Path(__file__).parent.parent
VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
_UNDROPPED: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
# What each family's tiny model has beyond _SIZES. BLOOM and MPT name their window otherwise.
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "mistral": (MistralConfig, {**_GROUPED, "sliding_window": None}),
    "qwen2": (Qwen2Config, _GROUPED),
    "qwen3": (Qwen3Config, _GROUPED),
    "phi": (PhiConfig, {"intermediate_size": 96, "num_key_value_heads": 2}),
    "phi3": (Phi3Config, {"intermediate_size": 96, "num_key_value_heads": 2}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 96}),
    "falcon-7b": (FalconConfig, {"multi_query": True}),
    "falcon-40b": (FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": (
        FalconConfig,
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": (MptConfig, {"max_seq_len": 512}),
    "bloom": (BloomConfig, {"seq_length": 512}),
    "gpt2": (GPT2Config, _UNDROPPED),
    "opt": (OPTConfig, {"ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 32}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Two layers, four query heads over four, two or one key heads."""
    kind, own = _FAMILIES[family]
    return kind(**{**_SIZES, **own, **changes})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Hugging Face model with random weights, the same on every device, not yet patched."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return model.to(DEVICE, dtype).eval()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator, device="cpu").tolist()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[name for name in FAMILIES if name not in ("gpt2", "opt")])
def movable_family(request: pytest.FixtureRequest) -> str:
    """The families whose states may stand elsewhere than where they were encoded."""
    return str(request.param)


@pytest.fixture
def causal() -> CausalLM:
    """A patched tiny Llama."""
    return wrap_causal(tiny_model("llama"))


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
    folder = tmp_path_factory.mktemp("model") / "reader"
    shutil.copytree(READER, folder)
    weights = load_file(READER / "model.safetensors")
    floats = {name: weight.float() for name, weight in weights.items()}
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), "utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _default_model(float_reader: Path) -> Iterator[None]:
    """What is opened without a model reads with float32 too, and shares one reader."""
    default = cache(load_model)

    def load(name: str | Path | None = None) -> LoadedModel:
        return default() if name is None else load_model(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "READER", float_reader)
        patch.setattr(rag, "load_model", load)
        yield


@pytest.fixture(scope="session")
def reader(_default_model: None) -> LoadedModel:
    """The embedded reader, loaded once. Tests may not depend on what it answers."""
    return load_model()


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite ledger as migrations leave it."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    Database.open(path).close()
    return path


@pytest.fixture(autouse=True)
def _new_ledgers_are_copies(empty_ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new SQLite ledger is copied rather than migrated; tests of migrations override this."""
    really_open = Database.open

    def open_copy(where: Path | str, **options: Any) -> Database:
        if isinstance(where, Path) and where.parent.is_dir() and not where.exists():
            copy = Path(shutil.copy(empty_ledger, where.with_name(f"{where.name}-{uuid4().hex}")))
            with suppress(FileExistsError):  # another thread was first
                os.link(copy, where)
            copy.unlink()
        return really_open(where, **options)

    monkeypatch.setattr(Database, "open", open_copy)


def pytest_collection_finish() -> None:
    """What collecting made stays; no later collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
