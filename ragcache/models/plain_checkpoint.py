"""Checkpoints that open without transformers, by what transformers once made of their files.

How a configuration is completed, and which tokenizer a checkpoint's files make, is transformers' to
say. `keep_plain` asks it at the first opening, and keeps the answers in the cache folder: the
complete configuration, the frequencies of the positions, the tokens that end an answer, and the
tokenizer as one file. Later openings read them there (`find_plain`). Keys of states are the same as
with transformers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import cached_assets_path
from safetensors import safe_open
from torch import Tensor

from ragcache.errors import UnsupportedModel
from ragcache.files import sync
from ragcache.models.dtype import AUTO, Recall
from ragcache.models.model import content_digests, distinct_weights
from ragcache.models.packed import required_kernels
from ragcache.models.plain import HEAD, PlainConfig, PlainForCausalLM, PlainLM, unknown_entry
from ragcache.models.plain_tokenizer import (
    RENAMED,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    PlainTokenizer,
    renders,
)
from ragcache.models.quantized import auto_quantization, check_gain, load_quantized
from ragcache.models.tokenizer import (
    TOKENIZING,
    control_names,
    control_tokens,
    renamed_spec,
    tokenizer_fingerprint,
)

logger = logging.getLogger(__name__)

KEEPING = 2
"""Version of kept files. Raise it if other files are kept, or other checkpoints are plain."""
_MODEL, _DIGESTS = "model.json", "digests.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True, eq=False)
class PlainCheckpoint:
    """A checkpoint that opens without transformers."""

    folder: Path
    """Folder of the weights."""
    kept: Path
    """Folder of the kept files."""
    entries: Mapping[str, Any]
    """The contents of `model.json` there."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self.entries["config"]["dtype"])
        return dtype

    def read_tokenizer(self) -> PlainTokenizer:
        return PlainTokenizer(self.kept, self.folder)

    def read_model(
        self, dtype: torch.dtype | None, quantization: str | None, recall: Recall
    ) -> tuple[PlainForCausalLM, str | None]:
        """Read the model, and the quantization that `auto` stands for.

        Args:
            dtype: Dtype of the computation. Defaults to the weights'.
            quantization: `int8`, `int4`, `auto`, or none.
            recall: Keeps times for later processes.

        Raises:
            UnsupportedModel: Most weights would not be quantized.
            ConfigurationError: This machine has no products of packed weights.
        """
        empty = self._new_model()
        if quantization == AUTO:
            quantization = auto_quantization(
                empty, dtype or self.dtype, recall, lambda: check_gain(empty)
            )
        if quantization is None:
            model = self._read(dtype or self.dtype)
            if model.dtype == self.dtype:
                model.content_digests = self._digests(model)
            return model, None
        required_kernels()
        check_gain(empty)
        read = partial(self._read, self.dtype)
        return load_quantized(self.folder, quantization, read, self._filled), quantization

    def _new_model(self) -> PlainForCausalLM:
        frequencies = torch.tensor(self.entries["inverse_frequency"], dtype=torch.float32)
        config = PlainConfig(**self.entries["config"])
        return PlainForCausalLM(config, frequencies, self.entries["eos_token_id"])

    def _filled(self, weights: Mapping[str, Tensor]) -> PlainForCausalLM:
        """A model of all weights that are not packed."""
        model = self._new_model()
        model.load_weights(weights, complete=False)
        return model

    def _read(self, dtype: torch.dtype) -> PlainForCausalLM:
        """The model of the checkpoint. Its weights are mapped, if they are in `dtype`."""
        model, weights = self._new_model(), dict[str, Tensor]()
        for file in _weight_files(self.folder):
            with safe_open(file, "pt") as opened:
                weights |= {name: opened.get_tensor(name).to(dtype) for name in opened.keys()}  # noqa: SIM118
        model.load_weights(weights)
        return model

    def _digests(self, model: PlainForCausalLM) -> dict[str, bytes]:
        """Digests of all weights in their own dtype, which are computed once and kept."""
        file = self.kept / _DIGESTS
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return {name: bytes.fromhex(each) for name, each in found.items()}
        except (OSError, ValueError):
            digests = content_digests(distinct_weights(model))
        part = file.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):
            text = json.dumps({name: each.hex() for name, each in digests.items()})
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        return digests


def kept_folder() -> Path:
    """The folder of kept files, beside packed weights. It may be deleted at any time."""
    return cached_assets_path("ragcache", namespace="models", subfolder="plain")


def find_plain(folder: Path) -> PlainCheckpoint | None:
    """A checkpoint that was kept before, unless its files or transformers have changed since.

    Args:
        folder: Folder of the checkpoint.
    """
    kept = _place(folder)
    entries = _read_entries(kept)
    return None if entries is None else PlainCheckpoint(folder, kept, entries)


def keep_plain(folder: Path, tokenizer: Any, config: Any) -> PlainCheckpoint | None:
    """Keep what transformers makes of a checkpoint, if it can be opened without.

    The plain model is tried as families are (`ragcache.models.trial`).

    Args:
        folder: Folder of the checkpoint.
        tokenizer: Tokenizer of transformers.
        config: Configuration of transformers.

    Returns:
        The checkpoint. None if the plain model does not know an entry of the configuration or a
        weight, the tokenizer is one of its own kind, or the cache folder cannot be written.
    """
    if not (_is_plain_tokenizer(tokenizer) and _has_plain_weights(folder, config)):
        return None
    try:
        entries = _describe(folder, config)
        _write(_place(folder), tokenizer, entries)
    except (UnsupportedModel, OSError) as error:
        logger.warning("%s is opened by transformers each time: %s", folder, error)
        return None
    return find_plain(folder)


def plain_causal(model: Any) -> PlainLM:
    """A plain model with the weights of a model of transformers."""
    plain = PlainForCausalLM(_plain_config(model.config), model.base_model.rotary_emb.inv_freq)
    plain.load_weights(model.state_dict())
    return PlainLM(plain)


def _describe(folder: Path, config: Any) -> dict[str, Any]:
    """The contents of `model.json`. Raises `UnsupportedModel` if the plain model answers otherwise
    than transformers'."""
    from transformers import GenerationConfig

    from ragcache.models.checkpoint import text_class
    from ragcache.models.trial import try_family

    kind = text_class(config)
    try_family(kind, config, plain_causal)
    with torch.device("meta"):
        rotary = type(kind(config).base_model.rotary_emb)
    positions = rotary(config=config)
    if positions.attention_scaling != 1:
        raise UnsupportedModel("the scaling of its positions has a factor")
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # there is no file
        ends = config.eos_token_id
    return {
        "config": vars(_plain_config(config)),
        "inverse_frequency": positions.inv_freq.tolist(),
        "eos_token_id": ends if isinstance(ends, list) or ends is None else [ends],
    }


def _plain_config(config: Any) -> PlainConfig:
    """The entries of a configuration as JSON holds them."""
    return PlainConfig(**json.loads(json.dumps(config.to_dict(), default=str)))


def _is_plain_tokenizer(tokenizer: Any) -> bool:
    """Whether `tokenizers` alone gives the tokens and texts of a tokenizer of transformers."""
    from transformers import TokenizersBackend

    kind, template = type(tokenizer), getattr(tokenizer, "chat_template", None)
    if not issubclass(kind, TokenizersBackend):
        return False
    special = kind.mro()[: kind.mro().index(TokenizersBackend)]
    methods = {
        name for each in special for name, value in vars(each).items() if callable(value)
    } - {"__init__", "model"}
    backend = tokenizer.backend_tokenizer
    return (
        not methods
        and not any((tokenizer.split_special_tokens, tokenizer.clean_up_tokenization_spaces))
        and backend.padding is None
        and backend.truncation is None
        and (template is None or (isinstance(template, str) and renders(template)))
        and all(backend.token_to_id(each) is not None for each in tokenizer.all_special_tokens)
    )


def _has_plain_weights(folder: Path, config: Any) -> bool:
    """Whether the files of a checkpoint hold the plain model's weights, and nothing else."""
    if config.get_text_config(decoder=True) is not config or config.dtype is None:
        return False
    plain = _plain_config(config)
    if unknown_entry(plain) is not None:
        return False
    wanted = {name: list(each.shape) for name, each in PlainForCausalLM(plain).state_dict().items()}
    if plain.tie_word_embeddings:
        del wanted[HEAD]
    held: dict[str, list[int]] = {}
    for file in _weight_files(folder):
        if not file.exists():
            return False
        with safe_open(file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            if not {part.get_dtype() for part in parts.values()} <= _FLOATS:
                return False
            held |= {name: part.get_shape() for name, part in parts.items()}
    return held == wanted


def _weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, as transformers chooses them."""
    index = folder / _INDEX
    if (folder / _WEIGHTS).exists() or not index.exists():
        return [folder / _WEIGHTS]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def _place(folder: Path) -> Path:
    """The folder of a checkpoint's kept files: a digest of the names, sizes and times of all files
    of the checkpoint, and of the versions of the libraries that read them."""
    versions = f"{KEEPING}|{TOKENIZING}|{version('transformers')}|{version('tokenizers')}"
    digest = xxhash.xxh3_128(f"{versions}|{folder.resolve()}".encode())
    for file in sorted(folder.iterdir()):
        if file.is_file():
            status = file.stat()
            digest.update(f"|{file.name}|{status.st_size}|{status.st_mtime_ns}".encode())
    return kept_folder() / digest.hexdigest()


def _read_entries(kept: Path) -> dict[str, Any] | None:
    """The contents of `model.json`, if it is there and whole."""
    try:
        entries: dict[str, Any] = json.loads((kept / _MODEL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entries


def _write(kept: Path, tokenizer: Any, entries: Mapping[str, Any]) -> None:
    """Write the files under another name first. Raises `OSError`."""
    backend, secret = tokenizer.backend_tokenizer, secrets.token_hex(8)
    renamed = renamed_spec(backend, control_names(control_tokens(tokenizer), secret))
    settings = {
        **tokenizer.special_tokens_map,
        "all_special_tokens": tokenizer.all_special_tokens,
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "secret": secret,
    }
    part = kept.with_suffix(f".{os.getpid()}.part")
    try:
        part.mkdir()
        backend.save(str(part / TOKENIZER), pretty=False)
        (part / RENAMED).write_text(renamed, encoding="utf-8")
        (part / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        if tokenizer.chat_template is not None:
            (part / TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
        (part / _MODEL).write_text(json.dumps(entries), encoding="utf-8")
        for written in (*part.iterdir(), part):
            sync(written)
        if _read_entries(kept) is None:  # no other process was quicker
            shutil.rmtree(kept, ignore_errors=True)
            part.rename(kept)
    finally:
        shutil.rmtree(part, ignore_errors=True)
